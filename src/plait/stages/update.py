"""update_policy: optimiser updates over the samples of one step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from plait.algorithms.kl import ESTIMATORS
from plait.algorithms.losses import ppo_clip
from plait.algorithms.reduce import sequence_weights
from plait.batch import Group, Sample
from plait.config import AlgorithmConfig
from plait.models.optimizer import learning_rate
from plait.plan import BatchCounts
from plait.roles.policy import Policy
from plait.stages.packing import Microbatch, TokenSequence, pack


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """What the updates of one step read, keyed by sample id.

    old_logprobs None: the one update of the step trains the policy that sampled, so the ratio is one.
    ref_logprobs None: there is no KL to a reference.
    """

    groups: list[Group]
    advantages: dict[str, float]
    old_logprobs: dict[str, Tensor] | None
    ref_logprobs: dict[str, Tensor] | None


@dataclass(frozen=True, slots=True)
class UpdateSettings:
    """What the updates of a run have in common. num_updates: planned in the whole run, for the schedule."""

    algorithm: AlgorithmConfig
    counts: BatchCounts
    num_epochs: int
    temperature: float
    max_completion_tokens: int
    num_updates: int
    seed: int


@dataclass(slots=True)
class UpdateTally:
    """Sums over the tokens and updates of one step, for its metrics.

    gaps: |trainer logprob - rollout logprob| of tokens, scored by the very weights that sampled them.
    """

    num_applied: int = 0
    num_nonfinite: int = 0
    num_without_signal: int = 0
    num_trained_samples: int = 0
    num_skipped_samples: int = 0
    num_trained_tokens: int = 0
    num_forward_tokens: int = 0
    policy_loss: float = 0.0
    total_loss: float = 0.0
    kl_loss: float = 0.0
    entropy_sum: float = 0.0
    kl_sum: float = 0.0
    binds_sum: int = 0
    outside_sum: int = 0
    ratio_sum: float = 0.0
    rate: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    gaps: list[Tensor] = field(default_factory=list)
    nonfinite_in: str = ""


def update_policy(policy: Policy, inputs: UpdateInputs, settings: UpdateSettings, *, step: int) -> UpdateTally:
    """Every epoch and minibatch of one step. A minibatch in which nothing needs a pass makes no update."""
    tally = UpdateTally()
    if inputs.old_logprobs is not None:
        tally.gaps += _gaps(inputs.groups, inputs.old_logprobs)
    first = (step - 1) * settings.counts.num_updates_per_step
    for number, groups in enumerate(minibatches(inputs.groups, settings, step)):
        tally.rate = learning_rate(policy.optimizer_config, first + number, settings.num_updates)
        _update(policy, groups, inputs, settings, tally)
    return tally


def _gaps(groups: Sequence[Group], old_logprobs: dict[str, Tensor]) -> list[Tensor]:
    """Engine and trainer compared on every sample that the trainer scored before it updated."""
    samples = [sample for group in groups for sample in group.samples if sample.id in old_logprobs]
    return [(old_logprobs[sample.id].cpu() - _rollout_logprobs([sample])).abs() for sample in samples]


def minibatches(groups: list[Group], settings: UpdateSettings, step: int) -> Iterator[list[Group]]:
    """Whole groups, num_sequences_per_minibatch samples each; epochs after the first come in another order."""
    size = settings.counts.num_sequences_per_minibatch // settings.counts.num_samples_per_prompt
    for epoch in range(settings.num_epochs):
        order = np.arange(len(groups))
        if epoch:
            np.random.default_rng([settings.seed, step, epoch]).shuffle(order)
        for start in range(0, len(groups), size):
            yield [groups[i] for i in order[start : start + size]]


def _update(
    policy: Policy, groups: list[Group], inputs: UpdateInputs, settings: UpdateSettings, tally: UpdateTally
) -> None:
    """One optimiser update over whole groups."""
    algorithm = settings.algorithm
    counted = [sample for group in groups for sample in group.samples if sample.is_counted]
    weights_B = sequence_weights(
        torch.tensor([int(sample.response_mask_R.sum()) for sample in counted], dtype=torch.int64),
        algorithm.reduction,
        max_tokens=settings.max_completion_tokens,
    ).tolist()
    # Zero advantage: no policy gradient. The sample keeps its place in the weights above.
    every_sample_needs_a_pass = algorithm.kl_coefficient > 0 or algorithm.entropy_coefficient > 0
    chosen = [
        (sample, weight)
        for sample, weight in zip(counted, weights_B, strict=True)
        if every_sample_needs_a_pass or inputs.advantages[sample.id] != 0
    ]
    tally.num_trained_samples += len(chosen)
    tally.num_skipped_samples += len(counted) - len(chosen)
    if not chosen:
        tally.num_without_signal += 1
        return
    samples = [sample for sample, _ in chosen]
    sequences = [TokenSequence.from_sample(sample) for sample in samples]
    weights = torch.tensor([weight for _, weight in chosen], dtype=torch.float32, device=policy.device)
    for microbatch in pack(sequences, settings.counts.num_tokens_per_microbatch, policy.device):
        policy.backward(_loss(policy, microbatch, samples, weights, inputs, settings, tally))
    result = policy.apply(tally.rate)
    tally.grad_norms.append(result.grad_norm)
    if result.nonfinite is None:
        tally.num_applied += 1
    else:
        tally.num_nonfinite += 1
        tally.nonfinite_in = result.nonfinite


def _loss(
    policy: Policy,
    microbatch: Microbatch,
    samples: Sequence[Sample],
    weights_B: Tensor,
    inputs: UpdateInputs,
    settings: UpdateSettings,
    tally: UpdateTally,
) -> Tensor:
    """This microbatch's part of the update's loss: a sum of weighted token losses, never a local mean."""
    algorithm, device = settings.algorithm, policy.device
    has_entropy_bonus = algorithm.entropy_coefficient > 0
    scores = policy.token_scores(microbatch, settings.temperature, entropy_needs_grad=has_entropy_bonus)
    members = [samples[i] for i in microbatch.sequences]
    advantages_B = torch.tensor([inputs.advantages[s.id] for s in samples], dtype=torch.float32, device=device)
    old_R = scores.logprobs_R.detach() if inputs.old_logprobs is None else _join(inputs.old_logprobs, members)
    weight_R = weights_B[microbatch.sequence_R]
    policy_loss = ppo_clip(
        scores.logprobs_R,
        old_R,
        advantages_B[microbatch.sequence_R],
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )
    loss = (weight_R * policy_loss.loss_R).sum()
    tally.policy_loss += float(loss.detach())
    if inputs.ref_logprobs is not None:
        kl_R = ESTIMATORS[algorithm.kl_estimator](scores.logprobs_R, _join(inputs.ref_logprobs, members))
        kl_loss = (weight_R * kl_R).sum()
        tally.kl_loss += float(kl_loss.detach())
        tally.kl_sum += float(kl_R.detach().sum())
        loss = loss + algorithm.kl_coefficient * kl_loss
    if has_entropy_bonus:
        loss = loss - algorithm.entropy_coefficient * (weight_R * scores.entropy_R).sum()
    tally.total_loss += float(loss.detach())
    with torch.no_grad():
        # Once an update was applied the weights are no longer those that sampled, and a difference is no fault.
        if inputs.old_logprobs is None and tally.num_applied == 0:
            tally.gaps.append((scores.logprobs_R.cpu() - _rollout_logprobs(members)).abs())
        tally.num_trained_tokens += len(scores.logprobs_R)
        tally.num_forward_tokens += microbatch.num_tokens
        tally.entropy_sum += float(scores.entropy_R.sum())
        tally.ratio_sum += float((scores.logprobs_R - old_R).exp().sum())
        tally.binds_sum += int(policy_loss.binds_R.sum())
        tally.outside_sum += int(policy_loss.outside_R.sum())
    return loss


def _rollout_logprobs(members: Sequence[Sample]) -> Tensor:
    return torch.cat([torch.from_numpy(s.rollout_logprobs_R[s.response_mask_R]) for s in members])


def _join(per_sample: dict[str, Tensor], members: Sequence[Sample]) -> Tensor:
    return torch.cat([per_sample[sample.id] for sample in members])
