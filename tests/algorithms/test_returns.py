"""Expected values: field cases N16 and N18, hand calculation, and the sums written out in numpy (references.py)."""

import numpy as np
import pytest
import references
import torch

from plait.algorithms.returns import (
    decoupled_gae,
    discounted_returns,
    gae,
    length_adaptive_lambda,
    n_step_returns,
    token_rewards,
)


def doubles(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def bools(*rows):
    return torch.tensor(rows).bool()


def test_n16_gae_ends_at_the_last_trainable_token():
    rewards, values = doubles([0, 0, 1, 0, 0]), doubles([0.2, 0.4, 0.6, 9, 9])
    advantages, returns = gae(rewards, values, bools([1, 1, 1, 0, 0]), gamma=1.0, lam=0.9)
    assert advantages[0].tolist() == pytest.approx([0.704, 0.56, 0.4, 0.0, 0.0], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.904, 0.96, 1.0, 0.0, 0.0], abs=1e-6)
    assert advantages[0].tolist() != pytest.approx([7.994, 8.66, 9.4, 0.0, 0.0], abs=0.1)


def test_n18_reward_belongs_to_the_last_trainable_token():
    mask, values = bools([1, 1, 1, 0]), doubles([0.5, 0.5, 0.5, 3])
    rewards = token_rewards(torch.tensor([1.0], dtype=torch.float64), mask)
    assert rewards.tolist() == [[0, 0, 1.0, 0]]
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=1.0)
    assert advantages[0].tolist() == pytest.approx([-0.25, 0.0, 0.5, 0.0], abs=1e-6)
    assert returns[0].tolist() == pytest.approx([0.25, 0.5, 1.0, 0.0], abs=1e-6)
    with pytest.raises(AssertionError, match="no token is trained"):  # What gave [-0.375, -0.25, 0, 0].
        gae(doubles([0, 0, 0, 1.0]), values, mask, gamma=0.5, lam=1.0)


def padded_case(seed):
    """Sequences of mixed lengths with observations (mask False) between turns, and the same without them."""
    random = np.random.default_rng(seed)
    lengths, width = [7, 1, 4, 0, 9], 12
    rewards, values, mask = np.zeros((5, width)), random.normal(size=(5, width)) * 50, np.zeros((5, width), dtype=bool)
    plain = []
    for row, length in enumerate(lengths):
        places = np.sort(random.permutation(width)[:length])
        mask[row, places] = True
        rewards[row, places] = random.normal(size=length)
        values[row, places] = random.normal(size=length)
        plain.append((rewards[row, places], values[row, places], places))
    bootstrap = random.normal(size=5) * (np.arange(5) % 2)
    return torch.tensor(rewards), torch.tensor(values), torch.tensor(mask), torch.tensor(bootstrap), plain


def check_rows(result, plain, reference):
    for row, (rewards, values, places) in enumerate(plain):
        expected = np.zeros(result.shape[1])
        if len(places):
            expected[places] = reference(row, rewards, values)
        assert result[row].numpy() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (0.99, 0.0), (0.7, 1.0)])
def test_gae_is_the_sum_of_discounted_errors_over_sequences_of_mixed_lengths(seed, gamma, lam):
    rewards, values, mask, bootstrap, plain = padded_case(seed)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam, bootstrap_B=bootstrap)

    def expected(row, r, v):
        return references.gae_by_sum(r, v, gamma, lam, bootstrap[row].item())

    check_rows(advantages, plain, expected)
    check_rows(returns, plain, lambda row, r, v: expected(row, r, v) + v)


@pytest.mark.parametrize("gamma", [1.0, 0.8])
def test_discounted_returns_are_the_sum_written_out(gamma):
    rewards, _, mask, bootstrap, plain = padded_case(11)
    result = discounted_returns(rewards, mask, gamma=gamma, bootstrap_B=bootstrap)
    check_rows(result, plain, lambda row, r, v: references.returns_by_sum(r, gamma, bootstrap[row].item()))


@pytest.mark.parametrize("num_steps", [1, 2, 3, 8, 30])
def test_n_step_returns_are_the_sum_written_out(num_steps):
    rewards, values, mask, bootstrap, plain = padded_case(12)
    result = n_step_returns(rewards, values, mask, gamma=0.9, num_steps=num_steps, bootstrap_B=bootstrap)
    check_rows(result, plain, lambda row, r, v: references.n_step_by_sum(r, v, 0.9, num_steps, bootstrap[row].item()))


def test_lambda_one_is_returns_minus_values_and_lambda_zero_the_one_step_error():
    rewards, values, mask, bootstrap, _ = padded_case(5)
    monte_carlo = discounted_returns(rewards, mask, gamma=0.9, bootstrap_B=bootstrap)
    whole, returns = gae(rewards, values, mask, gamma=0.9, lam=1.0, bootstrap_B=bootstrap)
    assert torch.allclose(whole, torch.where(mask, monte_carlo - values, 0), atol=1e-12)
    assert torch.allclose(returns, monte_carlo, atol=1e-12)
    one_step, _ = gae(rewards, values, mask, gamma=0.9, lam=0.0, bootstrap_B=bootstrap)
    n_step = n_step_returns(rewards, values, mask, gamma=0.9, num_steps=1, bootstrap_B=bootstrap)
    assert torch.allclose(one_step, torch.where(mask, n_step - values, 0), atol=1e-12)
    far = n_step_returns(rewards, values, mask, gamma=0.9, num_steps=12, bootstrap_B=bootstrap)
    assert torch.allclose(far, monte_carlo, atol=1e-12)


def test_a_truncated_sequence_bootstraps_and_a_finished_one_does_not():
    # One token, reward 0, value 0.3: finished -0.3; cut with value 0.8 behind it 0.5 * 0.8 - 0.3 = 0.1.
    rewards, values, mask = doubles([0.0], [0.0]), doubles([0.3], [0.3]), bools([1], [1])
    bootstrap = torch.tensor([0.0, 0.8], dtype=torch.float64)
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.95, bootstrap_B=bootstrap)
    assert advantages.flatten().tolist() == pytest.approx([-0.3, 0.1], abs=1e-12)
    assert returns.flatten().tolist() == pytest.approx([0.0, 0.4], abs=1e-12)


def test_values_of_untrained_positions_do_not_matter_even_nan():
    rewards, values, mask, bootstrap, _ = padded_case(6)
    junk = torch.where(mask, values, torch.nan)
    for a, b in zip(
        gae(rewards, values, mask, gamma=0.9, lam=0.9, bootstrap_B=bootstrap),
        gae(rewards, junk, mask, gamma=0.9, lam=0.9, bootstrap_B=bootstrap),
        strict=True,
    ):
        assert torch.equal(a, b)
    steps = {"gamma": 0.9, "num_steps": 3, "bootstrap_B": bootstrap}
    assert torch.equal(n_step_returns(rewards, values, mask, **steps), n_step_returns(rewards, junk, mask, **steps))


def test_padding_changes_nothing():
    rewards, values, mask, bootstrap, _ = padded_case(6)
    wider = [torch.cat([x, x.new_zeros(5, 4)], dim=1) for x in (rewards, values, mask)]
    narrow, _ = gae(rewards, values, mask, gamma=0.9, lam=0.9, bootstrap_B=bootstrap)
    wide, _ = gae(*wider, gamma=0.9, lam=0.9, bootstrap_B=bootstrap)
    assert torch.equal(wide[:, :12], narrow)
    assert not wide[:, 12:].any()


def test_decoupled_gae_takes_advantages_from_one_lambda_and_returns_from_the_other():
    rewards, values, mask, bootstrap, plain = padded_case(8)
    lam = torch.tensor([0.9, 0.5, 0.7, 0.1, 0.3], dtype=torch.float64)
    advantages, returns = decoupled_gae(
        rewards, values, mask, gamma=0.95, lam_policy=lam, lam_critic=1.0, bootstrap_B=bootstrap
    )
    check_rows(
        advantages,
        plain,
        lambda row, r, v: references.gae_by_sum(r, v, 0.95, lam[row].item(), bootstrap[row].item()),
    )
    check_rows(returns, plain, lambda row, r, v: references.returns_by_sum(r, 0.95, bootstrap[row].item()))


def test_length_adaptive_lambda_by_hand():
    # 1 - 1 / (0.05 l): 100 tokens 0.8, 1000 tokens 0.98, 20 tokens and fewer 0.
    result = length_adaptive_lambda(torch.tensor([100, 1000, 20, 3, 0]), 0.05)
    assert result.tolist() == pytest.approx([0.8, 0.98, 0.0, 0.0, 0.0], abs=1e-12)


def test_a_sequence_without_trainable_tokens_gets_nothing():
    mask = bools([0, 0, 0])
    assert token_rewards(torch.tensor([1.0]), mask).tolist() == [[0, 0, 0]]
    advantages, returns = gae(torch.zeros(1, 3), torch.ones(1, 3), mask, gamma=1.0, lam=1.0)
    assert advantages.tolist() == returns.tolist() == [[0, 0, 0]]


def test_shapes_are_checked():
    with pytest.raises(AssertionError, match="bool"):
        gae(doubles([1.0]), doubles([1.0]), torch.ones(1, 1), gamma=1.0, lam=1.0)
    with pytest.raises(AssertionError, match="one shape"):
        gae(doubles([1.0]), doubles([1.0, 2.0]), bools([1]), gamma=1.0, lam=1.0)
    with pytest.raises(AssertionError, match="per sequence"):
        discounted_returns(doubles([1.0]), bools([1]), gamma=1.0, bootstrap_B=torch.zeros(2))
