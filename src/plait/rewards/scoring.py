"""The one way in which a run has its samples judged: by workers, or in this process if it has none."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from plait.batch import Sample, Verdict
from plait.config import VerifiersConfig
from plait.rewards.pool import VerifierPool
from plait.rewards.rounds import SampleTime
from plait.rewards.verifier import Control, Scorer


class Scoring(Protocol):
    """What `VerifierPool` and `ScoringHere` have in common; see there."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def prepare(self, verifiers: Sequence[str]) -> None: ...

    def submit(self, samples: Sequence[Sample]) -> None: ...

    def collect(self) -> dict[str, Verdict]: ...

    def score(self, samples: Sequence[Sample]) -> list[Verdict]: ...

    def slowest(self, num_samples: int = 5) -> list[SampleTime]: ...


class ScoringHere:
    """Judges in this process, whenever asked to collect; enforces no limit and measures no time."""

    def __init__(self, scorer: Scorer):
        self._scorer = scorer
        self._submitted: list[Sample] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._submitted = []

    def prepare(self, verifiers: Sequence[str]) -> None:
        """Load these verifiers. Raises ConfigError."""
        for name in verifiers:
            self._scorer.prepare(name)

    def submit(self, samples: Sequence[Sample]) -> None:
        """Remember samples for `collect`."""
        self._submitted += samples

    def collect(self) -> dict[str, Verdict]:
        """The verdicts of all samples submitted since the last `collect`, by id, in the order of submission."""
        samples, self._submitted = self._submitted, []
        return dict(zip([sample.id for sample in samples], self._scorer.score(samples), strict=True))

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in order."""
        return self._scorer.score(samples)

    def slowest(self, num_samples: int = 5) -> list[SampleTime]:
        """Nothing: no time is measured here."""
        return []


def open_scoring(
    settings: VerifiersConfig, recipe_dir: Path | None, *, control: Control = "verifier", seed: int = 0
) -> Scoring:
    """The scoring that the settings ask for, to be used as a context manager.

    Controls call no verifier, so they need no worker.
    """
    if settings.num_workers == 0 or control != "verifier":
        return ScoringHere(Scorer(recipe_dir, control=control, seed=seed))
    return VerifierPool(
        recipe_dir,
        num_workers=settings.num_workers,
        timeout_s=settings.timeout_s,
        memory_bytes=settings.memory_bytes,
    )
