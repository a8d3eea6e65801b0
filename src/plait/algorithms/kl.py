"""Per-token estimators of KL(policy || reference) from the sampled token (Schulman, "Approximating KL divergence").

With d = log pi - log ref of the sampled token: k1 = d is unbiased and noisy; k2 = d^2 / 2 is biased, and its gradient
is an unbiased gradient of the KL; k3 = exp(-d) + d - 1 is unbiased and never negative.
"""

from torch import Tensor


def k1(logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
    """k1 = log pi - log ref. For reporting only: as a loss its expected gradient is zero."""
    return logprobs_R - ref_logprobs_R


def k2(logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
    """k2 = (log pi - log ref)^2 / 2."""
    return (logprobs_R - ref_logprobs_R).square() / 2


def k3(logprobs_R: Tensor, ref_logprobs_R: Tensor) -> Tensor:
    """k3 = exp(log ref - log pi) - (log ref - log pi) - 1."""
    difference = ref_logprobs_R - logprobs_R
    return difference.exp() - difference - 1


ESTIMATORS = {"k2": k2, "k3": k3}
