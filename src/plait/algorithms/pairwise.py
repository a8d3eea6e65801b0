"""Losses on pairs of answers, or on answers marked good or bad, per pair or answer. Shapes: B pairs (B answers: KTO).

Inputs are log-probabilities of whole answers, summed over their tokens (natural log). Losses are per pair; their mean
over all pairs of an update is the objective. Rewards are what the loss implicitly gives each answer; they are reported
and carry no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


class PairwiseLoss(NamedTuple):
    """loss_B with gradient; chosen_rewards_B and rejected_rewards_B without."""

    loss_B: Tensor
    chosen_rewards_B: Tensor
    rejected_rewards_B: Tensor


class UnpairedLoss(NamedTuple):
    """loss_B with gradient; rewards_B without."""

    loss_B: Tensor
    rewards_B: Tensor


def dpo(
    chosen_B: Tensor,
    rejected_B: Tensor,
    ref_chosen_B: Tensor,
    ref_rejected_B: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> PairwiseLoss:
    """L = -(1 - e) log sigma(h) - e log sigma(-h), h = beta ((c - c_ref) - (r - r_ref)), e = label_smoothing.

    DPO, arXiv 2305.18290; smoothed for labels that are wrong with probability e (conservative DPO,
    ericmitchell.ai/cdpo.pdf). Reward of an answer: beta (log pi - log ref).
    """
    _check(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B)
    assert 0 <= label_smoothing < 0.5, f"label_smoothing {label_smoothing} is not within 0 and 0.5"
    chosen_rewards_B, rejected_rewards_B = beta * (chosen_B - ref_chosen_B), beta * (rejected_B - ref_rejected_B)
    margin_B = chosen_rewards_B - rejected_rewards_B
    loss_B = -(1 - label_smoothing) * logsigmoid(margin_B) - label_smoothing * logsigmoid(-margin_B)
    return PairwiseLoss(loss_B, chosen_rewards_B.detach(), rejected_rewards_B.detach())


def ipo(
    chosen_B: Tensor, rejected_B: Tensor, ref_chosen_B: Tensor, ref_rejected_B: Tensor, *, beta: float
) -> PairwiseLoss:
    """L = (h - 1 / (2 beta))^2, h = (c - c_ref) - (r - r_ref): IPO, arXiv 2310.12036 (tau there).

    The regression target is on the scale of its inputs: with log-probabilities per token (divided by the lengths, as
    the paper's authors ran it according to TRL's source) another beta is right than with sums.
    """
    _check(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B)
    chosen_ratio_B, rejected_ratio_B = chosen_B - ref_chosen_B, rejected_B - ref_rejected_B
    loss_B = (chosen_ratio_B - rejected_ratio_B - 1 / (2 * beta)).square()
    return PairwiseLoss(loss_B, beta * chosen_ratio_B.detach(), beta * rejected_ratio_B.detach())


def simpo(
    chosen_B: Tensor,
    rejected_B: Tensor,
    num_chosen_tokens_B: Tensor,
    num_rejected_tokens_B: Tensor,
    *,
    beta: float,
    margin: float,
) -> PairwiseLoss:
    """L = -log sigma(beta c / |c| - beta r / |r| - margin): SimPO, arXiv 2405.14734. No reference.

    |c| and |r|: numbers of tokens, at least 1. Reward of an answer: beta times its mean log-probability.
    """
    _check(chosen_B, rejected_B, num_chosen_tokens_B, num_rejected_tokens_B)
    fewest = min(int(num_chosen_tokens_B.min()), int(num_rejected_tokens_B.min())) if len(chosen_B) else 1
    assert fewest >= 1, "an answer has no tokens"
    chosen_rewards_B = beta * chosen_B / num_chosen_tokens_B
    rejected_rewards_B = beta * rejected_B / num_rejected_tokens_B
    loss_B = -logsigmoid(chosen_rewards_B - rejected_rewards_B - margin)
    return PairwiseLoss(loss_B, chosen_rewards_B.detach(), rejected_rewards_B.detach())


def kto(
    logprobs_B: Tensor,
    ref_logprobs_B: Tensor,
    is_desirable_B: Tensor,
    *,
    kl: float,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> UnpairedLoss:
    """L = w (1 - sigma(s beta (log pi - log ref - kl))), s = 1 for desirable answers and -1 for others.

    KTO, arXiv 2402.01306, with w = lambda_D or lambda_U and z_0 = kl; the paper's constant lambda_y is
    kept. kl: see mismatched_kl; a constant of the update. Reward of an answer: beta (log pi - log ref).
    """
    _check(logprobs_B, ref_logprobs_B, is_desirable_B)
    assert kl >= 0, f"kl {kl} is negative"
    ratio_B = logprobs_B - ref_logprobs_B
    loss_B = torch.where(
        is_desirable_B,
        desirable_weight * (1 - torch.sigmoid(beta * (ratio_B - kl))),
        undesirable_weight * (1 - torch.sigmoid(beta * (kl - ratio_B))),
    )
    return UnpairedLoss(loss_B, beta * ratio_B.detach())


def mismatched_kl(logprobs_B: Tensor, ref_logprobs_B: Tensor) -> float:
    """max(0, mean(log pi - log ref)) of answers paired with the prompts of other answers.

    The estimate of KL(policy || reference) per answer that KTO measures answers against (arXiv 2402.01306).
    """
    _check(logprobs_B, ref_logprobs_B)
    return max(0.0, float((logprobs_B - ref_logprobs_B).detach().double().mean()))


def preference_accuracy(loss: PairwiseLoss) -> float:
    """Share of pairs whose chosen answer has the higher reward; equal rewards count as wrong."""
    assert len(loss.loss_B) > 0, "there are no pairs"
    return float((loss.chosen_rewards_B > loss.rejected_rewards_B).double().mean())


def _check(*tensors_B: Tensor) -> None:
    assert all(t.shape == tensors_B[0].shape and t.ndim == 1 for t in tensors_B), (
        "expected one entry per answer in each"
    )
