"""Advantages by named factors: which baseline is subtracted, by which scale the result is divided, what is whitened.

Shapes: B sequences. `group_B` holds an integer per sequence; siblings are those with the same integer, wherever
they stand. Sequences with `counted_B` False (failed, abstained, without trainable tokens) take no part in any
statistic and get advantage 0. The baseline "value" is a critic's: see returns.gae.
"""

from typing import Literal

import torch
from torch import Tensor

Baseline = Literal["none", "group_mean", "leave_one_out", "batch_mean", "greedy", "length_weighted"]
Scale = Literal["none", "group_std", "batch_std", "leave_one_out_std"]


def sequence_advantages(
    rewards_B: Tensor,
    group_B: Tensor,
    counted_B: Tensor,
    *,
    baseline: Baseline,
    scale: Scale,
    std_correction: Literal[0, 1],
    eps: float,
    lengths_B: Tensor | None = None,
    greedy_rewards_B: Tensor | None = None,
) -> Tensor:
    """A_i = (r_i - b_i) / (s_i + eps), float64 [B].

    b: "none" 0; "group_mean" mean of the group (GRPO, arXiv 2402.03300); "leave_one_out" mean of the
    siblings without i (RLOO, arXiv 2402.14740); "batch_mean" mean of the batch; "greedy" the reward of
    a greedy sample of the same prompt, greedy_rewards_B (ReMax, arXiv 2310.10505);
    "length_weighted" sum l r / sum l over the group, lengths_B in tokens (OPO, arXiv 2505.23585).
    s: "none" divides by nothing; "group_std" and "batch_std" are sqrt(sum (r - mean)^2 / (n - std_correction)) over
    the counted samples of the group, or of the batch; "leave_one_out_std" the same over the siblings without i, and
    where that is 0 the sample is left unscaled.
    A group of equal rewards (max = min, so rounding cannot hide it) has advantage 0 where the baseline is made of the
    group. A group with one counted sample has no siblings: likewise 0. Any other scale of 0 gives advantage 0.
    """
    _check(rewards_B, group_B, counted_B)
    rewards_B = rewards_B.double()
    baselines_B = _baselines(rewards_B, group_B, counted_B, baseline, lengths_B, greedy_rewards_B)
    centred_B = torch.where(counted_B, rewards_B - baselines_B, 0)
    if scale == "none":
        return centred_B
    if scale == "batch_std":
        std = _std(rewards_B[counted_B], std_correction)
        return centred_B / (std + eps) if std > 0 else torch.zeros_like(centred_B)
    for group in torch.unique(group_B[counted_B]):
        members_B = (group_B == group) & counted_B
        if scale == "group_std":
            std = _std(rewards_B[members_B], std_correction)
            centred_B[members_B] = centred_B[members_B] / (std + eps) if std > 0 else 0.0
        else:
            stds = _leave_one_out_stds(rewards_B[members_B], std_correction)
            centred_B[members_B] /= torch.where(stds > 0, stds + eps, 1)
    return centred_B


def whiten(
    values_N: Tensor, counts_N: Tensor, *, shift_mean: bool, std_correction: Literal[0, 1], eps: float
) -> Tensor:
    """(x - mean) / (std + eps), or x / (std + eps) without shift_mean, float64 [N]; 0 where counts_N is 0.

    mean = sum c x / sum c and std = sqrt(sum c (x - mean)^2 / (sum c - std_correction)), c = counts_N: how often an
    entry counts. It serves three cases: advantages per token with their mask as counts (PPO); advantages per sequence
    with 1 for counted ones (statistics over sequences); advantages per sequence with their numbers of tokens
    (statistics over tokens, REINFORCE++, arXiv 2501.03262). All entries of an update's batch belong
    into one call: the statistics of a part are others.
    A deviation of 0 (equal values, or too few) leaves nothing to compare: all 0.
    """
    assert values_N.ndim == 1, "expected a vector"
    assert values_N.shape == counts_N.shape, "expected one count per value"
    used_N, counts_N = counts_N > 0, counts_N.double()
    values_N = torch.where(used_N, values_N.double(), 0)
    assert bool(values_N.isfinite().all()), "a counted value is not finite"
    total = counts_N.sum()
    if total <= std_correction or values_N[used_N].max() == values_N[used_N].min():
        return torch.zeros_like(values_N)
    mean = (counts_N * values_N).sum() / total
    std = ((counts_N * (values_N - mean).square()).sum() / (total - std_correction)).sqrt()
    return torch.where(used_N, (values_N - mean if shift_mean else values_N) / (std + eps), 0)


def _baselines(
    rewards_B: Tensor,
    group_B: Tensor,
    counted_B: Tensor,
    baseline: Baseline,
    lengths_B: Tensor | None,
    greedy_rewards_B: Tensor | None,
) -> Tensor:
    """b_i of the counted sequences; what stands at the others is not used."""
    if baseline == "none":
        return torch.zeros_like(rewards_B)
    if baseline == "greedy":
        assert greedy_rewards_B is not None, "baseline greedy needs greedy_rewards_B"
        assert bool(greedy_rewards_B[counted_B].isfinite().all()), "a greedy reward is not finite"
        return greedy_rewards_B.double()
    if baseline == "batch_mean":
        return _mean(rewards_B[counted_B]).expand_as(rewards_B)
    baselines_B = rewards_B.clone()
    for group in torch.unique(group_B[counted_B]):
        members_B = (group_B == group) & counted_B
        rewards = rewards_B[members_B]
        if rewards.max() == rewards.min():
            continue  # Their own reward is the baseline, to the last bit.
        if baseline == "group_mean":
            baselines_B[members_B] = rewards.mean()
        elif baseline == "leave_one_out":
            baselines_B[members_B] = (rewards.sum() - rewards) / (len(rewards) - 1)
        else:
            assert lengths_B is not None, "baseline length_weighted needs lengths_B"
            lengths = lengths_B[members_B].double()
            assert bool((lengths > 0).all()), "a counted sequence has no tokens"
            baselines_B[members_B] = (lengths * rewards).sum() / lengths.sum()
    return baselines_B


def _mean(values: Tensor) -> Tensor:
    """Mean that is exactly the value where all are equal."""
    if len(values) == 0 or values.max() == values.min():
        return values[:1].sum()
    return values.mean()


def _std(values: Tensor, correction: int) -> Tensor:
    """Two-pass standard deviation; 0 where there are too few values (E[x^2] - E[x]^2 would leave a residue)."""
    if len(values) <= correction or values.max() == values.min():
        return torch.zeros((), dtype=values.dtype, device=values.device)
    return ((values - values.mean()).square().sum() / (len(values) - correction)).sqrt()


def _leave_one_out_stds(values: Tensor, correction: int) -> Tensor:
    others = [torch.cat([values[:i], values[i + 1 :]]) for i in range(len(values))]
    return torch.stack([_std(rest, correction) for rest in others])


def _check(rewards_B: Tensor, group_B: Tensor, counted_B: Tensor) -> None:
    assert rewards_B.ndim == group_B.ndim == counted_B.ndim == 1, "expected three vectors of one entry per sequence"
    assert rewards_B.shape == group_B.shape == counted_B.shape, "expected vectors of equal length"
    assert counted_B.dtype == torch.bool, f"counted_B is {counted_B.dtype}, expected bool"
    assert bool(rewards_B[counted_B].isfinite().all()), "a counted reward is not finite"
