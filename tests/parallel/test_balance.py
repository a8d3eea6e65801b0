"""Sequences over ranks: every one once, work nearly equal, the same from the same lengths."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.parallel.balance import SequenceCost, partition, sequence_cost


@given(st.lists(st.integers(1, 4000), max_size=40), st.integers(1, 8))
def test_every_sequence_goes_to_one_rank(lengths, num_parts):
    parts = partition([SequenceCost(1.0, 0.001)(n) for n in lengths], num_parts)
    assert len(parts) == num_parts
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))


@pytest.mark.parametrize(
    "costs", [[8, 7, 6, 5, 4], [3, 3, 2, 2, 2], [9, 1, 1, 1, 1, 1, 1, 1, 1, 1], [5, 5, 5, 5, 5, 5]]
)
def test_two_parts_are_close_to_the_best_of_all_divisions(costs):
    """The differencing method is within the smallest piece of the optimum here; giving in turn is not."""
    best = min(abs(sum(c if side else -c for c, side in zip(costs, sides, strict=True)))
               for sides in product((0, 1), repeat=len(costs)))  # fmt: skip
    first, second = (sum(costs[i] for i in part) for part in partition(costs, 2))
    assert abs(first - second) <= best + min(costs)


def test_work_is_balanced_where_numbers_of_tokens_are_not():
    """One long sequence costs as much as many short ones with more tokens."""
    cost = SequenceCost(1.0, 0.01)
    lengths = [1000, *[100] * 55]
    long, short = sorted(partition([cost(n) for n in lengths], 2), key=len)
    work = [sum(cost(lengths[i]) for i in part) for part in (long, short)]
    assert max(work) < 1.02 * min(work)
    assert sum(lengths[i] for i in short) > 2 * sum(lengths[i] for i in long)


def test_cost_counts_parameters_and_causal_attention():
    """2 FLOPs per parameter and token; scores and values over 3 layers of width 4: 2 x 2 x n^2 / 2 each."""
    assert sequence_cost(10, 3, 4)(7) == 2 * 10 * 7 + 3 * 4 * (2 * 2 * 7**2 / 2)
