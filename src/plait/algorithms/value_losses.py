"""Losses of the critic per token, and how much of the returns it explains. Shapes: R response tokens."""

from typing import NamedTuple

import torch
from torch import Tensor, maximum


class ValueLoss(NamedTuple):
    """loss_R: loss per token. binds_R: the clip takes the gradient away."""

    loss_R: Tensor
    binds_R: Tensor


def squared(values_R: Tensor, returns_R: Tensor) -> ValueLoss:
    """L = (V - G)^2 / 2. Returns are constants."""
    assert values_R.shape == returns_R.shape, "expected one return per value"
    return ValueLoss((values_R - returns_R).square() / 2, torch.zeros_like(values_R, dtype=torch.bool))


def clipped(values_R: Tensor, old_values_R: Tensor, returns_R: Tensor, *, clip: float) -> ValueLoss:
    """L = max((V - G)^2, (clip(V, V_old - c, V_old + c) - G)^2) / 2, c = clip.

    PPO's value loss as its first implementation has it (github.com/openai/baselines, ppo2; not in the paper).
    The larger of the two counts: a value that moved more than c towards its return is held, one that moved away is not.
    """
    assert values_R.shape == old_values_R.shape == returns_R.shape, "expected one entry per token in each"
    assert clip > 0, f"clip {clip} is not positive"
    near_R = old_values_R + (values_R - old_values_R).clamp(-clip, clip)
    free_R, bound_R = (values_R - returns_R).square() / 2, (near_R - returns_R).square() / 2
    return ValueLoss(maximum(free_R, bound_R), bound_R > free_R)


def explained_variance(values_R: Tensor, returns_R: Tensor) -> float | None:
    """1 - Var(G - V) / Var(G): 1 is a perfect critic, 0 one that says a constant, below 0 is worse than a constant.

    None where all returns are equal: there is nothing to explain.
    """
    values_R, returns_R = values_R.detach().double(), returns_R.double()
    if len(returns_R) == 0 or returns_R.max() == returns_R.min():
        return None
    return 1 - float((returns_R - values_R).var(correction=0) / returns_R.var(correction=0))
