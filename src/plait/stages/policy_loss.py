"""The loss of one microbatch of a policy update: sums of weighted token losses, never a local mean."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.algorithm_config import AlgorithmConfig, CriticConfig
from plait.algorithms.importance import importance_weights
from plait.algorithms.kl import ESTIMATORS
from plait.algorithms.losses import POLICY_LOSSES, ClipSettings, TokenBatch
from plait.algorithms.pairwise import PairwiseLoss
from plait.algorithms.value_losses import ValueLoss, clipped, squared
from plait.batch import Sample
from plait.roles.model import TokenScores
from plait.stages.packing import Microbatch


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What the microbatches of one update read. samples: those with a pass, in the order of the vectors [B].

    weights_B: weight of each token of a sample in the loss. example_weights_B: in the likelihood of correct samples.
    The mappings are keyed by sample id; see `plait.stages.update.UpdateInputs`.
    """

    samples: Sequence[Sample]
    weights_B: Tensor
    example_weights_B: Tensor
    advantages: Mapping[str, Tensor]
    old_logprobs: Mapping[str, Tensor] | None
    ref_logprobs: Mapping[str, Tensor] | None
    returns: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    kl_coefficient: float


@dataclass(slots=True)
class PairTally:
    """Sums over the pairs of the updates of one step. log-probabilities: of whole answers."""

    num_pairs: int = 0
    num_right: int = 0
    chosen_reward_sum: float = 0.0
    rejected_reward_sum: float = 0.0
    chosen_logprob_sum: float = 0.0
    rejected_logprob_sum: float = 0.0

    def add(self, chosen_B: Tensor, rejected_B: Tensor, made: PairwiseLoss) -> None:
        """Count the pairs of one microbatch. Equal rewards count as wrong."""
        self.num_pairs += len(chosen_B)
        self.num_right += int((made.chosen_rewards_B > made.rejected_rewards_B).sum())
        self.chosen_reward_sum += float(made.chosen_rewards_B.sum())
        self.rejected_reward_sum += float(made.rejected_rewards_B.sum())
        self.chosen_logprob_sum += float(chosen_B.sum())
        self.rejected_logprob_sum += float(rejected_B.sum())


@dataclass(slots=True)
class LossTally:
    """Sums over the tokens of the updates of one step.

    gaps: |trainer logprob - rollout logprob| of tokens, scored by the very weights that sampled them.
    num_applied: updates applied so far.
    """

    num_applied: int = 0
    num_trained_tokens: int = 0
    num_forward_tokens: int = 0
    policy_loss: float = 0.0
    total_loss: float = 0.0
    kl_loss: float = 0.0
    example_loss: float = 0.0
    value_loss: float = 0.0
    entropy_sum: float = 0.0
    kl_sum: float = 0.0
    binds_sum: int = 0
    outside_sum: int = 0
    ratio_sum: float = 0.0
    value_binds_sum: int = 0
    correction_sum: float = 0.0
    correction_max: float = 0.0
    correction_kept_sum: int = 0
    gaps: list[Tensor] = field(default_factory=list)
    pairs: PairTally = field(default_factory=PairTally)


def policy_loss(
    scores: TokenScores, microbatch: Microbatch, inputs: LossInputs, algorithm: AlgorithmConfig, tally: LossTally
) -> Tensor:
    """This microbatch's part of the update's loss, from the policy's scores of its loss tokens."""
    device = scores.logprobs_R.device
    if not microbatch.sequences:  # filling, where other ranks have one microbatch more
        return scores.logprobs_R.sum()
    members = [inputs.samples[i] for i in microbatch.sequences]
    tokens = TokenBatch(
        logprobs_R=scores.logprobs_R,
        old_logprobs_R=scores.logprobs_R.detach()
        if inputs.old_logprobs is None
        else _join(inputs.old_logprobs, members, device),
        rollout_logprobs_R=rollout_logprobs(members).to(device),
        advantages_R=_join(inputs.advantages, members, device),
        sequence_R=microbatch.sequence_R,
    )
    clip = ClipSettings(algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip, algorithm.behaviour_cap)
    per_token = POLICY_LOSSES[algorithm.policy_loss](tokens, clip)
    weight_R = inputs.weights_B[microbatch.sequence_R]
    loss_R = per_token.loss_R
    if algorithm.correction.kind != "none":
        loss_R = _correction(tokens, algorithm, tally) * loss_R
    loss = (weight_R * loss_R).sum()
    tally.policy_loss += float(loss.detach())
    if inputs.ref_logprobs is not None:
        ref_R = _join(inputs.ref_logprobs, members, device)
        kl_R = ESTIMATORS[algorithm.kl_estimator](scores.logprobs_R, ref_R)
        kl_loss = (weight_R * kl_R).sum()
        tally.kl_loss += float(kl_loss.detach())
        tally.kl_sum += float(kl_R.detach().sum())
        loss = loss + inputs.kl_coefficient * kl_loss
    if algorithm.entropy_coefficient > 0:
        loss = loss - algorithm.entropy_coefficient * (weight_R * scores.entropy_R).sum()
    if algorithm.positive_nll_coefficient > 0:
        example_loss = -(inputs.example_weights_B[microbatch.sequence_R] * scores.logprobs_R).sum()
        tally.example_loss += float(example_loss.detach())
        loss = loss + algorithm.positive_nll_coefficient * example_loss
    if scores.values_R is not None:
        value_loss = _value_loss(scores.values_R, members, inputs, algorithm.critic, tally, weight_R)
        loss = loss + algorithm.critic.coefficient * value_loss
    tally.total_loss += float(loss.detach())
    with torch.no_grad():
        # Once an update was applied the weights are no longer those that sampled, and a difference is no fault.
        if inputs.old_logprobs is None and tally.num_applied == 0:
            tally.gaps.append((scores.logprobs_R.cpu() - rollout_logprobs(members)).abs())
        tally.num_trained_tokens += len(scores.logprobs_R)
        tally.num_forward_tokens += microbatch.num_tokens
        tally.entropy_sum += float(scores.entropy_R.sum())
        tally.ratio_sum += float((scores.logprobs_R - tokens.old_logprobs_R).exp().sum())
        tally.binds_sum += int(per_token.binds_R.sum())
        tally.outside_sum += int(per_token.outside_R.sum())
    return loss


def _correction(tokens: TokenBatch, algorithm: AlgorithmConfig, tally: LossTally) -> Tensor:
    """Weight of each token for having been sampled by the engine and not by the trainer."""
    settings = algorithm.correction
    assert settings.kind != "none", "there is nothing to correct"
    weights = importance_weights(
        tokens.old_logprobs_R,
        tokens.rollout_logprobs_R,
        tokens.sequence_R,
        level=settings.level,
        correction=settings.kind,
        low=settings.low,
        high=settings.high,
    )
    tally.correction_sum += float(weights.weights_R.sum())
    tally.correction_max = max(tally.correction_max, float(weights.ratio_R.max()))
    tally.correction_kept_sum += int(weights.kept_R.sum())
    return weights.weights_R


def _value_loss(
    values_R: Tensor,
    members: Sequence[Sample],
    inputs: LossInputs,
    critic: CriticConfig,
    tally: LossTally,
    weight_R: Tensor,
) -> Tensor:
    made = value_loss(
        values_R,
        _join(inputs.values, members, values_R.device),
        _join(inputs.returns, members, values_R.device),
        critic,
    )
    tally.value_binds_sum += int(made.binds_R.sum())
    loss = (weight_R * made.loss_R).sum()
    tally.value_loss += float(loss.detach())
    return loss


def value_loss(values_R: Tensor, old_values_R: Tensor, returns_R: Tensor, critic: CriticConfig) -> ValueLoss:
    """The critic's loss per token, as its settings have it."""
    if critic.value_loss == "plain":
        return squared(values_R, returns_R)
    return clipped(values_R, old_values_R, returns_R, clip=critic.value_clip)


def rollout_logprobs(members: Sequence[Sample]) -> Tensor:
    """The engine's log-probabilities of the loss tokens of these samples, one after the other, on the CPU."""
    return torch.cat([torch.from_numpy(s.rollout_logprobs_R[s.response_mask_R]) for s in members])


def _join(per_sample: Mapping[str, Tensor], members: Sequence[Sample], device: torch.device) -> Tensor:
    return torch.cat([per_sample[sample.id] for sample in members]).to(device)
