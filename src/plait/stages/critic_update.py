"""update_critic: optimiser updates of a critic of its own, over the minibatches of the policy."""

from dataclasses import dataclass, field

import torch

from plait.models.optimizer import learning_rate
from plait.roles.critic import Critic
from plait.stages.advantage import is_trained
from plait.stages.packing import TokenSequence, pack
from plait.stages.policy_loss import value_loss
from plait.stages.update import UpdateInputs, UpdateSettings, loss_weights, minibatches


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


def update_critic(critic: Critic, inputs: UpdateInputs, settings: UpdateSettings, *, step: int) -> CriticTally:
    """Every epoch and minibatch of one step: values move towards the returns, also where advantages are 0."""
    tally = CriticTally()
    first = (step - 1) * settings.counts.num_updates_per_step
    for number, groups in enumerate(minibatches(inputs.groups, settings, step)):
        samples = [s for group in groups for s in group.samples if is_trained(s, settings.algorithm)]
        if not samples:
            continue
        tally.rate = learning_rate(critic.optimizer_config, first + number, settings.num_updates)
        weights_B = torch.tensor(loss_weights(samples, settings), dtype=torch.float32, device=critic.device)
        sequences = [TokenSequence.from_sample(sample) for sample in samples]
        for microbatch in pack(sequences, settings.counts.num_tokens_per_microbatch, critic.device):
            keys = [samples[i].id for i in microbatch.sequences]
            made = value_loss(
                critic.token_values(microbatch),
                torch.cat([inputs.values[key] for key in keys]).to(critic.device),
                torch.cat([inputs.returns[key] for key in keys]).to(critic.device),
                settings.algorithm.critic,
            )
            loss = (weights_B[microbatch.sequence_R] * made.loss_R).sum()
            critic.backward(settings.algorithm.critic.coefficient * loss)
            tally.value_loss += float(loss.detach())
            tally.num_tokens += len(made.loss_R)
            tally.binds_sum += int(made.binds_R.sum())
        result = critic.apply(tally.rate)
        tally.grad_norms.append(result.grad_norm)
        if result.nonfinite is None:
            tally.num_applied += 1
        else:
            tally.num_nonfinite += 1
            tally.nonfinite_in = result.nonfinite
    return tally
