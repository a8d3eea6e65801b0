"""Intervals and pass@k against values worked out by hand."""

import itertools

import pytest

from plait.telemetry.stats import bootstrap_interval, pass_at_k


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (8, 3, 1, 0.375),
        (8, 3, 2, 0.64285714),  # 1 - C(5,2)/C(8,2) = 1 - 10/28; the plug-in would give 0.609
        (8, 3, 4, 0.92857143),  # 1 - 5/70
        (8, 3, 8, 1.0),
        (8, 0, 4, 0.0),
        (8, 8, 1, 1.0),
        (1, 1, 1, 1.0),
        (4000, 1, 2000, 0.5),  # beyond the range of floats in between
    ],
)
def test_pass_at_k(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-8)


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample():
    for n, c, k in itertools.product(range(1, 7), range(7), range(1, 7)):
        if c <= n and k <= n:
            subsets = list(itertools.combinations(range(n), k))
            share = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5)])
def test_pass_at_k_refuses_what_cannot_be_estimated(n, c, k):
    with pytest.raises(ValueError, match="must lie between"):
        pass_at_k(n, c, k)


def test_the_interval_is_that_of_a_binomial_for_one_sample_per_prompt():
    # 100 prompts, 40 right: the resampled mean is Binomial(100, 0.4)/100, whose 2.5 % and 97.5 % quantiles
    # are 0.31 and 0.50 (tables).
    low, high = bootstrap_interval([[1.0]] * 40 + [[0.0]] * 60, num_resamples=4000, seed=0)
    assert low == pytest.approx(0.31, abs=0.011)
    assert high == pytest.approx(0.50, abs=0.011)


def test_prompts_are_resampled_not_samples():
    # 10 prompts with 100 equal samples each: the width is that of 10 draws, not of 1000.
    # Binomial(10, 0.5)/10 has the quantiles 0.2 and 0.8 (tables).
    low, high = bootstrap_interval([[1.0] * 100] * 5 + [[0.0] * 100] * 5, num_resamples=4000, seed=1)
    assert (low, high) == pytest.approx((0.2, 0.8), abs=1e-9)


def test_prompts_weigh_as_many_samples_as_they_have():
    # Two prompts, 3 right samples and 1 wrong one. Resamples: both first (1), mixed (3/4), both second (0).
    low, high = bootstrap_interval([[1.0, 1.0, 1.0], [0.0]], level=0.1, num_resamples=2001, seed=0)
    assert (low, high) == (0.75, 0.75)


def test_the_interval_is_a_function_of_its_seed():
    scores = [[float(i % 3 == 0), float(i % 2)] for i in range(30)]
    assert bootstrap_interval(scores, seed=5) == bootstrap_interval(scores, seed=5)
    assert bootstrap_interval(scores, seed=5) != bootstrap_interval(scores, seed=6)
    assert bootstrap_interval([[1.0], [1.0]], seed=0) == (1.0, 1.0)


@pytest.mark.parametrize("scores", [[], [[1.0], []]])
def test_no_interval_without_scores(scores):
    with pytest.raises(ValueError, match="at least one prompt"):
        bootstrap_interval(scores, seed=0)


@pytest.mark.parametrize("level", [0.0, 1.0, 95.0])
def test_no_interval_for_a_level_outside_0_to_1(level):
    with pytest.raises(ValueError, match="between 0 and 1"):
        bootstrap_interval([[1.0]], level=level, seed=0)
