"""Closed bubble formulas against simulated orders, and the simulator against orders worked out by hand."""

import itertools

import pytest

from plait.cost.pipeline import (
    dual_pipe_v_idle_s,
    equal_durations,
    forward_only_idle_s,
    gpipe_idle_s,
    interleaved_idle_s,
    one_f_one_b_idle_s,
    peak_live_microbatches,
    simulate_pipeline,
    zero_bubble_v_idle_s,
)
from plait.parallel.pipeline_orders import Action, forward_only, pipeline_order

RANKS = (1, 2, 3, 4, 6)
DURATIONS = ((1.0, 2.0, 1.0), (1.0, 2.4, 0.9), (3.0, 5.0, 2.0))


def run(name, p, m, F, B, W, v=1, **options):
    return simulate_pipeline(pipeline_order(name, p, m, v), equal_durations(F, B, W, v), **options)


@pytest.mark.parametrize(("p", "durations"), list(itertools.product(RANKS, DURATIONS)))
def test_idle_times_of_gpipe_1f1b_and_interleaved(p, durations):
    F, B, W = durations
    for m in (p, 2 * p, 4 * p):
        for name, v, idle in (
            ("gpipe", 1, gpipe_idle_s(p, F, B)),
            ("1f1b", 1, one_f_one_b_idle_s(p, F, B)),
            ("interleaved_1f1b", 2, interleaved_idle_s(p, 2, F, B)),
            ("interleaved_1f1b", 3, interleaved_idle_s(p, 3, F, B)),
        ):
            times = run(name, p, m, F, B, W, v)
            assert times.idle_s == pytest.approx([idle] * p)
            assert times.makespan_s == pytest.approx(m * (F + B) + idle)


@pytest.mark.parametrize("p", RANKS)
def test_zero_bubble_v_has_none_between_its_ends_where_its_parts_are_equal(p):
    times = run("zero_bubble_v", p, 4 * p, 3.0, 6.0, 3.0, 2)
    assert times.bubble_s == pytest.approx(0)
    assert times.idle_s == pytest.approx([zero_bubble_v_idle_s(p, 3.0)] * p)


@pytest.mark.parametrize(("p", "saved"), list(itertools.product(RANKS, (0.0, 0.2, 1 / 3))))
def test_dual_pipe_v(p, saved):
    """Up to a pair that takes no longer than its backward alone."""
    F, B, W = 1.0, 2.0, 1.0
    pair = (F + B) * (1 - saved)
    times = run("dual_pipe_v", p, 4 * p, F, B, W, 2, overlapped_s=lambda forward, backward: pair / 2)
    assert max(times.idle_s) == pytest.approx(dual_pipe_v_idle_s(p, B, W, pair))


def test_dual_pipe_v_formula_is_an_upper_bound_where_weight_gradients_are_cheaper():
    for p in RANKS:
        times = run("dual_pipe_v", p, 4 * p, 1.0, 2.4, 0.9, 2)
        assert max(times.idle_s) <= dual_pipe_v_idle_s(p, 2.4, 0.9, 3.4) + 1e-9


@pytest.mark.parametrize("p", RANKS)
def test_inference_fills_and_drains_once(p):
    times = simulate_pipeline(forward_only(p, 7), equal_durations(2.0, 0.0, 0.0))
    assert times.idle_s == pytest.approx([forward_only_idle_s(p, 2.0)] * p)
    assert times.peak_live == (0,) * p


@pytest.mark.parametrize("p", [2, 3, 4, 6])
def test_peak_of_live_microbatches(p):
    for name, v in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 4),
        ("zero_bubble_v", 2),
        ("dual_pipe_v", 2),
    ):
        m = 4 * p
        peak = max(run(name, p, m, 1.0, 2.0, 1.0, v).peak_live)
        assert peak / v == peak_live_microbatches(name, p, m, v)
    # The published 1 + (p - 1)/(p v) of interleaving holds for m > p only (2205.05198): at m = p it is 1.
    assert max(run("interleaved_1f1b", p, p, 1.0, 2.0, 1.0, 2).peak_live) / 2 == p


def test_two_ranks_by_hand():
    """F 1, B 2, hop 0.5. Rank 0: F0 0-1, F1 1-2. Rank 1: F0 1.5-2.5, B0 2.5-4.5, F1 4.5-5.5, B1 5.5-7.5.

    Rank 0 again: B0 5-7, B1 8-10.
    """
    times = run("1f1b", 2, 2, 1.0, 2.0, 1.0, hop_s=0.5)
    assert times.makespan_s == 10.0
    assert times.first_start_s == (0.0, 1.5)
    assert times.last_end_s == (10.0, 7.5)
    assert times.peak_live == (2, 1)


def test_uneven_microbatches():
    """GPipe, forward only: the long microbatch holds up those behind it. Stage times 1, 4, 1 on each of two ranks."""
    long = {0: 1.0, 1: 4.0, 2: 1.0}
    times = simulate_pipeline(forward_only(2, 3), lambda action: long[action.microbatch])
    assert times.makespan_s == 1 + 4 + 4 + 1


def test_an_order_that_waits_for_itself_is_refused():
    order = ((Action(0, 0, 0, "backward"), Action(0, 0, 0, "forward")),)
    with pytest.raises(AssertionError, match="waits for itself"):
        simulate_pipeline(order, lambda action: 1.0)
