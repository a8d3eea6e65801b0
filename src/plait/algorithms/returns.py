"""Returns and advantages over time. Shapes: B sequences, T positions.

`mask_BT` is True at the trainable tokens. Other positions (padding, observations between turns) are stepped over,
whatever stands there: the successor of a token is the next trainable one of its sequence. Results are 0 there.

A sequence ends in one of two ways. A finished one has nothing after its last token: value 0. A truncated one would
have gone on; where the caller wants that counted, `bootstrap_B` holds the critic's value of the state after the last
token, and 0 for finished sequences. None is 0 for all.

Values may be anything where the mask is False; rewards must be 0 there, since they would be lost (token_rewards puts
a sequence's reward where it belongs).

float32 or float64 as given; no gradient is meant to flow through any of this.
"""

import torch
from torch import Tensor


def token_rewards(rewards_B: Tensor, mask_BT: Tensor) -> Tensor:
    """The reward of each sequence at its last trainable token, 0 elsewhere, [B, T].

    A sequence without trainable tokens loses its reward: there is no token to give it to.
    """
    assert mask_BT.dtype == torch.bool, f"the mask is {mask_BT.dtype}, expected bool"
    assert rewards_B.shape == mask_BT.shape[:1], "expected one reward per sequence"
    is_last_BT = mask_BT & (mask_BT.cumsum(1) == mask_BT.sum(1, keepdim=True))
    return torch.where(is_last_BT, rewards_B[:, None], 0)


def discounted_returns(
    rewards_BT: Tensor, mask_BT: Tensor, *, gamma: float, bootstrap_B: Tensor | None = None
) -> Tensor:
    """G_t = r_t + gamma G_(t+1), after the end bootstrap_B: Monte Carlo returns (Sutton and Barto)."""
    _check(rewards_BT, mask_BT)
    order_BT, lengths_B = _trainable_first(mask_BT)
    rewards_BT = rewards_BT.gather(1, order_BT)
    following_B = _after_the_end(rewards_BT, bootstrap_B)
    returns_BT = torch.zeros_like(rewards_BT)
    for t in reversed(range(rewards_BT.shape[1])):
        return_B = rewards_BT[:, t] + gamma * following_B
        following_B = torch.where(t < lengths_B, return_B, following_B)
        returns_BT[:, t] = following_B
    return _put_back(returns_BT, order_BT, mask_BT)


def gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages A_t = delta_t + gamma lam A_(t+1), delta_t = r_t + gamma V_(t+1) - V_t; returns A_t + V_t.

    Generalised advantage estimation, arXiv 1506.02438. lam: a number, or one per sequence [B].
    V after the last token is bootstrap_B. Nothing is whitened here.
    """
    _check(rewards_BT, mask_BT, values_BT)
    order_BT, lengths_B = _trainable_first(mask_BT)
    aligned_rewards_BT, aligned_values_BT = rewards_BT.gather(1, order_BT), values_BT.gather(1, order_BT)
    next_value_B = _after_the_end(aligned_values_BT, bootstrap_B)
    advantage_B = torch.zeros_like(next_value_B)
    advantages_BT = torch.zeros_like(aligned_values_BT)
    for t in reversed(range(values_BT.shape[1])):
        is_token_B = t < lengths_B
        delta_B = aligned_rewards_BT[:, t] + gamma * next_value_B - aligned_values_BT[:, t]
        advantage_B = torch.where(is_token_B, delta_B + gamma * lam * advantage_B, advantage_B)
        next_value_B = torch.where(is_token_B, aligned_values_BT[:, t], next_value_B)
        advantages_BT[:, t] = advantage_B
    advantages_BT = _put_back(advantages_BT, order_BT, mask_BT)
    return advantages_BT, torch.where(mask_BT, advantages_BT + values_BT, 0)


def decoupled_gae(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float,
    lam_policy: float | Tensor,
    lam_critic: float | Tensor,
    bootstrap_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages under lam_policy and returns for the critic under lam_critic (VAPO, arXiv 2504.05118).

    lam_critic 1 makes the critic's targets Monte Carlo returns, which a long answer's early tokens need: under 0.95
    the reward at the end reaches a token 1000 positions earlier with weight 0.95^1000 = 5e-23.
    """
    advantages_BT, _ = gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam_policy, bootstrap_B=bootstrap_B)
    _, returns_BT = gae(rewards_BT, values_BT, mask_BT, gamma=gamma, lam=lam_critic, bootstrap_B=bootstrap_B)
    return advantages_BT, returns_BT


def length_adaptive_lambda(lengths_B: Tensor, alpha: float) -> Tensor:
    """lam = 1 - 1 / (alpha l), float64 [B], never below 0 (VAPO, arXiv 2504.05118; alpha 0.05 there).

    The sum of the weights lam^k over a long sequence is then alpha l: it grows with the length. Sequences of at most
    1 / alpha tokens get 0, the one-step error.
    """
    assert alpha > 0, f"alpha {alpha} is not positive"
    return (1 - 1 / (alpha * lengths_B.double()).clamp(min=1)).clamp(min=0)


def n_step_returns(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    *,
    gamma: float,
    num_steps: int,
    bootstrap_B: Tensor | None = None,
) -> Tensor:
    """G_t = sum over k < n of gamma^k r_(t+k) + gamma^n V_(t+n) (Sutton and Barto), n = num_steps.

    Where fewer than n tokens follow, the sum ends with the sequence and bootstrap_B stands for V.
    """
    _check(rewards_BT, mask_BT, values_BT)
    assert num_steps >= 1, f"num_steps {num_steps} is below 1"
    order_BT, lengths_B = _trainable_first(mask_BT)
    num_positions = mask_BT.shape[1]
    is_token_BT = torch.arange(num_positions, device=mask_BT.device) < lengths_B[:, None]
    rewards_BT = torch.where(is_token_BT, rewards_BT.gather(1, order_BT), 0)
    values_BT = torch.where(is_token_BT, values_BT.gather(1, order_BT), 0)
    # The value after the last token stands at position lengths_B.
    extended_BT = torch.cat([values_BT, torch.zeros_like(values_BT[:, :1])], dim=1)
    extended_BT = extended_BT.scatter(1, lengths_B[:, None], _after_the_end(values_BT, bootstrap_B)[:, None])
    returns_BT = torch.zeros_like(rewards_BT)
    left_BT = lengths_B[:, None] - torch.arange(num_positions, device=mask_BT.device)
    for k in range(min(num_steps, num_positions)):
        returns_BT[:, : num_positions - k] += gamma**k * rewards_BT[:, k:]
    steps_BT = left_BT.clamp(min=0, max=num_steps)
    landing_BT = (torch.arange(num_positions, device=mask_BT.device) + steps_BT).clamp(max=num_positions)
    returns_BT = returns_BT + gamma ** steps_BT.to(values_BT.dtype) * extended_BT.gather(1, landing_BT)
    return _put_back(returns_BT, order_BT, mask_BT)


def _trainable_first(mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in their order with the trainable ones first [B, T], and how many those are [B]."""
    return torch.argsort((~mask_BT).int(), dim=1, stable=True), mask_BT.sum(1)


def _put_back(aligned_BT: Tensor, order_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return torch.where(mask_BT, torch.zeros_like(aligned_BT).scatter(1, order_BT, aligned_BT), 0)


def _after_the_end(like_BT: Tensor, bootstrap_B: Tensor | None) -> Tensor:
    if bootstrap_B is None:
        return like_BT.new_zeros(len(like_BT))
    assert bootstrap_B.shape == like_BT.shape[:1], "expected one bootstrap value per sequence"
    return bootstrap_B.to(like_BT.dtype)


def _check(rewards_BT: Tensor, mask_BT: Tensor, values_BT: Tensor | None = None) -> None:
    assert mask_BT.ndim == 2, "expected two dimensions [B, T]"
    assert mask_BT.dtype == torch.bool, f"the mask is {mask_BT.dtype}, expected bool"
    assert rewards_BT.shape == mask_BT.shape, "expected rewards and mask of one shape"
    assert values_BT is None or values_BT.shape == mask_BT.shape, "expected values and mask of one shape"
    assert not bool(rewards_BT[~mask_BT].any()), "a reward stands where no token is trained"
