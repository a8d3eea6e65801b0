"""Prompts are computed once per group: what they left is kept until every sample of them has a slot.

Shapes: B prompts of one pass, S the longest of them, M key/value heads, H head size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.rollout.kv_slots import KVSlots

Prompt = tuple[int, ...]

MAX_PASS_TOKENS = 8192
"""Tokens of one pass, so that its activations stay bounded whatever is admitted at once."""

AHEAD_TOKENS = 1024
"""Where a pass is needed anyway it is filled up to this with prompts that wait: one pass of many short prompts costs
little more than one of a single prompt."""


@dataclass(frozen=True, slots=True)
class PrefilledPass:
    """What one pass over several prompts left: keys and values [B, S, M, H] per layer, next-token logits [B, V].

    experts: for a mixture of experts, where they are recorded, the chosen ones of each prompt.
    """

    keys: list[Tensor]
    values: list[Tensor]
    logits_BV: Tensor
    experts: list[Tensor] | None = None


Place = tuple[PrefilledPass, int]
"""A pass, and the row of a prompt in it."""


class PromptStore:
    """Prompts that were computed and are still wanted.

    compute: runs one pass over distinct prompts.
    """

    def __init__(self, compute: Callable[[Sequence[Prompt]], PrefilledPass]):
        self._compute = compute
        self._places: dict[Prompt, Place] = {}

    def places(self, wanted: Iterable[Prompt], waiting: Iterable[Prompt]) -> dict[Prompt, Place]:
        """Where each wanted prompt lies. If some must be computed, waiting ones are computed with them."""
        missing = [prompt for prompt in dict.fromkeys(wanted) if prompt not in self._places]
        if missing:
            for prompts in _passes(missing, self._ahead(missing, waiting)):
                done = self._compute(prompts)
                self._places |= {prompt: (done, row) for row, prompt in enumerate(prompts)}
        return self._places

    def keep(self, waiting: Iterable[Prompt]) -> None:
        """Forget every prompt of which no sample waits any more."""
        if self._places:
            wanted = set(waiting)
            self._places = {prompt: place for prompt, place in self._places.items() if prompt in wanted}

    def clear(self) -> None:
        """Forget all: the weights have changed."""
        self._places = {}

    def _ahead(self, missing: list[Prompt], waiting: Iterable[Prompt]) -> list[Prompt]:
        room = AHEAD_TOKENS - sum(map(len, missing))
        ahead: dict[Prompt, None] = {}
        for prompt in waiting:
            if prompt in self._places or prompt in ahead or prompt in missing:
                continue
            room -= len(prompt)
            if room < 0:
                break
            ahead[prompt] = None
        return list(ahead)


def _passes(missing: list[Prompt], ahead: list[Prompt]) -> list[list[Prompt]]:
    """Split into passes of at most MAX_PASS_TOKENS (or one prompt)."""
    passes: list[list[Prompt]] = [[]]
    num_tokens = 0
    for prompt in (*missing, *ahead):
        if passes[-1] and num_tokens + len(prompt) > MAX_PASS_TOKENS:
            passes.append([])
            num_tokens = 0
        passes[-1].append(prompt)
        num_tokens += len(prompt)
    return passes


def fill_slots(slots: KVSlots, targets: Sequence[tuple[int, Place]]) -> Tensor:
    """Copy prompts into slots; their next-token logits [len(targets), V], in the order of the targets."""
    by_pass: dict[int, tuple[PrefilledPass, list[int], list[int]]] = {}
    for slot, (done, row) in targets:
        _, to_slots, from_rows = by_pass.setdefault(id(done), (done, [], []))
        to_slots.append(slot)
        from_rows.append(row)
    for done, to_slots, from_rows in by_pass.values():
        slots.fill(to_slots, from_rows, done.keys, done.values)
    return torch.stack([done.logits_BV[row] for _, (done, row) in targets])
