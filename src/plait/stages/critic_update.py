"""update_critic: optimiser updates of a critic of its own, over the minibatches of the policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from plait.batch import Sample
from plait.config import OptimizerConfig
from plait.models.optimizer import UpdateResult, learning_rate
from plait.stages.advantage import is_trained
from plait.stages.packing import Microbatch, TokenSequence
from plait.stages.policy_loss import value_loss
from plait.stages.update import UpdateInputs, UpdateSettings, loss_weights, minibatches


class TrainedCritic(Protocol):
    """What updates ask of a critic, whole or split over ranks (see `plait.roles.critic.Critic`)."""

    optimizer_config: OptimizerConfig

    def split(self, sequences: Sequence[TokenSequence], max_tokens: int) -> list[Microbatch]: ...

    def train_pass(
        self, microbatches: Sequence[Microbatch], loss_of: Callable[[Microbatch, Tensor], Tensor]
    ) -> None: ...

    def apply(self, rate: float) -> UpdateResult: ...


@dataclass(slots=True)
class CriticTally:
    """Sums over the tokens and updates of one step, for its metrics."""

    num_applied: int = 0
    num_nonfinite: int = 0
    num_tokens: int = 0
    value_loss: float = 0.0
    binds_sum: int = 0
    rate: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    nonfinite_in: str = ""


def update_critic(critic: TrainedCritic, inputs: UpdateInputs, settings: UpdateSettings, *, step: int) -> CriticTally:
    """Every epoch and minibatch of one step: values move towards the returns, also where advantages are 0."""
    tally = CriticTally()
    first = (step - 1) * settings.counts.num_updates_per_step
    for number, groups in enumerate(minibatches(inputs.groups, settings, step)):
        samples = [s for group in groups for s in group.samples if is_trained(s, settings.algorithm)]
        if not samples:
            continue
        tally.rate = learning_rate(critic.optimizer_config, first + number, settings.num_updates)
        sequences = [TokenSequence.from_sample(sample) for sample in samples]
        critic.train_pass(
            critic.split(sequences, settings.counts.num_tokens_per_microbatch),
            partial(_loss, samples=samples, inputs=inputs, settings=settings, tally=tally),
        )
        result = critic.apply(tally.rate)
        tally.grad_norms.append(result.grad_norm)
        if result.nonfinite is None:
            tally.num_applied += 1
        else:
            tally.num_nonfinite += 1
            tally.nonfinite_in = result.nonfinite
    return tally


def _loss(
    microbatch: Microbatch,
    values_R: Tensor,
    *,
    samples: Sequence[Sample],
    inputs: UpdateInputs,
    settings: UpdateSettings,
    tally: CriticTally,
) -> Tensor:
    """This microbatch's part of the loss."""
    if not microbatch.sequences:  # filling, where other ranks have one microbatch more
        return values_R.sum()
    keys, device = [samples[i].id for i in microbatch.sequences], values_R.device
    made = value_loss(
        values_R,
        torch.cat([inputs.values[key] for key in keys]).to(device),
        torch.cat([inputs.returns[key] for key in keys]).to(device),
        settings.algorithm.critic,
    )
    weights_B = torch.tensor(loss_weights(samples, settings), dtype=torch.float32, device=device)
    loss = (weights_B[microbatch.sequence_R] * made.loss_R).sum()
    tally.value_loss += float(loss.detach())
    tally.num_tokens += len(made.loss_R)
    tally.binds_sum += int(made.binds_R.sum())
    return settings.algorithm.critic.coefficient * loss
