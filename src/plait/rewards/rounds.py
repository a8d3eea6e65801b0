"""What was handed in together and is waited for together, and how long judging took."""

import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from plait.batch import Verdict

NUM_SLOWEST = 20


@dataclass(frozen=True, slots=True, order=True)
class SampleTime:
    """Wall-clock seconds that a sample's verdict took; in a batch, its share. Ordered by seconds."""

    seconds: float
    sample_id: str
    verifier: str


@dataclass(frozen=True, slots=True)
class VerifierTime:
    """Sums over the samples of one verifier. busy_s: seconds in which workers ran it, lost ones included."""

    verifier: str
    num_samples: int
    busy_s: float


class ScoringTimes:
    """Which samples and verifiers were slow. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slowest: list[SampleTime] = []
        self._num_samples: dict[str, int] = {}
        self._busy_s: dict[str, float] = {}

    def add_busy(self, verifier: str, seconds: float) -> None:
        """A worker ran this verifier for that long."""
        with self._lock:
            self._busy_s[verifier] = self._busy_s.setdefault(verifier, 0.0) + seconds

    def add_sample(self, verifier: str, sample_id: str, seconds: float) -> None:
        """A verdict took that long."""
        with self._lock:
            self._num_samples[verifier] = self._num_samples.setdefault(verifier, 0) + 1
            heapq.heappush(self._slowest, SampleTime(seconds, sample_id, verifier))
            if len(self._slowest) > NUM_SLOWEST:
                heapq.heappop(self._slowest)

    def slowest(self, num_samples: int = 5) -> list[SampleTime]:
        """The slowest samples so far, slowest first; at most NUM_SLOWEST are remembered."""
        with self._lock:
            return sorted(self._slowest, reverse=True)[:num_samples]

    def by_verifier(self) -> list[VerifierTime]:
        """The verifiers, busiest first."""
        with self._lock:
            times = [VerifierTime(name, self._num_samples.setdefault(name, 0), s) for name, s in self._busy_s.items()]
        return sorted(times, key=lambda time: time.busy_s, reverse=True)

    @property
    def busy_s(self) -> float:
        """Seconds in which workers judged, summed over the workers."""
        with self._lock:
            return sum(self._busy_s.values())


class Round:
    """Samples whose verdicts are awaited together; the order is that in which they were handed in."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.sample_ids: list[str] = []
        self._verdicts: dict[int, Verdict] = {}

    def add(self, sample_ids: Sequence[str]) -> range:
        """Register samples; returns their indices."""
        with self.changed:
            start = len(self.sample_ids)
            self.sample_ids += sample_ids
            return range(start, len(self.sample_ids))

    def settle(self, index: int, verdict: Verdict) -> None:
        """Record the verdict of one sample."""
        with self.changed:
            assert index not in self._verdicts, f"sample {self.sample_ids[index]} was judged twice"
            self._verdicts[index] = verdict
            self.changed.notify_all()

    @property
    def num_pending(self) -> int:
        return len(self.sample_ids) - len(self._verdicts)

    def verdicts(self) -> list[Verdict]:
        """The verdicts in the order of submission; every one is there."""
        return [self._verdicts[index] for index in range(len(self.sample_ids))]
