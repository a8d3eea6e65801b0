"""The bounds against greedy list scheduling, carried out."""

import heapq

from hypothesis import given
from hypothesis import strategies as st

from plait.cost.verifier_time import verifier_least_s, verifier_most_s


def greedy(times, num_workers):
    free = [0.0] * num_workers
    for time in times:
        heapq.heappush(free, heapq.heappop(free) + time)
    return max(free)


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=60), st.integers(1, 12))
def test_any_order_lies_between_the_bounds(times, num_workers):
    mean, longest = sum(times) / len(times), max(times)
    took = greedy(times, num_workers)
    least = verifier_least_s(len(times), num_workers, mean, longest)
    most = verifier_most_s(len(times), num_workers, mean, longest)
    assert least - 1e-9 <= took <= most + 1e-9
    assert most <= (2 - 1 / num_workers) * least + 1e-9


def test_the_bounds_are_reached():
    assert greedy([1.0] * 8, 4) == verifier_least_s(8, 4, 1.0, 1.0) == 2.0
    times = [1.0] * 12 + [4.0]  # 4 workers are busy for 3 s, then the long one starts
    assert greedy(times, 4) == verifier_most_s(13, 4, 16 / 13, 4.0) == 7.0
