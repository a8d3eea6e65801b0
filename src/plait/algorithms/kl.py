"""Per-token estimators of KL(policy || reference) from the sampled token (Schulman, "Approximating KL divergence").

With d = log pi - log ref of the sampled token: k1 = d is unbiased and noisy; k2 = d^2 / 2 is biased; k3 = exp(-d) +
d - 1 is unbiased and never negative. As losses, over samples of the policy, their gradients mean something else:

    k1   0: the mean of grad log pi. Never a loss.
    k2   the gradient of KL(policy || reference), unbiased.
    k3   the gradient of KL(reference || policy), since the mean of (1 - ref / pi) grad log pi is -sum ref grad log pi.

In the reward (subtracted from it, as a constant) each estimator is used by its value, and k1 is the usual one.
"""

import math

import torch
from torch import Tensor

from plait.algorithms.ratios import bounded_exp


def k1(logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
    """k1 = log pi - log ref. For rewards and reports: as a loss its expected gradient is zero."""
    return logprobs_R - ref_logprobs_R


def k2(logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
    """k2 = (log pi - log ref)^2 / 2."""
    return (logprobs_R - ref_logprobs_R).square() / 2


def k3(logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
    """k3 = exp(log ref - log pi) - (log ref - log pi) - 1, the exponent bounded by 20 (ratios.py)."""
    difference = ref_logprobs_R - logprobs_R
    return bounded_exp(difference) - difference - 1


def k3_with_k2_gradient(logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
    """The value of k3 with the gradient of k2: an unbiased, non-negative number whose gradient is unbiased too."""
    straight_R = k2(logprobs_R, ref_logprobs_R)
    return straight_R - straight_R.detach() + k3(logprobs_R, ref_logprobs_R).detach()


ESTIMATORS = {"k2": k2, "k3": k3, "k3_with_k2_gradient": k3_with_k2_gradient}
"""Those that may be a loss."""

REWARD_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
"""Those that may be subtracted from the reward."""


@torch.no_grad()
def reward_penalty(logprobs_R: Tensor, ref_logprobs_R: Tensor, *, estimator: str, coefficient: float) -> Tensor:
    """-coefficient k_t: what the KL adds to the reward of each token (arXiv 1909.08593; 2203.02155).

    logprobs_R are those of the policy that sampled, before the update: a constant, like any reward.
    """
    return -coefficient * REWARD_ESTIMATORS[estimator](logprobs_R, ref_logprobs_R)


def adapted_coefficient(coefficient: float, kl: float, *, target: float, gain: float) -> float:
    """The next KL coefficient: beta (1 + gain clip(kl / target - 1, -0.2, 0.2)) (arXiv 1909.08593).

    kl: mean over samples of the sum over tokens, in nats, like target. gain: 0.1 in the paper; implementations write
    num_samples / horizon for it. The coefficient is the controller's whole state: keep it with the checkpoint.
    """
    assert min(coefficient, target, gain) > 0, "coefficient, target and gain must be positive"
    assert not math.isnan(kl), "the KL is NaN"
    return coefficient * (1 + gain * min(max(kl / target - 1, -0.2), 0.2))
