"""What a verifier receives and may return. User verifiers import these from `plait.rewards.verifier`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from plait.batch import Prompt, Verdict


@dataclass(frozen=True, slots=True)
class VerifierSample:
    """One completion to be judged.

    id: the sample's id. completion: everything the assistant said, what the prompt prefilled included.
    answer: the committed answer (see `plait.rewards.extract`), None where nothing was committed.
    truncated: generation stopped at the length limit.
    """

    id: str
    prompt: Prompt
    completion: str
    answer: str | None
    truncated: bool


@dataclass(frozen=True, slots=True)
class Abstain:
    """A verifier's result for a sample on which it has no opinion; such a sample takes no part in training."""

    reason: str = ""


ABSTAIN: Final = Abstain()


@dataclass(frozen=True, slots=True)
class Failed:
    """A verifier's result for a sample that it could not judge, with the reason; no part in training."""

    reason: str


VerifierResult = float | Verdict | Abstain | Failed
VerifierFunction = Callable[[Sequence[VerifierSample]], Sequence[VerifierResult]]
"""Takes samples, returns one result per sample, in the same order."""
