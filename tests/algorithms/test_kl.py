"""Expected values: field cases N09, N22, N25, hand calculation, and exact sums over a small vocabulary."""

import math

import pytest
import torch

from plait.algorithms import kl
from plait.algorithms.advantages import sequence_advantages


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_n22_kl_estimators():
    logprobs, reference = doubles(-1.0, -2.0), doubles(-1.2, -1.5)
    assert kl.k1(logprobs, reference).tolist() == pytest.approx([0.2, -0.5], abs=1e-6)
    assert kl.k2(logprobs, reference).tolist() == pytest.approx([0.02, 0.125], abs=1e-6)
    assert kl.k3(logprobs, reference).tolist() == pytest.approx([0.01873075, 0.14872127], abs=1e-6)
    assert kl.k3(logprobs, reference).tolist() != pytest.approx([0.02140276, 0.10653066], abs=1e-4)


def test_n25_kl_of_a_group_without_signal():
    k3 = kl.k3(doubles(-1.0, -2.0), doubles(-1.2, -1.5))
    assert 0.05 * k3.mean().item() == pytest.approx(0.0041863, abs=1e-6)


def test_kl_gradients_by_hand():
    # d/dx of x^2/2 is x, of exp(-x) + x - 1 is 1 - exp(-x), at x = log pi - log ref = 0.3.
    for estimator, expected in (
        (kl.k1, 1.0),
        (kl.k2, 0.3),
        (kl.k3, 1 - math.exp(-0.3)),
        (kl.k3_with_k2_gradient, 0.3),
    ):
        logprob = doubles(-1.0).requires_grad_()
        estimator(logprob, doubles(-1.3)).sum().backward()
        assert logprob.grad.item() == pytest.approx(expected, abs=1e-9)


def test_k3_with_k2_gradient_has_the_value_of_k3():
    logprobs, reference = doubles(-1.0, -2.0), doubles(-1.2, -1.5)
    assert kl.k3_with_k2_gradient(logprobs, reference).tolist() == pytest.approx([0.01873075, 0.14872127], abs=1e-8)


def distributions():
    logits = doubles(0.3, -1.0, 0.8, 0.0).requires_grad_()
    return logits, logits.log_softmax(0), doubles(0.1, 0.2, -0.5, 0.6).log_softmax(0)


@pytest.mark.parametrize("estimator", [kl.k1, kl.k3, kl.k3_with_k2_gradient])
def test_these_estimators_have_the_mean_kl(estimator):
    _, logprobs, reference = distributions()
    exact = (logprobs.exp() * (logprobs - reference)).sum().item()
    mean = (logprobs.exp() * estimator(logprobs, reference)).sum().item()
    assert mean == pytest.approx(exact, abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "meaning"),
    [
        (kl.k1, "nothing"),
        (kl.k2, "policy || reference"),
        (kl.k3, "reference || policy"),
        (kl.k3_with_k2_gradient, "policy || reference"),
    ],
)
def test_what_the_expected_gradient_of_a_kl_loss_is_the_gradient_of(estimator, meaning):
    """Exact expectation over the vocabulary: each token's loss gradient times its probability, held constant."""
    logits, logprobs, reference = distributions()
    (gradient,) = torch.autograd.grad(
        (logprobs.exp().detach() * estimator(logprobs, reference)).sum(), logits, retain_graph=True
    )
    divergences = {
        "nothing": 0 * logits.sum(),
        "policy || reference": (logprobs.exp() * (logprobs - reference)).sum(),
        "reference || policy": (reference.exp() * (reference - logprobs)).sum(),
    }
    exact = {
        name: torch.autograd.grad(value, logits, retain_graph=True)[0].tolist() for name, value in divergences.items()
    }
    assert gradient.tolist() == pytest.approx(exact[meaning], abs=1e-12)
    for name, other in exact.items():
        assert name == meaning or gradient.tolist() != pytest.approx(other, abs=1e-3)


def test_k3_of_a_token_that_the_policy_lost_is_finite_in_fp32_and_pulls_it_back():
    logprob = torch.tensor([-120.0], requires_grad=True)
    value = kl.k3(logprob, torch.tensor([-1.0]))
    value.sum().backward()
    assert value.isfinite().all()
    assert -math.inf < logprob.grad.item() < -1e8


def test_n09_kl_in_the_reward():
    # The sums 2, 4, 1, 3 of the case, spread over two tokens each; log ref is 0.
    logprobs = doubles(1.5, 0.5, 1.0, 3.0, 0.25, 0.75, 3.0, 0.0)
    penalty = kl.reward_penalty(logprobs, torch.zeros_like(logprobs), estimator="k1", coefficient=0.1)
    shaped = doubles(1.0, 1.0, 0.0, 0.0) + penalty.view(4, 2).sum(1)
    assert shaped.tolist() == pytest.approx([0.8, 0.6, -0.1, -0.3], abs=1e-6)
    advantages = sequence_advantages(
        shaped,
        torch.zeros(4, dtype=torch.int64),
        torch.ones(4, dtype=torch.bool),
        baseline="group_mean",
        scale="none",
        std_correction=1,
        eps=0.0,
    ).tolist()
    assert advantages == pytest.approx([0.55, 0.35, -0.35, -0.55], abs=1e-6)
    assert advantages != pytest.approx([0.5, 0.5, -0.5, -0.5], abs=0.01)


def test_reward_penalty_is_a_constant():
    logprobs = doubles(-1.0).requires_grad_()
    assert not kl.reward_penalty(logprobs, doubles(-2.0), estimator="k3", coefficient=0.5).requires_grad


@pytest.mark.parametrize(
    ("measured", "expected"),
    [(6.0, 0.2), (6.6, 0.202), (60.0, 0.204), (5.4, 0.198), (0.0, 0.196), (-1.0, 0.196)],
)
def test_adapted_coefficient_by_hand(measured, expected):
    # Target 6, gain 0.1: 0.2 (1 + 0.1 clip(kl / 6 - 1, -0.2, 0.2)).
    assert kl.adapted_coefficient(0.2, measured, target=6.0, gain=0.1) == pytest.approx(expected, abs=1e-12)


def test_adapted_coefficient_refuses_what_it_cannot_use():
    with pytest.raises(AssertionError, match="positive"):
        kl.adapted_coefficient(0.0, 1.0, target=6.0, gain=0.1)
    with pytest.raises(AssertionError, match="NaN"):
        kl.adapted_coefficient(0.2, math.nan, target=6.0, gain=0.1)
