"""Samples that wait for a worker, and how many of them make a batch."""

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from plait.rewards.rounds import Round

MAX_BATCH = 8
BATCH_LIMIT_SHARE = 1 / 8
MIN_BATCH_LIMIT_S = 1.0
CAUTION_SAMPLES = 64


@dataclass(slots=True)
class Item:
    """One sample on its way to a verdict.

    data: the pickled VerifierSample. index: its place in its round.
    alone: it was in a batch that went wrong, so it is judged by itself.
    needs_fresh: a worker ran out of memory over it, maybe by what earlier samples left behind; it is judged
        once more in a worker that has judged nothing yet.
    """

    sample_id: str
    verifier: str
    data: bytes
    round: "Round"
    index: int
    alone: bool = False
    needs_fresh: bool = False
    number: int = 0
    """Place in the order of arrival."""


class BatchSizes:
    """How many samples of a verifier to send at once, and how long to wait for them.

    A batch that exceeds its limit blames nobody: its samples are judged again one by one, each with the
    full limit. So the limit of a batch can be short (an eighth of the sample's, at least a second), and a
    sample that hangs costs little more than its own limit. Batches are made so small that they should need
    a quarter of theirs. After a fault the next samples of that verifier are sent singly: where one
    hangs, others may.
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._batch_limit_s = min(timeout_s, max(MIN_BATCH_LIMIT_S, timeout_s * BATCH_LIMIT_SHARE))
        self._seconds_per_sample: dict[str, float] = {}
        self._num_cautious: dict[str, int] = {}

    def limit_s(self, num_samples: int) -> float:
        """Wall-clock limit of a batch of that many."""
        return self._timeout_s if num_samples == 1 else self._batch_limit_s

    def size(self, verifier: str) -> int:
        """Most samples of that verifier to send now."""
        if self._num_cautious.setdefault(verifier, 0) > 0:
            return 1
        seconds = self._seconds_per_sample.setdefault(verifier, 0.0)
        fitting = MAX_BATCH if seconds == 0 else int(self._batch_limit_s / 4 / seconds)
        return max(1, min(MAX_BATCH, fitting))

    def succeeded(self, verifier: str, num_samples: int, seconds: float) -> None:
        """A batch was judged, in that many seconds."""
        self._num_cautious[verifier] = max(0, self._num_cautious.setdefault(verifier, 0) - num_samples)
        before = self._seconds_per_sample.setdefault(verifier, 0.0) or seconds / num_samples
        self._seconds_per_sample[verifier] = 0.8 * before + 0.2 * seconds / num_samples

    def went_wrong(self, verifier: str) -> None:
        """A batch hung or took its worker with it."""
        self._num_cautious[verifier] = CAUTION_SAMPLES


class WaitingLine:
    """First come, first served; a batch holds samples of one verifier, and those to be judged alone go alone."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, bool], deque[Item]] = {}
        self._num_put = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def put(self, item: Item) -> None:
        """To the end of the line, also when it comes back."""
        self._num_put += 1
        item.number = self._num_put
        self._queues.setdefault((item.verifier, item.alone), deque()).append(item)

    def first(self) -> Item | None:
        """The item that is served next."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        return min(heads, key=lambda item: item.number, default=None)

    def take(self, max_size: int) -> list[Item]:
        """The next item with up to max_size - 1 more of its verifier."""
        head = self.first()
        assert head is not None, "nothing waits"
        queue = self._queues[head.verifier, head.alone]
        size = 1 if head.alone else min(max_size, len(queue))
        return [queue.popleft() for _ in range(size)]

    def clear(self) -> list[Item]:
        """Take everything out."""
        items = [item for queue in self._queues.values() for item in queue]
        self._queues.clear()
        return items
