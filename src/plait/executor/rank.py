"""One process of a worker group: this rank's part of every model, and an engine over whole weights.

The driver calls the same method on every rank at the same time. Nothing here knows what carries the calls.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from plait.batch import Group
from plait.config import OptimizerConfig, RunConfig, SamplingConfig
from plait.errors import WeightSyncError
from plait.executor.shards import CRITIC
from plait.executor.tallies import without_sums
from plait.executor.workers import update_settings
from plait.jobs.setup import LoadedModel, dtype_of, load, make_engine
from plait.models import attention
from plait.models.fingerprint import fingerprint
from plait.models.load import export
from plait.models.value_head import ValueHead
from plait.parallel.mesh import open_process_group
from plait.plan import Plan
from plait.roles.sharded import ShardedCritic, ShardedPolicy
from plait.rollout.engine import Completion
from plait.rollout.scheduler import Request
from plait.stages.advantage import Values
from plait.stages.critic_update import CriticTally, update_critic
from plait.stages.logprob import group_logprobs
from plait.stages.update import UpdateInputs, UpdateTally, update_policy
from plait.stages.value import group_values

Role = TypeVar("Role", bound=ShardedPolicy)


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank is started with. config_json: the resolved RunConfig. wait_limit_s: of every collective."""

    config_json: str
    rank: int
    num_ranks: int
    wait_limit_s: float


class Rank:
    """See `plait.executor.workers.Workers` for what its methods do."""

    def __init__(self, settings: RankSettings):
        self._settings = settings
        self._config = RunConfig.model_validate_json(settings.config_json)
        self._plan = Plan.from_config(self._config)
        self._temperature = self._config.rollout.sampling.temperature
        self._max_tokens = self._config.batch.num_tokens_per_microbatch

    def process(self) -> int:
        """Its process, for messages and for tests that end it."""
        return os.getpid()

    def address(self) -> str:
        """Where this rank's store will listen: its node's address and a port that is free now."""
        host = socket.gethostbyname(socket.gethostname())
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def load(self, address: str) -> None:
        """Join the others, load and split the models."""
        settings, config = self._settings, self._config
        attention.register()
        open_process_group(settings.rank, settings.num_ranks, config.model.device, settings.wait_limit_s, address)
        loaded = load(config.model, config.rollout.stop_tokens)
        self._sampler: LoadedModel = load(config.model, config.rollout.stop_tokens)
        self._engine = make_engine(self._sampler, self._plan)
        self._policy = self._sharded(ShardedPolicy, loaded, "update_policy", "policy", config.optimizer)
        self._reference = self._load_reference()
        self._critic = self._load_critic()
        names = [one.label for one in config.reward_models]
        assert not names, f"reward models {names} on ranks; the rules refuse them"
        self._update = update_settings(config, self._plan)

    def _load_reference(self) -> ShardedPolicy | None:
        if not self._config.algorithm.needs_reference:
            return None
        loaded = load(self._config.model, self._config.rollout.stop_tokens)
        return self._sharded(ShardedPolicy, loaded, "ref_logprob", "reference", self._config.optimizer)

    def _load_critic(self) -> ShardedCritic | None:
        settings = self._config.algorithm.critic
        if settings.kind != "independent":
            return None
        model = self._config.model.model_copy(update={"path": settings.path or self._config.model.path})
        loaded = load(model, self._config.rollout.stop_tokens)
        rate = settings.learning_rate or self._config.optimizer.learning_rate
        optimizer = self._config.optimizer.model_copy(update={"learning_rate": rate})
        head = ValueHead(loaded.model.config.hidden_size, self._config.model.device)
        return self._sharded(ShardedCritic, loaded, "update_critic", "critic", optimizer, head)

    def _sharded(
        self,
        kind: type[Role],
        loaded: LoadedModel,
        stage: str,
        role: str,
        optimizer: OptimizerConfig,
        value_head: ValueHead | None = None,
    ) -> Role:
        return kind(
            loaded.model,
            self._plan.layout_of(stage, (role,)),
            torch.device(self._config.model.device),
            optimizer,
            compute_dtype=dtype_of(self._config.model),
            max_nonfinite_updates=self._config.train.max_nonfinite_updates,
            rate_key="algorithm.critic.learning_rate" if role == "critic" else "optimizer.learning_rate",
            value_head=value_head,
        )

    def generate(self, requests: Sequence[Request], sampling: str) -> list[Completion]:
        """This rank's share. sampling: SamplingConfig as JSON."""
        return list(self._engine.generate(requests, SamplingConfig.model_validate_json(sampling)))

    def old_logprobs(self, groups: list[Group]) -> dict[str, Tensor]:
        return group_logprobs(self._policy, groups, temperature=self._temperature, max_tokens=self._max_tokens)

    def ref_logprobs(self, groups: list[Group]) -> dict[str, Tensor]:
        assert self._reference is not None, "the graph scores a reference, and none was loaded"
        return group_logprobs(self._reference, groups, temperature=self._temperature, max_tokens=self._max_tokens)

    def values(self, groups: list[Group]) -> tuple[Values, dict[str, Tensor] | None]:
        assert self._critic is not None, "the graph has values, and no critic was loaded"
        return group_values(self._critic, groups, max_tokens=self._max_tokens), None

    def update_critic(self, inputs: UpdateInputs, step: int) -> CriticTally:
        """As `update_policy`."""
        assert self._critic is not None, "the graph updates a critic, and none was loaded"
        tally = update_critic(self._critic, inputs, self._update, step=step)
        return tally if self._critic.counts_tokens else without_sums(tally)

    def update_policy(self, inputs: UpdateInputs, step: int) -> UpdateTally:
        """The tally holds sums over the tokens that this rank owns and no other reports."""
        if step <= self._config.algorithm.critic.pretraining_steps:
            return UpdateTally()
        tally = update_policy(self._policy, inputs, self._update, step=step)
        return tally if self._policy.counts_tokens else without_sums(tally)

    def sync_weights(self, version: int) -> None:
        """Gather the whole policy, one parameter after the other, into this rank's engine."""
        model = self._engine.model
        with torch.no_grad():
            for name, whole in self._policy.model.gathered(dtype_of(self._config.model)):
                model.get_parameter(name).copy_(whole)
        held: list[Any] = [None] * self._settings.num_ranks
        dist.all_gather_object(held, str(fingerprint(model)))
        if len(set(held)) > 1:
            raise WeightSyncError(f"after publishing policy version {version} the ranks' engines hold weights {held}")
        self._engine.set_version(version, recompute_kv=False)

    def save(self, folder: str) -> None:
        """Write this rank's shards of masters and moments into an existing folder that all ranks see."""
        dcp.save(self._state(), checkpoint_id=folder)

    def load_shards(self, folder: str, version: int) -> None:
        """Take over what any layout has saved."""
        dcp.load(self._state(), checkpoint_id=folder)
        self._policy.model.loaded()
        if self._critic is not None:
            self._critic.model.loaded()
        self.sync_weights(version)

    def _state(self) -> dict[str, Tensor]:
        """Names as `plait.executor.shards` has them; a critic's behind its prefix, without the head it never uses."""
        critic = {} if self._critic is None else self._critic.model.state()
        critic = {name: tensor for name, tensor in critic.items() if "/lm_head." not in name}
        return self._policy.model.state() | {f"{CRITIC}{name}": tensor for name, tensor in critic.items()}

    def export(self, folder: str) -> None:
        """Rank 0 writes the whole policy as a transformers folder."""
        if self._settings.rank == 0:
            export(self._engine.model, self._sampler.tokenizer, Path(folder))
        dist.barrier()
