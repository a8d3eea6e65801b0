"""One line of a traffic account: a named collective, how often a device issues it, and with how much. Torch-free."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from plait.cost import collectives
from plait.cost.arithmetic import Number
from plait.cost.collectives import Transfer

Collective = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send"]
Algorithms = Mapping[Collective, Callable[[Number, Number], Transfer]]
"""Collective -> the cost of one call from (payload bytes, ranks)."""

RING: Algorithms = {
    "all_reduce": collectives.ring_all_reduce,
    "reduce_scatter": collectives.ring_reduce_scatter,
    "all_gather": collectives.ring_all_gather,
    "all_to_all": collectives.pairwise_all_to_all,
    "broadcast": collectives.chain_broadcast,
    "send": lambda payload_bytes, num_ranks: collectives.point_to_point(payload_bytes),
}
"""What large payloads use."""


@dataclass(frozen=True, slots=True)
class Term:
    """num_calls collectives over num_ranks ranks, each with payload_bytes (M of `plait.cost.collectives`).

    axis: the mesh axis whose links carry it. is_overlappable: independent work of the same device can hide it.
    """

    name: str
    axis: str
    collective: Collective
    num_ranks: Number
    num_calls: Number
    payload_bytes: Number
    is_overlappable: bool = False

    def transfer(self, algorithms: Algorithms = RING) -> Transfer:
        """Bytes, messages and rounds of all its calls."""
        return algorithms[self.collective](self.payload_bytes, self.num_ranks) * self.num_calls


def total(terms: Iterable[Term], algorithms: Algorithms = RING) -> Transfer:
    """Bytes, messages and rounds of all terms; rounds as if nothing overlapped."""
    return sum((term.transfer(algorithms) for term in terms), Transfer())


def by_name(terms: Iterable[Term], algorithms: Algorithms = RING) -> dict[str, Transfer]:
    """Bytes, messages and rounds per name."""
    sums: dict[str, Transfer] = {}
    for term in terms:
        sums[term.name] = sums.get(term.name, Transfer()) + term.transfer(algorithms)
    return sums


def present(*terms: Term) -> tuple[Term, ...]:
    """The terms that move something: none over a single rank, none issued zero times (numbers only)."""
    return tuple(term for term in terms if (term.collective == "send" or term.num_ranks > 1) and term.num_calls > 0)
