"""Per-token policy losses. Shapes: R response tokens of any number of sequences, one after the other."""

from typing import NamedTuple

from torch import Tensor, maximum


class PolicyLoss(NamedTuple):
    """loss_R: loss per token. binds_R: the clip takes the gradient away. outside_R: the ratio leaves the band."""

    loss_R: Tensor
    binds_R: Tensor
    outside_R: Tensor


def ppo_clip(
    logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(log pi - log pi_old).

    PPO, arXiv 1707.06347, eq. 7; bounds may differ (clip-higher, DAPO, arXiv 2503.14476, eq. 10).
    """
    assert logprobs_R.shape == old_logprobs_R.shape == advantages_R.shape, "expected one entry per token in each"
    ratio_R = (logprobs_R - old_logprobs_R).exp()
    clipped_R = ratio_R.clamp(1 - clip_low, 1 + clip_high)
    free_R, bound_R = -ratio_R * advantages_R, -clipped_R * advantages_R
    outside_R = (ratio_R < 1 - clip_low) | (ratio_R > 1 + clip_high)
    return PolicyLoss(maximum(free_R, bound_R), outside_R & (bound_R > free_R), outside_R)
