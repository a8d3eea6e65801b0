"""The processes that hold the models, as an executor sees them; here, those of one process: itself."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from plait.batch import Group, Sample
from plait.config import RunConfig, SamplingConfig
from plait.executor.shards import State, has_shards, read_whole
from plait.models.load import Tokenizer, export
from plait.plan import Plan
from plait.roles.critic import Critic
from plait.roles.policy import Policy
from plait.roles.reference import Reference
from plait.roles.reward import RewardModel
from plait.rollout.engine import Completion, Engine
from plait.rollout.scheduler import Request
from plait.stages.advantage import Values
from plait.stages.critic_update import CriticTally, update_critic
from plait.stages.logprob import group_logprobs
from plait.stages.update import UpdateInputs, UpdateSettings, UpdateTally, update_policy
from plait.stages.value import group_values, trunk_values
from plait.weight_sync.in_process import publish


class Workers(Protocol):
    """What an executor asks of the processes that hold the models. Each call returns when the work is done."""

    @property
    def version(self) -> int:
        """Of the policy from which the engine samples."""
        ...

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> Iterator[Completion]:
        """Sample every request; completions come as they finish."""
        ...

    def old_logprobs(self, groups: list[Group]) -> dict[str, Tensor]:
        """Of the policy that is trained, for the loss tokens of each counted sample."""
        ...

    def ref_logprobs(self, groups: list[Group]) -> dict[str, Tensor]:
        """Of the reference."""
        ...

    def values(self, groups: list[Group]) -> tuple[Values, dict[str, Tensor] | None]:
        """Of the critic; from a shared trunk also the policy's log-probabilities, since they come with them."""
        ...

    def reward_scores(self, samples: Sequence[Sample]) -> dict[str, list[float]]:
        """By name of the reward model: one score per sample."""
        ...

    def update_policy(self, inputs: UpdateInputs, *, step: int) -> UpdateTally:
        """All updates of a step."""
        ...

    def update_critic(self, inputs: UpdateInputs, *, step: int) -> CriticTally:
        """All updates of a critic of its own."""
        ...

    def sync_weights(self, version: int) -> None:
        """Make `version` of the policy the one that the engine samples from."""
        ...

    def state(self) -> State:
        """Masters and moments of every trained role."""
        ...

    def save_shards(self, folder: Path) -> None:
        """Write what `state` leaves out, each rank its part, into a folder that exists."""
        ...

    def restore(self, state: State, folder: Path, version: int) -> None:
        """Take over what workers of any layout have saved, as this version of the policy."""
        ...

    def export(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Write the policy as a plain transformers folder."""
        ...


@dataclass(frozen=True, slots=True)
class Roles:
    """The models of a run in one process. A critic on the policy's trunk is part of the policy."""

    policy: Policy
    engine: Engine
    reference: Reference | None = None
    critic: Critic | None = None
    reward_models: tuple[RewardModel, ...] = ()


class LocalWorkers:
    """Every model in this process: implements `Workers`."""

    def __init__(self, roles: Roles, config: RunConfig, plan: Plan):
        self.roles = roles
        self._settings = update_settings(config, plan)
        self._temperature = config.rollout.sampling.temperature
        self._max_tokens = config.batch.num_tokens_per_microbatch
        self._pretraining_steps = config.algorithm.critic.pretraining_steps

    @property
    def version(self) -> int:
        return self.roles.engine.version

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> Iterator[Completion]:
        return self.roles.engine.generate(requests, sampling)

    def old_logprobs(self, groups: list[Group]) -> dict[str, Tensor]:
        return group_logprobs(self.roles.policy, groups, temperature=self._temperature, max_tokens=self._max_tokens)

    def ref_logprobs(self, groups: list[Group]) -> dict[str, Tensor]:
        assert self.roles.reference is not None, "the graph scores a reference, and none was loaded"
        return group_logprobs(self.roles.reference, groups, temperature=self._temperature, max_tokens=self._max_tokens)

    def values(self, groups: list[Group]) -> tuple[Values, dict[str, Tensor] | None]:
        if self.roles.critic is not None:
            return group_values(self.roles.critic, groups, max_tokens=self._max_tokens), None
        return trunk_values(self.roles.policy, groups, temperature=self._temperature, max_tokens=self._max_tokens)

    def reward_scores(self, samples: Sequence[Sample]) -> dict[str, list[float]]:
        return {one.name: one.scores(samples, max_tokens=self._max_tokens) for one in self.roles.reward_models}

    def update_policy(self, inputs: UpdateInputs, *, step: int) -> UpdateTally:
        """None is made while only the critic is trained."""
        if step <= self._pretraining_steps:
            return UpdateTally()
        return update_policy(self.roles.policy, inputs, self._settings, step=step)

    def update_critic(self, inputs: UpdateInputs, *, step: int) -> CriticTally:
        assert self.roles.critic is not None, "the graph updates a critic, and none was loaded"
        return update_critic(self.roles.critic, inputs, self._settings, step=step)

    def sync_weights(self, version: int) -> None:
        publish(self.roles.policy.model, self.roles.engine, version)

    def state(self) -> State:
        critic = {} if self.roles.critic is None else self.roles.critic.state()
        return self.roles.policy.state() | critic

    def save_shards(self, folder: Path) -> None:
        """Nothing: `state` has all."""

    def restore(self, state: State, folder: Path, version: int) -> None:
        if has_shards(folder):
            state = read_whole(self.state(), folder)
        self.roles.policy.load_state(state)
        if self.roles.critic is not None:
            self.roles.critic.load_state(state)
        # The engine derived its fused weights from what was loaded before.
        self.roles.engine.set_version(version, recompute_kv=False)

    def export(self, tokenizer: Tokenizer, folder: Path) -> None:
        export(self.roles.policy.model, tokenizer, folder)


def update_settings(config: RunConfig, plan: Plan) -> UpdateSettings:
    """What the updates of a run have in common."""
    return UpdateSettings(
        algorithm=config.algorithm,
        counts=plan.batch,
        num_epochs=config.batch.num_epochs_per_step,
        temperature=config.rollout.sampling.temperature,
        max_completion_tokens=config.rollout.max_completion_tokens,
        num_updates=plan.batch.num_updates_per_step * config.train.num_steps,
        seed=config.seed,
    )
