"""Per-token policy losses. Shapes: R response tokens of any number of sequences, one after the other.

An update multiplies each token's loss by the weight of its sequence (reduce.py) and adds up. GSPO and GMPO define one
loss per sequence; here every token of the sequence carries it. Then

    seq-mean-token-mean       (1 / B) sum_i L_i: the published objective, every sequence pulls alike
    token-mean                sum_i n_i L_i / sum_i n_i: sequences pull by their length
    seq-mean-token-sum-norm   (1 / B) sum_i n_i L_i / max_tokens: likewise, by a constant

Old (proximal) and rollout (behaviour) log-probabilities and advantages are constants: no gradient flows into them.
Ratios are bounded by e^20 (ratios.py), far outside every clip: the bound is only met by a negative advantage whose
ratio exploded and that no dual clip holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, maximum, minimum

from plait.algorithms.ratios import bounded_exp, sequence_means


class PolicyLoss(NamedTuple):
    """loss_R: loss per token. binds_R: the clip takes the gradient away. outside_R: the ratio leaves the band."""

    loss_R: Tensor
    binds_R: Tensor
    outside_R: Tensor


def reinforce(logprobs_R: Tensor, advantages_R: Tensor) -> PolicyLoss:
    """L = -A log pi (Williams 1992). Nothing is clipped; right only while the policy is the one that sampled."""
    _check(logprobs_R, advantages_R)
    nowhere_R = torch.zeros_like(logprobs_R, dtype=torch.bool)
    return PolicyLoss(-advantages_R * logprobs_R, nowhere_R, nowhere_R)


def ppo_clip(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """L = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), rho = exp(log pi - log pi_old).

    PPO, arXiv 1707.06347; bounds may differ (clip-higher, DAPO, arXiv 2503.14476).
    dual_clip c > 1: where A < 0 the loss is at most -c A (arXiv 1912.09729, dual-clip PPO), and its gradient 0 beyond.
    """
    _check(logprobs_R, old_logprobs_R, advantages_R)
    assert dual_clip is None or dual_clip > 1, f"dual_clip {dual_clip} is not above 1"
    ratio_R = bounded_exp(logprobs_R - old_logprobs_R)
    return _clipped(ratio_R, advantages_R, clip_low, clip_high, dual_clip)


def decoupled_ppo(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    rollout_logprobs_R: Tensor,
    advantages_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    behaviour_cap: float | None = None,
) -> PolicyLoss:
    """L = w L_ppo_clip, w = min(exp(log pi_old - log pi_rollout), behaviour_cap): AReaL, arXiv 2505.24298.

    old_logprobs_R are those of the proximal policy, the one that the clip measures from: the trainer's weights before
    the step's updates. rollout_logprobs_R are those of the policy versions that sampled. Without staleness (and
    without a gap between engine and trainer) w is 1 and this is PPO. behaviour_cap None bounds w by e^20 only.
    The importance weights of importance.py are this very w: using both would apply it twice.
    """
    _check(logprobs_R, rollout_logprobs_R)
    weight_R = bounded_exp((old_logprobs_R - rollout_logprobs_R).detach())
    if behaviour_cap is not None:
        weight_R = weight_R.clamp(max=behaviour_cap)
    ppo = ppo_clip(
        logprobs_R, old_logprobs_R, advantages_R, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )
    return PolicyLoss(weight_R * ppo.loss_R, ppo.binds_R, ppo.outside_R)


def gspo(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    sequence_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean_t (log pi - log pi_old)) over a sequence.

    GSPO, arXiv 2507.18071, in the form of GSPO-token: s_t = sg(s) pi_t / sg(pi_t).
    Under one advantage per sequence both have the same value and the same gradient, -A s / n_i at each token times
    the sequence's weight; advantages may also differ from token to token. binds_R and outside_R hold for all tokens
    of a sequence alike. The published bounds are 3e-4 and 4e-4: a mean over tokens moves far less than one token.
    """
    _check(logprobs_R, old_logprobs_R, advantages_R)
    log_ratio_R = sequence_means(logprobs_R - old_logprobs_R, sequence_R).to(logprobs_R.dtype)
    ratio_R = bounded_exp(log_ratio_R + (logprobs_R - logprobs_R.detach()))
    return _clipped(ratio_R, advantages_R, clip_low, clip_high, None)


def gmpo(
    logprobs_R: Tensor,
    old_logprobs_R: Tensor,
    advantages_R: Tensor,
    sequence_R: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """L = -A exp(mean_t m_t), m_t = min(x_t, clip_high) where A > 0, max(x_t, -clip_low) where A < 0.

    x_t = log pi - log pi_old. GMPO, arXiv 2507.20673: the geometric mean over a sequence of ratios that are
    clipped token by token, on the side on which PPO clips. The bounds are on the log ratio: the band of the ratio is
    [exp(-clip_low), exp(clip_high)], 0.4 on both sides in the paper. The gradient at a token is -A s / n_i times the
    sequence's weight, 0 where the token is clipped; written with stop-gradients as in gspo.
    """
    _check(logprobs_R, old_logprobs_R, advantages_R)
    log_ratio_R = logprobs_R - old_logprobs_R
    above_R, below_R = log_ratio_R > clip_high, log_ratio_R < -clip_low
    binds_R = (above_R & (advantages_R > 0)) | (below_R & (advantages_R < 0))
    clipped_R = torch.where(binds_R, log_ratio_R.clamp(-clip_low, clip_high), log_ratio_R)
    mean_R = sequence_means(clipped_R, sequence_R).to(logprobs_R.dtype)
    ratio_R = bounded_exp(mean_R + torch.where(binds_R, 0, logprobs_R - logprobs_R.detach()))
    return PolicyLoss(-advantages_R * ratio_R, binds_R, above_R | below_R)


def cispo(
    logprobs_R: Tensor, old_logprobs_R: Tensor, advantages_R: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """L = -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi (MiniMax-M1, arXiv 2506.13585).

    The clip bounds the weight of a token and never takes its gradient away, so binds_R is False everywhere.
    clip_low >= 1 sets no lower bound, as in the paper's runs.
    """
    _check(logprobs_R, old_logprobs_R, advantages_R)
    ratio_R = bounded_exp((logprobs_R - old_logprobs_R).detach())
    weight_R = ratio_R.clamp(1 - clip_low, 1 + clip_high)
    nowhere_R = torch.zeros_like(logprobs_R, dtype=torch.bool)
    return PolicyLoss(-weight_R * advantages_R * logprobs_R, nowhere_R, _outside(ratio_R, clip_low, clip_high))


def _clipped(
    ratio_R: Tensor, advantages_R: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyLoss:
    bound_R = -ratio_R.clamp(1 - clip_low, 1 + clip_high) * advantages_R
    free_R = -ratio_R * advantages_R
    outside_R = _outside(ratio_R, clip_low, clip_high)
    loss_R, binds_R = maximum(free_R, bound_R), outside_R & (bound_R > free_R)
    if dual_clip is not None:
        # Negative where A > 0, where it must not act.
        ceiling_R = torch.where(advantages_R < 0, -dual_clip * advantages_R, torch.inf)
        binds_R = binds_R | (loss_R > ceiling_R)
        loss_R = minimum(loss_R, ceiling_R)
    return PolicyLoss(loss_R, binds_R, outside_R)


def _outside(ratio_R: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return (ratio_R < 1 - clip_low) | (ratio_R > 1 + clip_high)


def _check(*tensors_R: Tensor) -> None:
    assert all(t.shape == tensors_R[0].shape and t.ndim == 1 for t in tensors_R), "expected one entry per token in each"


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a policy loss may read, one entry per response token of whole sequences.

    logprobs_R: current policy, with gradient. old_logprobs_R: the proximal policy (the trainer before the step's
    updates; logprobs_R.detach() where the one update of a step makes the ratio 1). rollout_logprobs_R: the engine,
    when it sampled. sequence_R: int64.
    """

    logprobs_R: Tensor
    old_logprobs_R: Tensor
    rollout_logprobs_R: Tensor
    advantages_R: Tensor
    sequence_R: Tensor


@dataclass(frozen=True, slots=True)
class ClipSettings:
    """Bounds of the policy losses; each loss says what they mean to it. None: no such bound."""

    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    behaviour_cap: float | None = None


POLICY_LOSSES: dict[str, Callable[[TokenBatch, ClipSettings], PolicyLoss]] = {
    "reinforce": lambda t, c: reinforce(t.logprobs_R, t.advantages_R),
    "ppo_clip": lambda t, c: ppo_clip(
        t.logprobs_R,
        t.old_logprobs_R,
        t.advantages_R,
        clip_low=c.clip_low,
        clip_high=c.clip_high,
        dual_clip=c.dual_clip,
    ),
    "decoupled_ppo": lambda t, c: decoupled_ppo(
        t.logprobs_R,
        t.old_logprobs_R,
        t.rollout_logprobs_R,
        t.advantages_R,
        clip_low=c.clip_low,
        clip_high=c.clip_high,
        dual_clip=c.dual_clip,
        behaviour_cap=c.behaviour_cap,
    ),
    "gspo": lambda t, c: gspo(
        t.logprobs_R, t.old_logprobs_R, t.advantages_R, t.sequence_R, clip_low=c.clip_low, clip_high=c.clip_high
    ),
    "gmpo": lambda t, c: gmpo(
        t.logprobs_R, t.old_logprobs_R, t.advantages_R, t.sequence_R, clip_low=c.clip_low, clip_high=c.clip_high
    ),
    "cispo": lambda t, c: cispo(
        t.logprobs_R, t.old_logprobs_R, t.advantages_R, clip_low=c.clip_low, clip_high=c.clip_high
    ),
}
"""Policy losses by name, all called alike: POLICY_LOSSES[name](tokens, clip)."""
