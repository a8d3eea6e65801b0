"""update_policy: optimiser updates over the samples of one step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from plait.algorithms.reduce import sequence_weights
from plait.batch import Group, Sample
from plait.config import AlgorithmConfig, OptimizerConfig
from plait.models.optimizer import UpdateResult, learning_rate
from plait.plan import BatchCounts
from plait.roles.model import TokenScores
from plait.stages.advantage import is_trained
from plait.stages.packing import Microbatch, TokenSequence
from plait.stages.pair_loss import pair_loss
from plait.stages.policy_loss import LossInputs, LossTally, policy_loss, rollout_logprobs


class TrainedPolicy(Protocol):
    """What updates ask of a policy, whole or split over ranks (see `plait.roles.policy.Policy`)."""

    optimizer_config: OptimizerConfig

    @property
    def device(self) -> torch.device: ...

    def split(self, sequences: Sequence[TokenSequence], max_tokens: int, *, together: int = 1) -> list[Microbatch]: ...

    def train_pass(
        self,
        microbatches: Sequence[Microbatch],
        loss_of: Callable[[Microbatch, TokenScores], Tensor],
        *,
        temperature: float,
        entropy_needs_grad: bool = False,
    ) -> None: ...

    def apply(self, rate: float) -> UpdateResult: ...


@dataclass(frozen=True, slots=True)
class UpdateInputs:
    """What the updates of one step read, keyed by sample id.

    old_logprobs None: the one update of the step trains the policy that sampled, so the ratio is one.
    ref_logprobs None: there is no KL to a reference in the loss. returns, values: of the critic, where there is one.
    kl_coefficient: the one that holds in this step; None for the settings' own.
    """

    groups: list[Group]
    advantages: dict[str, Tensor]
    old_logprobs: dict[str, Tensor] | None
    ref_logprobs: dict[str, Tensor] | None
    returns: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)
    kl_coefficient: float | None = None


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
class UpdateTally(LossTally):
    """Sums over the tokens and updates of one step, for its metrics."""

    num_without_signal: int = 0
    num_trained_samples: int = 0
    num_skipped_samples: int = 0
    rate: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    num_nonfinite: int = 0
    nonfinite_in: str = ""


def update_policy(policy: TrainedPolicy, inputs: UpdateInputs, settings: UpdateSettings, *, step: int) -> UpdateTally:
    """Every epoch and minibatch of one step. A minibatch in which nothing needs a pass makes no update."""
    tally = UpdateTally()
    if inputs.old_logprobs is not None:
        tally.gaps += _gaps(inputs.groups, inputs.old_logprobs)
    per_step = settings.counts.num_updates_per_step
    # The policy's schedule begins with its first update, after the critic was pre-trained.
    skipped = settings.algorithm.critic.pretraining_steps * per_step
    first, num_updates = (step - 1) * per_step - skipped, settings.num_updates - skipped
    for number, groups in enumerate(minibatches(inputs.groups, settings, step)):
        tally.rate = learning_rate(policy.optimizer_config, first + number, num_updates)
        _update(policy, groups, inputs, settings, tally)
    return tally


def _gaps(groups: Sequence[Group], old_logprobs: dict[str, Tensor]) -> list[Tensor]:
    """Engine and trainer compared on every sample that the trainer scored before it updated."""
    samples = [sample for group in groups for sample in group.samples if sample.id in old_logprobs]
    return [(old_logprobs[sample.id].cpu() - rollout_logprobs([sample])).abs() for sample in samples]


def minibatches(groups: list[Group], settings: UpdateSettings, step: int) -> Iterator[list[Group]]:
    """Whole groups, num_sequences_per_minibatch samples each; epochs after the first come in another order."""
    size = settings.counts.num_sequences_per_minibatch // settings.counts.num_samples_per_prompt
    for epoch in range(settings.num_epochs):
        order = np.arange(len(groups))
        if epoch:
            np.random.default_rng([settings.seed, step, epoch]).shuffle(order)
        for start in range(0, len(groups), size):
            yield [groups[i] for i in order[start : start + size]]


def loss_weights(samples: Sequence[Sample], settings: UpdateSettings) -> list[float]:
    """Weight of each loss token of each sample in its update's loss; of each pair's loss where the loss is of pairs."""
    if settings.algorithm.has_pairs:
        return [2 / len(samples)] * len(samples)
    return sequence_weights(
        torch.tensor([sample.num_loss_tokens for sample in samples], dtype=torch.int64),
        settings.algorithm.reduction,
        max_tokens=settings.max_completion_tokens,
    ).tolist()


def _update(
    policy: TrainedPolicy, groups: list[Group], inputs: UpdateInputs, settings: UpdateSettings, tally: UpdateTally
) -> None:
    """One optimiser update over whole groups."""
    algorithm = settings.algorithm
    counted = [s for group in groups for s in group.samples if is_trained(s, algorithm)]
    chosen = samples_with_pass(counted, inputs, settings)
    tally.num_trained_samples += len(chosen)
    tally.num_skipped_samples += len(counted) - len(chosen)
    if not chosen:
        tally.num_without_signal += 1
        return
    samples = [sample for sample, _ in chosen]
    num_example_tokens = sum(s.num_loss_tokens for s in samples if _is_example(s, algorithm))
    loss_inputs = LossInputs(
        samples=samples,
        weights_B=torch.tensor([weight for _, weight in chosen], dtype=torch.float32, device=policy.device),
        example_weights_B=torch.tensor(
            [1 / num_example_tokens if _is_example(s, algorithm) else 0.0 for s in samples], device=policy.device
        ),
        advantages=inputs.advantages,
        old_logprobs=inputs.old_logprobs,
        ref_logprobs=inputs.ref_logprobs,
        returns=inputs.returns,
        values=inputs.values,
        kl_coefficient=algorithm.kl_coefficient if inputs.kl_coefficient is None else inputs.kl_coefficient,
    )
    sequences = [TokenSequence.from_sample(sample) for sample in samples]
    loss_of, together = (pair_loss, 2) if algorithm.has_pairs else (policy_loss, 1)
    policy.train_pass(
        policy.split(sequences, settings.counts.num_tokens_per_microbatch, together=together),
        lambda microbatch, scores: loss_of(scores, microbatch, loss_inputs, algorithm, tally),
        temperature=settings.temperature,
        entropy_needs_grad=algorithm.entropy_coefficient > 0,
    )
    result = policy.apply(tally.rate)
    tally.grad_norms.append(result.grad_norm)
    if result.nonfinite is None:
        tally.num_applied += 1
    else:
        tally.num_nonfinite += 1
        tally.nonfinite_in = result.nonfinite


def samples_with_pass(
    counted: Sequence[Sample], inputs: UpdateInputs, settings: UpdateSettings
) -> list[tuple[Sample, float]]:
    """The samples of one update that change something, with the weight of their tokens.

    Zero advantage: no policy gradient, so no pass is needed. The sample keeps its place in the weights of the others.
    """
    algorithm = settings.algorithm
    all_need_one = (
        algorithm.has_pairs
        or inputs.ref_logprobs is not None
        or algorithm.entropy_coefficient > 0
        or algorithm.critic.kind == "shared_trunk"
    )
    return [
        (sample, weight)
        for sample, weight in zip(counted, loss_weights(counted, settings), strict=True)
        if all_need_one or bool(inputs.advantages[sample.id].any()) or _is_example(sample, algorithm)
    ]


def _is_example(sample: Sample, algorithm: AlgorithmConfig) -> bool:
    """Whether the likelihood of a sample is raised for being correct."""
    return algorithm.positive_nll_coefficient > 0 and sample.score == 1
