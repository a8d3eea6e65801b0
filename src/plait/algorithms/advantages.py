"""Advantages by named factors: which baseline is subtracted, and by which scale the result is divided.

Shapes: B sequences. `group_B` holds an integer per sequence; siblings are those with the same integer, wherever
they stand. Sequences with `counted_B` False (failed, abstained, without trainable tokens) take no part in any
statistic and get advantage 0.
"""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["none", "group_mean", "leave_one_out"]
Scale = Literal["none", "group_std", "batch_std"]


def sequence_advantages(
    rewards_B: Tensor,
    group_B: Tensor,
    counted_B: Tensor,
    *,
    baseline: Baseline,
    scale: Scale,
    std_correction: Literal[0, 1],
    eps: float,
) -> Tensor:
    """A_i = (r_i - b_i) / (s_i + eps), float64 [B].

    b: "none" 0; "group_mean" mean of the group (GRPO, arXiv 2402.03300, section 4.1.1); "leave_one_out" mean of the
    siblings without i (RLOO, arXiv 2402.14740, section 3.2).
    s: "none" divides by nothing; "group_std" and "batch_std" are sqrt(sum (r - mean)^2 / (n - std_correction)) over
    the counted samples of the group, or of the batch.
    A group of equal rewards (max = min, so rounding cannot hide it) has advantage 0 under any baseline but "none",
    and under a scale by group. A group with one counted sample has no siblings: 0, except with baseline "none".
    """
    _check(rewards_B, group_B, counted_B)
    rewards_B = rewards_B.double()
    advantages_B = torch.zeros_like(rewards_B)
    batch_std = _std(rewards_B[counted_B], std_correction)
    for group in torch.unique(group_B[counted_B]):
        members_B = (group_B == group) & counted_B
        rewards = rewards_B[members_B]
        has_signal = bool(rewards.max() > rewards.min())
        if not has_signal and (baseline != "none" or scale == "group_std"):
            continue
        if baseline == "group_mean":
            centred = rewards - rewards.mean()
        elif baseline == "leave_one_out":
            centred = rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
        else:
            centred = rewards
        if scale == "group_std":
            centred = centred / (_std(rewards, std_correction) + eps)
        elif scale == "batch_std":
            centred = centred / (batch_std + eps) if batch_std > 0 else torch.zeros_like(centred)
        advantages_B[members_B] = centred
    return advantages_B


def _std(values: Tensor, correction: int) -> Tensor:
    """Two-pass standard deviation; 0 where there are too few values (E[x^2] - E[x]^2 would leave a residue)."""
    if len(values) <= correction or values.max() == values.min():
        return torch.zeros((), dtype=values.dtype)
    return ((values - values.mean()).square().sum() / (len(values) - correction)).sqrt()


def _check(rewards_B: Tensor, group_B: Tensor, counted_B: Tensor) -> None:
    assert rewards_B.ndim == group_B.ndim == counted_B.ndim == 1, "expected three vectors of one entry per sequence"
    assert rewards_B.shape == group_B.shape == counted_B.shape, "expected vectors of equal length"
    assert counted_B.dtype == torch.bool, f"counted_B is {counted_B.dtype}, expected bool"
    assert bool(rewards_B[counted_B].isfinite().all()), "a counted reward is not finite"
