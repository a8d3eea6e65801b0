"""Worker groups on Ray: one actor per rank of a layout; the driver keeps the schedule, the prompts and the verifiers.

What goes between driver and ranks is token ids, rewards and a few numbers per token, put once into Ray's object store
and read by every rank from shared memory. Weights, gradients and logits never leave the ranks.
"""

import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from plait.batch import Group, Sample
from plait.config import RunConfig, SamplingConfig
from plait.errors import PlaitError, WorkerError
from plait.executor.rank import Rank, RankSettings
from plait.executor.shards import State, has_shards, write_whole
from plait.executor.tallies import merged_critic, merged_policy
from plait.models.load import Tokenizer
from plait.plan import Plan
from plait.rollout.engine import Completion
from plait.rollout.scheduler import Request
from plait.stages.advantage import Values
from plait.stages.critic_update import CriticTally
from plait.stages.update import UpdateInputs, UpdateTally
from plait.telemetry.files import PARTIAL_PREFIX

START_LIMIT_S = 300.0
"""For a cluster to answer, processes to start and models to load."""
GRACE_S = 3.0
"""After a first failure, for the others to report: a rank that died explains why its peers lost their connection."""


class Cluster:
    """A connection to Ray: the cluster that RAY_ADDRESS names, else one of this machine that ends with the run."""

    def __init__(self, num_ranks: int, num_threads: int, device: str):
        """num_threads: of each rank."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if ray.is_initialized():
            raise PlaitError("this process is connected to Ray already. Start a run in a process of its own")
        # CPUs are logical places here: a machine may have fewer cores than a plan has ranks.
        own: dict[str, Any] = {
            "num_cpus": num_ranks * num_threads,
            "object_store_memory": 512 * 2**20,
            "include_dashboard": False,
        }
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **({} if "RAY_ADDRESS" in os.environ else own))
        bundle = {"CPU": float(num_threads)} | ({"GPU": 1.0} if device == "cuda" else {})
        self._num_cpus, self._num_gpus = float(num_threads), 1.0 if device == "cuda" else 0.0
        self.group: PlacementGroup = placement_group([bundle] * num_ranks, strategy="PACK")
        if not self.group.wait(timeout_seconds=START_LIMIT_S):
            have = {name: number for name, number in ray.cluster_resources().items() if name in ("CPU", "GPU")}
            self.close()
            raise PlaitError(
                f"Ray found no place for {num_ranks} ranks of {bundle} within {START_LIMIT_S:.0f} s; the cluster has "
                f"{have}. Choose a smaller plan, or add nodes"
            )

    def actor(self, index: int, settings: RankSettings) -> Any:
        """The actor of one rank, at its own place."""
        return (
            ray.remote(Rank)
            .options(
                num_cpus=self._num_cpus,
                num_gpus=self._num_gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index),
                max_restarts=0,
                max_task_retries=0,
            )
            .remote(settings)
        )

    def close(self) -> None:
        """Give the places back; end a cluster of our own."""
        if ray.is_initialized():
            remove_placement_group(self.group)
            ray.shutdown()


class RayWorkers:
    """Implements `plait.executor.workers.Workers` with one actor per rank. A context manager: leaving it ends them."""

    def __init__(self, config: RunConfig, plan: Plan):
        self._limit_s, self._version = config.plan.wait_limit_s, 0
        num_ranks = plan.num_ranks
        # Ray gives each actor as many OpenMP threads as it has CPUs.
        num_threads = max(1, config.model.num_threads // num_ranks)
        config = config.model_copy(update={"model": config.model.model_copy(update={"num_threads": num_threads})})
        self._actors: list[Any] = []
        self._cluster = Cluster(num_ranks, num_threads, config.model.device)
        with ExitStack() as undo:
            undo.callback(self.close)  # whatever happens, an interrupt included
            for rank in range(num_ranks):
                settings = RankSettings(config.model_dump_json(), rank, num_ranks, self._limit_s)
                self._actors.append(self._cluster.actor(rank, settings))
            address = self._one(0, "address", limit_s=START_LIMIT_S)
            self._all("load", address, limit_s=START_LIMIT_S)
            undo.pop_all()

    def __enter__(self) -> "RayWorkers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End every rank, then a cluster of our own."""
        if ray.is_initialized():
            self._kill()
        self._cluster.close()

    @property
    def version(self) -> int:
        return self._version

    def generate(self, requests: Sequence[Request], sampling: SamplingConfig) -> Iterator[Completion]:
        """Whole prompts are dealt to the ranks in turns; what a rank has finished comes when all of its share is."""
        prompts: dict[tuple[int, ...], list[Request]] = {}
        for request in requests:
            prompts.setdefault(request.prompt_ids, []).append(request)
        shares: list[list[Request]] = [[] for _ in self._actors]
        for number, same in enumerate(prompts.values()):
            shares[number % len(shares)] += same
        calls = {
            actor.generate.remote(share, sampling.model_dump_json()): rank
            for rank, (actor, share) in enumerate(zip(self._actors, shares, strict=True))
        }
        for _, completions in self._as_completed(calls, "generate", self._limit_s):
            yield from completions

    def old_logprobs(self, groups: list[Group]) -> dict[str, Tensor]:
        return self._all("old_logprobs", ray.put(groups))[0]

    def ref_logprobs(self, groups: list[Group]) -> dict[str, Tensor]:
        return self._all("ref_logprobs", ray.put(groups))[0]

    def values(self, groups: list[Group]) -> tuple[Values, dict[str, Tensor] | None]:
        return self._all("values", ray.put(groups))[0]

    def reward_scores(self, samples: Sequence[Sample]) -> dict[str, list[float]]:
        raise AssertionError("reward models run in one process only, and the rules refuse them here")

    def update_policy(self, inputs: UpdateInputs, *, step: int) -> UpdateTally:
        return merged_policy(self._all("update_policy", ray.put(inputs), step))

    def update_critic(self, inputs: UpdateInputs, *, step: int) -> CriticTally:
        return merged_critic(self._all("update_critic", ray.put(inputs), step))

    def sync_weights(self, version: int) -> None:
        self._all("sync_weights", version)
        self._version = version

    def state(self) -> State:
        return {}  # all of it is in what the ranks write

    def save_shards(self, folder: Path) -> None:
        self._all("save", str(folder.resolve()))

    def restore(self, state: State, folder: Path, version: int) -> None:
        if has_shards(folder):
            self._all("load_shards", str(folder.resolve()), version)
        else:
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=PARTIAL_PREFIX) as made:
                write_whole(state, Path(made))
                self._all("load_shards", str(Path(made).resolve()), version)
        self._version = version

    def export(self, tokenizer: Tokenizer, folder: Path) -> None:
        """Rank 0 writes it: a path that it shares with the driver."""
        self._all("export", str(folder.resolve()))

    def _one(self, rank: int, method: str, *arguments: Any, limit_s: float | None = None) -> Any:
        call = getattr(self._actors[rank], method).remote(*arguments)
        return dict(self._as_completed({call: rank}, method, limit_s or self._limit_s))[rank]

    def _all(self, method: str, *arguments: Any, limit_s: float | None = None) -> list[Any]:
        """Call a method on every rank; what each returned, by rank."""
        calls = {getattr(actor, method).remote(*arguments): rank for rank, actor in enumerate(self._actors)}
        answers = dict(self._as_completed(calls, method, limit_s or self._limit_s))
        return [answers[rank] for rank in range(len(self._actors))]

    def _as_completed(self, calls: dict[Any, int], method: str, limit_s: float) -> Iterator[tuple[int, Any]]:
        """(rank, result) as they come. The first failure ends every rank and is raised with its stack."""
        end, waiting = time.monotonic() + limit_s, dict(calls)
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                ranks = sorted(waiting.values())
                self._kill()
                raise WorkerError(
                    f"ranks {ranks} did not finish {method} within {limit_s:.0f} s, and all were ended. The last "
                    "checkpoint resumes; if the work is only slow, raise plan.wait_limit_s"
                )
            rank = waiting.pop(ready[0])
            try:
                result = ray.get(ready[0], timeout=max(1.0, end - time.monotonic()))
            except (RayError, GetTimeoutError) as error:
                self._fail(rank, method, error, waiting)
            yield rank, result

    def _fail(self, rank: int, method: str, error: Exception, waiting: dict[Any, int]) -> None:
        """Raise the failure that explains the others: a mistake of the user's, else a death, else the first."""
        failures = [(rank, error)]
        late, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=GRACE_S) if waiting else ([], [])
        for call in late:
            try:
                ray.get(call, timeout=1.0)
            except (RayError, GetTimeoutError) as other:
                failures.append((waiting[call], other))
        self._kill()
        for _, failure in failures:
            if isinstance(failure, RayTaskError) and isinstance(failure.cause, PlaitError):
                raise failure.cause
        died = [pair for pair in failures if isinstance(pair[1], ActorDiedError)]
        first, failure = (died or failures)[0]
        raise WorkerError(f"rank {first} failed in {method}, and all ranks were ended:\n{failure}") from failure

    def _kill(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
