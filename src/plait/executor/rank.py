"""One process of a worker group: this rank's part of every model, and an engine over whole weights.

The driver calls the same method on every rank at the same time. Nothing here knows what carries the calls.
"""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from plait.batch import Group
from plait.config import RunConfig, SamplingConfig
from plait.errors import WeightSyncError
from plait.executor.tallies import without_sums
from plait.executor.workers import update_settings
from plait.jobs.setup import LoadedModel, dtype_of, load, make_engine
from plait.models import attention
from plait.models.fingerprint import fingerprint
from plait.models.load import export
from plait.parallel.mesh import open_process_group
from plait.plan import Plan
from plait.roles.sharded import ShardedPolicy
from plait.rollout.engine import Completion
from plait.rollout.scheduler import Request
from plait.stages.logprob import group_logprobs
from plait.stages.update import UpdateInputs, UpdateTally, update_policy


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
        self._policy = ShardedPolicy(
            loaded.model,
            self._plan.layout_of("update_policy", ("policy",)),
            torch.device(config.model.device),
            config.optimizer,
            compute_dtype=dtype_of(config.model),
            max_nonfinite_updates=config.train.max_nonfinite_updates,
        )
        self._update = update_settings(config, self._plan)

    def generate(self, requests: Sequence[Request], sampling: str) -> list[Completion]:
        """This rank's share. sampling: SamplingConfig as JSON."""
        return list(self._engine.generate(requests, SamplingConfig.model_validate_json(sampling)))

    def old_logprobs(self, groups: list[Group]) -> dict[str, Tensor]:
        return group_logprobs(self._policy, groups, temperature=self._temperature, max_tokens=self._max_tokens)

    def update_policy(self, inputs: UpdateInputs, step: int) -> UpdateTally:
        """The tally holds sums over the tokens that this rank owns and no other reports."""
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
        dcp.save(self._policy.model.state(), checkpoint_id=folder)

    def load_shards(self, folder: str, version: int) -> None:
        """Take over what any layout has saved."""
        dcp.load(self._policy.model.state(), checkpoint_id=folder)
        self._policy.model.loaded()
        self.sync_weights(version)

    def export(self, folder: str) -> None:
        """Rank 0 writes the whole policy as a transformers folder."""
        if self._settings.rank == 0:
            export(self._engine.model, self._sampler.tokenizer, Path(folder))
        dist.barrier()
