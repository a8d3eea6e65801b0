"""Expected values: field cases N01, N02, N05, N07 (computed with numpy by their author) and hand calculation."""

import pytest
import torch

from plait.algorithms.advantages import sequence_advantages


def advantages(rewards, groups=None, counted=None, *, baseline="group_mean", scale="none", std_correction=1, eps=1e-6):
    count = len(rewards)
    return sequence_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(groups if groups is not None else [0] * count),
        torch.tensor(counted if counted is not None else [True] * count),
        baseline=baseline,
        scale=scale,
        std_correction=std_correction,
        eps=eps,
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
