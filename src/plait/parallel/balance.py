"""Sequences over data-parallel ranks: equal work for each, and the same number of microbatches. Torch-free.

Every rank computes the whole division from the same lengths, so nothing is sent, and no rank waits for a collective
that another never starts: where sequences do not suffice, a microbatch of filling alone takes part.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SequenceCost:
    """Work of a sequence of n tokens: linear n + quadratic n^2. Fixed at run start and kept in checkpoints.

    Were it to change between a run and its resumption, sequences would be grouped and summed in another order.
    """

    linear: float
    quadratic: float

    def __call__(self, length: int) -> float:
        return length * (self.linear + self.quadratic * length)


def sequence_cost(num_parameters: int, num_layers: int, attention_width: int) -> SequenceCost:
    """FLOPs of a forward pass: 2 per parameter and token (those outside the embedding), and causal attention's two
    products over N x H = attention_width: 2 x 2 x n^2 / 2 per layer and width (formulas.md, 2.1).
    """
    return SequenceCost(2.0 * num_parameters, 2.0 * num_layers * attention_width)


def partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices into costs, in num_parts parts of nearly equal sums: the largest differencing method (Karmarkar, Karp).

    Deterministic; ties go by index. Parts are sorted by index inside and have no order among themselves.
    """
    if num_parts == 1:
        return [list(range(len(costs)))]
    # An entry is a partial solution: its parts with their sums, largest first; what counts is the spread of the sums.
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for index, cost in enumerate(costs):
        heap.append((-cost, index, [(cost, [index]), *((0.0, []) for _ in range(num_parts - 1))]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, order, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # The heaviest part of one meets the lightest of the other.
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(first, reversed(second), strict=True)]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], order, merged))
    return [sorted(part) for _, part in heap[0][2]] if heap else [[] for _ in range(num_parts)]
