"""Who is decoded when: waiting requests take the place of finished ones at once. Torch-free."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to be sampled.

    id: unique among unfinished requests. seed: of the sample's own random stream. max_tokens: completion limit.
    """

    id: str
    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int


@dataclass(slots=True)
class Running:
    """A request in a slot, with the number of tokens it has so far (prompt and completion)."""

    request: Request
    num_tokens: int


class Scheduler:
    """Slots 0 .. len(running) - 1 are occupied; a freed slot is filled by the last one, so they stay dense."""

    def __init__(self, num_slots: int):
        assert num_slots >= 1, f"{num_slots} slots, expected at least 1"
        self._num_slots = num_slots
        self._waiting: deque[Request] = deque()
        self.running: list[Running] = []

    def submit(self, requests: Iterable[Request]) -> None:
        self._waiting.extend(requests)

    @property
    def is_idle(self) -> bool:
        return not self.running and not self._waiting

    def waiting_prompts(self) -> Iterator[tuple[int, ...]]:
        """Prompts of the requests that wait, in their order; one per request."""
        return (request.prompt_ids for request in self._waiting)

    def admit(self) -> list[tuple[int, Request]]:
        """Move waiting requests into free slots, first come first served; returns (slot, request)."""
        admitted = []
        while self._waiting and len(self.running) < self._num_slots:
            request = self._waiting.popleft()
            admitted.append((len(self.running), request))
            self.running.append(Running(request, len(request.prompt_ids)))
        return admitted

    def release(self, slots: Iterable[int]) -> list[tuple[int, int]]:
        """Free slots; returns the moves (source, target) that keep the occupied ones dense, independent of order."""
        freed = set(slots)
        num_left = len(self.running) - len(freed)
        holes = sorted(slot for slot in freed if slot < num_left)
        movers = [slot for slot in range(num_left, len(self.running)) if slot not in freed]
        moves = list(zip(movers, holes, strict=True))
        for source, target in moves:
            self.running[target] = self.running[source]
        del self.running[num_left:]
        return moves
