"""The prompts of a run, in order, behind one cursor; and the seeds that belong to them."""

import hashlib
from dataclasses import dataclass
from typing import Protocol

from plait.batch import Prompt
from plait.errors import DataError

MAX_DROPPED_IN_A_ROW = 10_000


class PromptSource(Protocol):
    """What a stream draws from: `plait.data.mixture.Mixture`, or a fake in a test."""

    def prompt(self, number: int) -> Prompt: ...


class PromptEncoder(Protocol):
    def encode_prompt(self, prompt: Prompt) -> tuple[int, ...]: ...

    def encode_answer(self, text: str) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt and its token ids. answers: ids of the better and of the worse one, where the row gives them."""

    prompt: Prompt
    ids: tuple[int, ...]
    answers: tuple[tuple[int, ...], tuple[int, ...]] | None = None


class PromptStream:
    """Draws prompts in order. The cursor is all its state: the number of prompts looked at so far.

    A prompt longer than max_prompt_tokens is dropped and counted, or stops the run; it is never cut. The same holds
    for a row of preferences with an answer longer than max_answer_tokens.
    """

    def __init__(
        self,
        source: PromptSource,
        encoder: PromptEncoder,
        *,
        max_prompt_tokens: int,
        max_answer_tokens: int,
        stop_on_overlong: bool,
    ):
        self.cursor = 0
        self.num_dropped = 0
        self._source, self._encoder = source, encoder
        self._max_tokens, self._max_answer_tokens, self._stop = max_prompt_tokens, max_answer_tokens, stop_on_overlong

    def draw(self, count: int) -> list[EncodedPrompt]:
        drawn: list[EncodedPrompt] = []
        dropped_in_a_row = 0
        while len(drawn) < count:
            encoded = self.encode(self._source.prompt(self.cursor))
            self.cursor += 1
            if encoded is not None:
                drawn.append(encoded)
                dropped_in_a_row = 0
                continue
            self.num_dropped += 1
            dropped_in_a_row += 1
            if dropped_in_a_row >= MAX_DROPPED_IN_A_ROW:
                raise DataError(
                    f"{dropped_in_a_row} prompts in a row are longer than rollout.max_prompt_tokens "
                    f"{self._max_tokens}, or their answers than rollout.max_completion_tokens "
                    f"{self._max_answer_tokens}. Raise it, or choose shorter ones"
                )
        return drawn

    def encode(self, prompt: Prompt) -> EncodedPrompt | None:
        """The prompt with its ids, or None where it is too long and overlong prompts are dropped."""
        ids = self._encoder.encode_prompt(prompt)
        if self._is_overlong(f"prompt {prompt.id}", len(ids), "rollout.max_prompt_tokens", self._max_tokens):
            return None
        if prompt.preference is None:
            return EncodedPrompt(prompt, ids)
        better, worse = (self._encoder.encode_answer(text) for text in prompt.preference)
        longest, limit = max(len(better), len(worse)), self._max_answer_tokens
        if self._is_overlong(f"an answer to prompt {prompt.id}", longest, "rollout.max_completion_tokens", limit):
            return None
        return EncodedPrompt(prompt, ids, (better, worse))

    def _is_overlong(self, what: str, num_tokens: int, setting: str, limit: int) -> bool:
        if num_tokens > limit and self._stop:
            raise DataError(
                f"{what} has {num_tokens} tokens, more than {setting} {limit}. "
                'Raise it, or set rollout.overlong_prompts = "drop"'
            )
        return num_tokens > limit


def stream_seed(*key: int | str) -> int:
    """A 63-bit seed from a key such as (run seed, "sample", prompt id, index); equal keys, equal seeds."""
    digest = hashlib.blake2b("\x1f".join(str(part) for part in key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
