"""The records that travel between stages. Everything belonging to one sample is one record, keyed by its id.

Torch-free: token data are numpy arrays; tensors are made where a model needs them.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

FinishReason = Literal["stop", "length"]
VerdictKind = Literal["scored", "abstained", "failed"]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question.

    id: unique within a run; siblings are grouped by it, never by position or by text.
    task: name of the task it came from.
    messages: the chat, in order.
    answer: gold answer(s) as the verifier wants it; None where the verifier needs none.
    payload: what else the verifier needs (a reasoning-gym item, the remaining fields of a row).
    verifier: name of the verifier that judges it, in the registry of the run's task set.
    prefix: text that the prompt already wrote for the assistant (a prefilled "<think>", say).
    preference: a better and a worse answer, where the row gives them.
    """

    id: str
    task: str
    messages: tuple[Message, ...]
    answer: Any
    verifier: str
    payload: dict[str, Any] = field(default_factory=dict)
    prefix: str = ""
    preference: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier said of one sample.

    kind "scored": `score` is a finite number. "abstained": the verifier has no opinion.
    "failed": the verifier raised, or returned None, NaN or another type; `reason` says which.
    Abstained and failed samples show reward 0 and are kept out of group statistics and of the loss.
    detail: for scored samples "correct", "partial", "wrong" or "no_answer".
    parts: named parts of the score, for display.
    """

    kind: VerdictKind
    score: float
    reason: str = ""
    detail: str = ""
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def is_scored(self) -> bool:
        return self.kind == "scored"


@dataclass(slots=True)
class Sample:
    """One completion of one prompt, with what was recorded when each token was sampled.

    R = number of response tokens. The ids are those that were sampled; they are never rebuilt from text.
    response_ids_R int32, rollout_logprobs_R float32 (natural log, under the sampling temperature),
    versions_R int32 (policy version that sampled the token), response_mask_R bool (True: the model wrote it).
    finish: "stop" (a stop token was sampled; it is the last id), "length" (cut at the limit).
    seed: seed of this sample's random stream.
    reward_scores: what reward models said, by their names. outcome: verifier and reward models together, weighted;
    None where the verifier alone decides. shaping: what is added to the outcome, by kind.
    experts_TLK: with rollout.record_experts, the K experts that each of the L routing layers chose at each of the
    T = prompt + R - 1 tokens that the model has seen, so that training can route alike; else None.
    """

    id: str
    prompt: Prompt
    prompt_ids: tuple[int, ...]
    response_ids_R: NDArray[np.int32]
    rollout_logprobs_R: NDArray[np.float32]
    versions_R: NDArray[np.int32]
    response_mask_R: NDArray[np.bool_]
    finish: FinishReason
    seed: int
    text: str
    verdict: Verdict | None = None
    reward_scores: dict[str, float] = field(default_factory=dict)
    outcome: float | None = None
    shaping: dict[str, float] = field(default_factory=dict)
    experts_TLK: NDArray[np.int16] | None = None

    @property
    def num_response_tokens(self) -> int:
        return len(self.response_ids_R)

    @property
    def num_loss_tokens(self) -> int:
        """Response tokens that the model wrote: those a loss may use."""
        return int(self.response_mask_R.sum())

    @property
    def score(self) -> float:
        """What the verifier said, or 0 for a sample that was not scored. Accuracy is made of it."""
        assert self.verdict is not None, f"sample {self.id} was not scored yet"
        return self.verdict.score if self.verdict.is_scored else 0.0

    @property
    def unshaped_reward(self) -> float:
        """The reward before shaping: what decides whether a group has signal."""
        return self.outcome if self.outcome is not None and self.is_scored else self.score

    @property
    def reward(self) -> float:
        """What advantages are made of; 0 for a sample that was not scored."""
        if not self.shaping or not self.is_scored:
            return self.unshaped_reward
        return self.unshaped_reward + sum(self.shaping.values())

    @property
    def is_scored(self) -> bool:
        assert self.verdict is not None, f"sample {self.id} was not scored yet"
        return self.verdict.is_scored

    @property
    def is_counted(self) -> bool:
        """Whether the sample takes part in group statistics and in the loss."""
        assert self.verdict is not None, f"sample {self.id} was not scored yet"
        return self.verdict.is_scored and bool(self.response_mask_R.any())


@dataclass(slots=True)
class Group:
    """All samples of one prompt in one step. greedy: its completion at temperature 0, where a baseline needs it."""

    prompt: Prompt
    samples: list[Sample]
    greedy: Sample | None = None

    @property
    def has_signal(self) -> bool:
        """Whether the unshaped rewards of the counted samples differ (max minus min, so rounding cannot hide it)."""
        rewards = [s.unshaped_reward for s in self.samples if s.is_counted]
        return len(rewards) >= 2 and max(rewards) > min(rewards)
