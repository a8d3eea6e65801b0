"""Expected values: field cases N01, N02, N04, N05, N07, N20 (computed by their author) and hand calculation."""

import pytest
import torch

from plait.algorithms.advantages import sequence_advantages, whiten


def advantages(
    rewards,
    groups=None,
    counted=None,
    *,
    baseline="group_mean",
    scale="none",
    std_correction=1,
    eps=1e-6,
    lengths=None,
    greedy=None,
):
    count = len(rewards)
    return sequence_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups if groups is not None else [0] * count),
        torch.tensor(counted if counted is not None else [True] * count),
        baseline=baseline,
        scale=scale,
        std_correction=std_correction,
        eps=eps,
        lengths_B=None if lengths is None else torch.tensor(lengths),
        greedy_rewards_B=None if greedy is None else torch.tensor(greedy, dtype=torch.float64),
    ).tolist()


N01 = [1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("factors", "correct", "wrong"),
    [
        ({"scale": "group_std", "std_correction": 1}, 1.44913467, -0.62105772),
        ({"scale": "group_std", "std_correction": 0}, 1.5275219, -0.65465224),
        ({"scale": "none"}, 0.7, -0.3),
        ({"baseline": "leave_one_out"}, 0.77777778, -0.33333333),
    ],
)
def test_n01_four_named_estimators(factors, correct, wrong):
    result = advantages(N01, **factors)
    assert result[0] == pytest.approx(correct, abs=1e-6)
    assert result[1] == pytest.approx(wrong, abs=1e-6)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std"])
@pytest.mark.parametrize("reward", [1.0, 0.0, 0.1, -3.7])
def test_n02_equal_rewards_give_zero_not_nan(baseline, scale, reward):
    assert advantages([reward] * 4, baseline=baseline, scale=scale, eps=0.0) == [0, 0, 0, 0]


def test_n05_groups_by_id_not_by_position():
    assert advantages([1.0, 0.0, 0.0, 0.0], groups=[0, 1, 0, 1]) == [0.5, 0.0, -0.5, 0.0]


def test_n07_uncounted_sample_does_not_shift_its_siblings():
    result = advantages([5.0, 1.0, 0.0, 1.0], counted=[False, True, True, True])
    assert result == pytest.approx([0.0, 1 / 3, -2 / 3, 1 / 3], abs=1e-8)


def test_leave_one_out_is_group_mean_times_k_over_k_minus_one():
    rewards = [0.2, 0.9, 0.4, 0.4, 1.3]
    loo, mean = advantages(rewards, baseline="leave_one_out"), advantages(rewards)
    assert loo == pytest.approx([5 / 4 * a for a in mean], abs=1e-12)


def test_batch_std_divides_by_the_deviation_of_all_counted_rewards():
    # Rewards 1, 0 and 3, 1: mean 1.25, squares 0.0625 + 1.5625 + 3.0625 + 0.0625 = 4.75, sample std sqrt(4.75 / 3).
    std = (4.75 / 3) ** 0.5
    result = advantages([1.0, 0.0, 3.0, 1.0], groups=[0, 0, 1, 1], scale="batch_std", eps=0.0)
    assert result == pytest.approx([0.5 / std, -0.5 / std, 1 / std, -1 / std], abs=1e-12)


def test_group_with_one_counted_sample_has_nothing_to_compare():
    assert advantages([1.0, 0.0], counted=[True, False], baseline="leave_one_out", scale="group_std") == [
        0.0,
        0.0,
    ]


def test_no_baseline_keeps_the_reward():
    assert advantages([1.0, 1.0, 0.0], baseline="none") == [1.0, 1.0, 0.0]


def test_order_of_samples_does_not_matter():
    rewards, groups = [1.0, 0.0, 0.5, 0.25, 0.0, 1.0], [3, 3, 3, 7, 7, 7]
    straight = advantages(rewards, groups, scale="group_std")
    order = [4, 2, 0, 5, 1, 3]
    shuffled = advantages([rewards[i] for i in order], [groups[i] for i in order], scale="group_std")
    assert shuffled == pytest.approx([straight[i] for i in order], abs=1e-12)


def test_nan_reward_of_a_counted_sample_is_a_broken_invariant():
    with pytest.raises(AssertionError, match="not finite"):
        advantages([float("nan"), 1.0])


def test_nan_reward_of_an_uncounted_sample_is_harmless():
    assert advantages([float("nan"), 1.0, 0.0], counted=[False, True, True]) == [0.0, 0.5, -0.5]


N04 = [0.6] * 7 + [0.0]


@pytest.mark.parametrize(("std_correction", "of_a_0p6"), [(0, 0.40824829), (1, 0.37796447)])
def test_n04_leave_one_out_deviation(std_correction, of_a_0p6):
    for reward in (0.6, 0.45):  # The reported bug gave thousands with 0.6 and NaN with 0.45.
        rewards = [reward] * 7 + [0.0]
        result = advantages(
            rewards, baseline="leave_one_out", scale="leave_one_out_std", std_correction=std_correction, eps=0.0
        )
        assert result[7] == pytest.approx(-reward, abs=1e-5)
        assert result[:7] == pytest.approx([of_a_0p6] * 7, abs=1e-5)


def test_leave_one_out_deviation_leaves_out_the_sample_itself():
    # Sample 2 of (1, 3, 8): siblings 1, 3, mean 2, population deviation 1: (8 - 2) / 1.
    result = advantages([1.0, 3.0, 8.0], baseline="leave_one_out", scale="leave_one_out_std", std_correction=0, eps=0.0)
    assert result == pytest.approx([(1 - 5.5) / 2.5, (3 - 4.5) / 3.5, 6.0], abs=1e-12)


def test_leave_one_out_deviation_of_two_samples_has_nothing_to_divide_by():
    assert advantages([1.0, 0.0], baseline="leave_one_out", scale="leave_one_out_std") == [1.0, -1.0]


def test_batch_mean_is_over_all_counted_rewards():
    result = advantages([1.0, 0.0, 0.5, 9.0], [0, 0, 1, 1], [True, True, True, False], baseline="batch_mean")
    assert result == pytest.approx([0.5, -0.5, 0.0, 0.0], abs=1e-12)


def test_batch_mean_teaches_from_a_group_of_equal_rewards_and_is_exactly_zero_on_an_equal_batch():
    assert advantages([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1], baseline="batch_mean") == [0.5, 0.5, -0.5, -0.5]
    assert advantages([0.1] * 7, [0, 0, 0, 1, 1, 1, 1], baseline="batch_mean") == [0.0] * 7


def test_greedy_baseline_is_the_reward_of_the_greedy_sample_of_the_prompt():
    result = advantages([1.0, 0.0, 0.5], [0, 0, 1], baseline="greedy", greedy=[1.0, 1.0, 0.25])
    assert result == [0.0, -1.0, 0.25]
    # A group of one, and a group of equal rewards, still differ from their greedy sample.
    assert advantages([1.0], baseline="greedy", greedy=[0.0]) == [1.0]
    assert advantages([1.0, 1.0], baseline="greedy", greedy=[0.0, 0.0]) == [1.0, 1.0]


def test_greedy_baseline_without_its_rewards_is_refused():
    with pytest.raises(AssertionError, match="greedy_rewards_B"):
        advantages([1.0], baseline="greedy")
    with pytest.raises(AssertionError, match="not finite"):
        advantages([1.0], baseline="greedy", greedy=[float("nan")])


def test_length_weighted_baseline_by_hand():
    # sum l r / sum l = (2 * 1 + 8 * 0) / 10 = 0.2; the uncounted sample of 90 tokens does not enter.
    result = advantages([1.0, 0.0, 5.0], counted=[True, True, False], baseline="length_weighted", lengths=[2, 8, 90])
    assert result == pytest.approx([0.8, -0.2, 0.0], abs=1e-12)


def test_length_weighted_with_equal_lengths_is_group_mean():
    rewards, groups = [0.2, 0.9, 0.4, 1.3, 0.0, 0.7], [0, 0, 0, 1, 1, 1]
    weighted = advantages(rewards, groups, baseline="length_weighted", lengths=[7] * 6)
    assert weighted == pytest.approx(advantages(rewards, groups), abs=1e-12)


def test_length_weighted_corners():
    with pytest.raises(AssertionError, match="lengths_B"):
        advantages([1.0, 0.0], baseline="length_weighted")
    with pytest.raises(AssertionError, match="no tokens"):
        advantages([1.0, 0.0], baseline="length_weighted", lengths=[0, 3])
    assert advantages([0.3] * 3, baseline="length_weighted", lengths=[1, 2, 4]) == [0.0] * 3
    assert advantages([0.3], baseline="length_weighted", lengths=[5]) == [0.0]


@pytest.mark.parametrize("baseline", ["none", "group_mean", "leave_one_out", "batch_mean", "greedy", "length_weighted"])
@pytest.mark.parametrize("scale", ["none", "group_std", "batch_std", "leave_one_out_std"])
def test_no_corner_gives_nan_and_nobody_uncounted_gets_anything(baseline, scale):
    rewards = [1.0, 0.0, 0.5, 0.3, 0.3, 0.7, float("nan")]
    groups = [0, 0, 0, 1, 1, 2, 2]
    counted = [True] * 6 + [False]
    result = advantages(
        rewards,
        groups,
        counted,
        baseline=baseline,
        scale=scale,
        eps=0.0,
        lengths=[3, 1, 2, 4, 9, 5, 0],
        greedy=[0.0] * 7,
    )
    assert all(value == value and abs(value) < 10 for value in result)
    assert result[6] == 0
    nobody = advantages(rewards, groups, [False] * 7, baseline=baseline, scale=scale, lengths=[1] * 7, greedy=[0.0] * 7)
    assert nobody == [0.0] * 7


def whitened(values, counts=None, *, shift_mean=True, std_correction=0, eps=0.0):
    counts_N = torch.tensor(counts if counts is not None else [1] * len(values))
    return whiten(
        torch.tensor(values, dtype=torch.float64),
        counts_N,
        shift_mean=shift_mean,
        std_correction=std_correction,
        eps=eps,
    ).tolist()


def test_n20_scale_only():
    result = whitened([1.0, 2.0, 3.0], shift_mean=False)
    assert result == pytest.approx([1.22474487, 2.44948974, 3.67423461], abs=1e-5)
    assert result != pytest.approx([0.77525513, 2.0, 3.22474487], abs=0.1)


@pytest.mark.parametrize(("std_correction", "std"), [(0, (2 / 3) ** 0.5), (1, 1.0)])
def test_whitening_by_hand(std_correction, std):
    result = whitened([1.0, 2.0, 3.0], std_correction=std_correction)
    assert result == pytest.approx([-1 / std, 0.0, 1 / std], abs=1e-12)


def test_whitening_ignores_masked_entries_whatever_they_hold():
    result = whitened([1.0, float("nan"), 2.0, 99.0, 3.0], [1, 0, 1, 0, 1])
    assert result == pytest.approx([-(1.5**0.5), 0.0, 0.0, 0.0, 1.5**0.5], abs=1e-12)


def test_whitening_over_tokens_is_that_of_the_repeated_values():
    per_sequence = whitened([1.0, -0.5, 0.2], [2, 3, 4], std_correction=1, eps=1e-6)
    per_token = whitened([1.0] * 2 + [-0.5] * 3 + [0.2] * 4, std_correction=1, eps=1e-6)
    assert per_sequence == pytest.approx([per_token[0], per_token[2], per_token[5]], abs=1e-12)
    assert per_sequence != pytest.approx(whitened([1.0, -0.5, 0.2], std_correction=1, eps=1e-6), abs=1e-3)


def test_whitened_values_have_mean_zero_and_deviation_one():
    values = [0.3, -1.0, 2.5, 0.1, 0.1]
    result = whitened(values)
    assert sum(result) == pytest.approx(0, abs=1e-12)
    assert sum(value**2 for value in result) / 5 == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("shift_mean", [True, False])
@pytest.mark.parametrize("std_correction", [0, 1])
def test_whitening_without_anything_to_compare_gives_zero(shift_mean, std_correction):
    for values, counts in (([0.7], [1]), ([0.1] * 5, [1] * 5), ([1.0, 2.0], [0, 0]), ([1.0, 2.0], [1, 0]), ([], [])):
        result = whitened(values, counts, shift_mean=shift_mean, std_correction=std_correction)
        assert result == [0.0] * len(values)


def test_whitening_refuses_nan():
    with pytest.raises(AssertionError, match="not finite"):
        whitened([1.0, float("nan")])
