"""Expected values: field cases N10, N11, N13, N26, N28 and hand calculation."""

import pytest
import torch

from plait.algorithms.losses import ppo_clip
from plait.algorithms.reduce import sequence_weights


def ratio_loss(ratio, advantage, low=0.2, high=0.28):
    logprobs = torch.tensor(ratio, dtype=torch.float64).log().requires_grad_()
    result = ppo_clip(
        logprobs,
        torch.zeros_like(logprobs),
        torch.tensor(advantage, dtype=torch.float64),
        clip_low=low,
        clip_high=high,
    )
    result.loss_R.sum().backward()
    return result, logprobs.grad


def test_n26_asymmetric_clip():
    result, gradient = ratio_loss([1.5, 0.5, 1.5, 0.5], [1.0, 1.0, -1.0, -1.0])
    assert result.loss_R.tolist() == pytest.approx([-1.28, -0.5, 1.5, 0.8], abs=1e-6)
    assert (gradient != 0).tolist() == [False, True, True, False]
    assert result.binds_R.double().mean() == 0.5
    assert result.outside_R.double().mean() == 1.0


def test_n26_symmetric_clip_is_another_loss():
    result, _ = ratio_loss([1.5], [1.0], low=0.2, high=0.2)
    assert result.loss_R.tolist() == pytest.approx([-1.2], abs=1e-6)


def test_n28_on_policy_loss_is_zero_and_its_gradient_is_not():
    logprobs = torch.full((6,), -0.7, requires_grad=True)
    advantages = torch.tensor([1.0] * 3 + [-1.0] * 3)
    result = ppo_clip(logprobs, logprobs.detach(), advantages, clip_low=0.2, clip_high=0.2)
    weights = sequence_weights(torch.tensor([3, 3]), "token-mean", max_tokens=9).float()
    loss = (weights.repeat_interleave(3) * result.loss_R).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-7)
    assert not result.binds_R.any()
    assert logprobs.grad.tolist() == pytest.approx([-1 / 6] * 3 + [1 / 6] * 3, abs=1e-6)


def reduced(per_token_loss, reduction, max_tokens):
    lengths = torch.tensor([len(tokens) for tokens in per_token_loss])
    weights = sequence_weights(lengths, reduction, max_tokens=max_tokens).tolist()
    return sum(weight * sum(tokens) for weight, tokens in zip(weights, per_token_loss, strict=True))


N10 = [[-1.0] * 2, [1.0] * 8]
N11 = [[0.9], [0.1, 0.2, 0.3, 0.4], [1.0, 1.0, 0.0, 0.0, 0.5]]


@pytest.mark.parametrize(
    ("losses", "reduction", "max_tokens", "expected"),
    [
        (N10, "token-mean", 10, 0.6),
        (N10, "seq-mean-token-mean", 10, 0.0),
        (N10, "seq-mean-token-sum-norm", 10, 0.3),
        (N11, "token-mean", 6, 0.44),
        (N11, "seq-mean-token-mean", 6, 0.55),
        (N11, "seq-mean-token-sum-norm", 6, 0.24444444),
        ([[2.0] * 5] * 4, "token-mean", 5, 2.0),  # N13
    ],
)
def test_n10_n11_n13_reductions(losses, reduction, max_tokens, expected):
    assert reduced(losses, reduction, max_tokens) == pytest.approx(expected, abs=1e-6)


def test_n10_pull_per_token_under_the_sequence_mean():
    assert sequence_weights(torch.tensor([2, 8]), "seq-mean-token-mean", max_tokens=10).tolist() == [
        0.25,
        0.0625,
    ]


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_empty_sequences_count_nowhere(reduction):
    with_empty = sequence_weights(torch.tensor([3, 0, 5]), reduction, max_tokens=8).tolist()
    without = sequence_weights(torch.tensor([3, 5]), reduction, max_tokens=8).tolist()
    assert with_empty == [without[0], 0.0, without[1]]
    assert sequence_weights(torch.tensor([0, 0]), reduction, max_tokens=8).tolist() == [0.0, 0.0]
