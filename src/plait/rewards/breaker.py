"""Stops a run whose verifiers fail too often: training on the few verdicts that are left would mislead."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from plait.batch import Sample
from plait.errors import VerifierFailureError
from plait.rewards.rounds import SampleTime

Outcome = Literal["correct", "partial", "wrong", "no_answer", "truncated", "abstained", "failed"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)

_NUM_REASONS = 3


def outcome_of(sample: Sample) -> Outcome:
    """What came of a scored sample, each in one class.

    "wrong": an answer was read, and it is not right. "no_answer": none could be read. "truncated": one of
    these two, and the completion was cut at its limit. "failed": the verifier failed, not the model.
    """
    verdict = sample.verdict
    assert verdict is not None, f"sample {sample.id} was not scored yet"
    if verdict.kind == "failed":
        return "failed"
    if verdict.kind == "abstained":
        return "abstained"
    if verdict.detail == "correct":
        return "correct"
    if verdict.detail == "partial":
        return "partial"
    if sample.finish == "length":
        return "truncated"
    return "no_answer" if verdict.detail == "no_answer" else "wrong"


def count_outcomes(samples: Sequence[Sample]) -> dict[Outcome, int]:
    """Number of samples per outcome; all outcomes are there."""
    counts = Counter(map(outcome_of, samples))
    return {outcome: counts[outcome] for outcome in OUTCOMES}


@dataclass(slots=True)
class _Window:
    """The last samples of one verifier, as (outcome, reason)."""

    last: deque[tuple[Outcome, str]]
    slowest: list[SampleTime] = field(default_factory=list)
    has_succeeded: bool = False


class CircuitBreaker:
    """Watches each verifier by itself, so that a broken one does not hide behind others that work.

    max_failed_share: the run stops when more than this share of a verifier's last `num_window_samples`
        verdicts failed; 1 never stops it.
    min_samples: as long as fewer were seen, nothing is concluded. A verifier none of whose first samples was
        judged stops the run as soon as it has seen that many.
    """

    def __init__(self, max_failed_share: float, *, num_window_samples: int = 512, min_samples: int = 8):
        self._max_failed_share = max_failed_share
        self._num_window_samples = num_window_samples
        self._min_samples = min_samples
        self._windows: dict[str, _Window] = {}

    def record(self, samples: Sequence[Sample], slowest: Sequence[SampleTime] = ()) -> None:
        """Take in scored samples. Raises VerifierFailureError with counts, reasons and the slowest samples."""
        touched = {}
        for sample in samples:
            name = sample.prompt.verifier
            window = self._windows.setdefault(name, _Window(deque(maxlen=self._num_window_samples)))
            outcome = outcome_of(sample)
            reason = sample.verdict.reason if sample.verdict is not None and outcome == "failed" else ""
            window.last.append((outcome, reason))
            window.has_succeeded |= outcome != "failed"
            window.slowest = [time for time in slowest if time.verifier == name]
            touched[name] = window
        for name, window in touched.items():
            self._judge(name, window)

    def _judge(self, name: str, window: _Window) -> None:
        num_samples = len(window.last)
        num_failed = sum(outcome == "failed" for outcome, _ in window.last)
        if num_samples < self._min_samples or self._max_failed_share >= 1:
            return
        if not window.has_succeeded:
            finding = f'verifier "{name}" has not judged a single sample: all of the first {num_samples} failed'
        elif num_failed > self._max_failed_share * num_samples:
            finding = (
                f'verifier "{name}" failed on {num_failed} of its last {num_samples} samples '
                f"({num_failed / num_samples:.0%}; verifiers.max_failed_share is {self._max_failed_share:g})"
            )
        else:
            return
        raise VerifierFailureError("\n".join([finding, *_explanation(window), _ADVICE]))


_ADVICE = (
    "Correct the verifier or the rows it fails on; raise verifiers.timeout_s or verifiers.memory_bytes if it needs "
    "more; or raise verifiers.max_failed_share to go on without the failed samples"
)


def _explanation(window: _Window) -> list[str]:
    counts = Counter(outcome for outcome, _ in window.last)
    reasons = Counter(reason for outcome, reason in window.last if outcome == "failed")
    lines = ["Outcomes: " + ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)]
    lines += [f"{count} x {reason}" for reason, count in reasons.most_common(_NUM_REASONS)]
    if window.slowest:
        times = ", ".join(f"{time.sample_id} ({time.seconds:.2f} s)" for time in window.slowest)
        lines.append(f"Slowest samples: {times}")
    return lines
