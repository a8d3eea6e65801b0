"""When the pieces of a stage are done, and what that means for the stage that takes them. Torch-free.

A stage works on n equal pieces in order, one at a time, each as soon as it is there. If pieces arrive at the maximum of
straight lines, they are also done at a maximum of straight lines, so whole graphs of streaming stages have an exact
closed form. It is max-plus arithmetic (Baccelli, Cohen, Olsder, Quadrat, "Synchronization and Linearity", 1992); the
tests compare it with a simulation of events.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from plait.cost.arithmetic import Number, maximum


def largest(values: Iterable[Number]) -> Number:
    """The maximum of all values, element by element; 0 of none."""
    result: Number | None = None
    for value in values:
        result = value if result is None else maximum(result, value)
    return 0 if result is None else result


@dataclass(frozen=True, slots=True)
class Flow:
    """Piece k = 1 ... num_pieces is done at the largest of first_s + (k - 1) gap_s over the lines (first_s, gap_s)."""

    lines: tuple[tuple[Number, Number], ...]
    num_pieces: Number = 1

    @property
    def first_s(self) -> Number:
        """When the first piece is done."""
        return largest(first for first, _ in self.lines)

    @property
    def last_s(self) -> Number:
        """When all are done."""
        return largest(first + (self.num_pieces - 1) * gap for first, gap in self.lines)

    def whole(self) -> "Flow":
        """One piece, there when all are done."""
        return Flow(((self.last_s, 0),))

    def regrouped(self, num_pieces: Number) -> "Flow":
        """In fewer, larger pieces, each done with the last of those that it is made of."""
        size = self.num_pieces / num_pieces
        return Flow(tuple((first + (size - 1) * gap, size * gap) for first, gap in self.lines), num_pieces)


def serve(arrivals: Iterable[Flow], free_s: Iterable[Number], piece_s: Number, num_pieces: Number) -> Flow:
    """A stage that takes piece_s for each piece, once all arrivals have it and the stage is free.

    done(k) = max over j <= k of arrival(j) + (k - j + 1) piece_s. Arrivals are convex in j, so the largest is at one
    end: max(arrival(1) + k piece_s, arrival(k) + piece_s). arrivals: flows of num_pieces pieces, or of one that all
    wait for. free_s: moments before which nothing starts.
    """
    arrivals = tuple(arrivals)
    start = largest([*(flow.first_s for flow in arrivals), *free_s])
    own = (start + piece_s, piece_s)
    behind = (
        (first + piece_s, gap) for flow in arrivals for first, gap in flow.lines if not (_is_zero(gap) or _is_one(flow))
    )
    return Flow((own, *behind), num_pieces)


def _is_zero(gap: Number) -> bool:
    return isinstance(gap, int | float) and gap == 0


def _is_one(flow: Flow) -> bool:
    return isinstance(flow.num_pieces, int) and flow.num_pieces == 1


def stream_s(piece_s: Iterable[Number], num_pieces: Number) -> Number:
    """Stages in a row, each on devices of its own, n pieces: fill + slowest = sum of piece_s + (n - 1) max of piece_s.

    With n = 1 the stages follow each other (the sum); as n grows the slowest decides, which is the survey's
    max(D_G, D_A) for fused stages (arXiv 2608.27046, table 9).
    """
    pieces = tuple(piece_s)
    return sum(pieces[1:], start=pieces[0]) + (num_pieces - 1) * largest(pieces)


def interleaved_pipelines_s(p: Number, *pipelines: tuple[Number, Number, Number]) -> Number:
    """Several models' pipelines on the same p ranks, one behind the other without a flush; GPipe, no communication.

    pipelines: (microbatches m, forward F, backward B) of one stage each. sum m (F + B) + (p - 1) (max F + max B): every
    rank waits for the largest microbatch only, once (proportionate flow shop). One after the other they wait
    (p - 1) (F + B) each, so the smaller bubble is saved: intra-stage fusion of actor and critic (arXiv 2608.27046,
    section 4.3; RLHFuse, 2409.13221, fills it with 1F1B in opposite directions).
    """
    work = sum((m * (F + B) for m, F, B in pipelines), start=0)
    return work + (p - 1) * (largest(F for _, F, _ in pipelines) + largest(B for _, _, B in pipelines))
