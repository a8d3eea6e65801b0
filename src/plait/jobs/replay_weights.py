"""The weights that a policy version was: from a checkpoint, or made again; and the batch of a step, made again."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from plait.config import RunConfig
from plait.errors import ConfigError, NonFiniteError, PlaitError
from plait.jobs.train import rerun as run_again
from plait.jobs.train import versions
from plait.recipe import read_recipe
from plait.telemetry.bad_batches import BadBatches, StepBatch
from plait.telemetry.checkpoint import Checkpoint, CheckpointStore
from plait.telemetry.metrics import read_metrics
from plait.telemetry.progress import duration
from plait.telemetry.run_dir import CHECKPOINTS, METRICS_FILE, RunDir

_DECIDED = ("learning_rate", "reward/mean", "tokens_generated", "entropy", "grad_norm")
"""Metrics that are equal where a step was made again exactly: what went in, what was sampled, what was learnt."""


@dataclass(frozen=True, slots=True)
class ReplayedRun:
    """A run to replay from, only read. say: told what a re-run will cost before it starts."""

    folder: Path
    config: RunConfig
    recipe_dir: Path
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Weights:
    """State of the policy and its optimiser, None for those of the initial model; where it is from, in words."""

    checkpoint: Checkpoint | None
    source: str
    notes: tuple[str, ...] = ()


def weights_of(run: ReplayedRun, version: int, *, rerun: bool, instead: str) -> Weights:
    """The weights that policy version `version` was; step k of a run published version k.

    rerun: make steps again where they are not kept. instead: what else a person could choose, for the refusal.
    """
    store, kept = _kept(run)
    if version in kept:
        return Weights(store.load(kept[version]), f"checkpoint step-{version}")
    if version == 0:
        return Weights(None, f"the initial model, {run.config.model.path}")
    start, origin = start_for(run, version)
    cost = cost_of(run, start + 1, version)
    if not rerun:
        available = ", ".join(str(step) for step in sorted({0, *kept}))
        raise ConfigError(
            f"the weights of policy version {version} are not kept: {run.folder} has those of {available} (0 is the "
            f"initial model). Add --rerun to make {cost} again from {origin} in a temporary folder, {instead}, or let "
            "the next run keep more: checkpoint.every_steps and checkpoint.keep"
        )
    run.say(f"making {cost} again from {origin}, in a temporary folder; {run.folder} is only read")
    checkpoint = store.load(kept[start]) if start else None
    with tempfile.TemporaryDirectory(prefix="plait-replay-") as root, RunDir.create(Path(root), "rerun") as folder:
        result = run_again(run.config, folder, run.recipe_dir, checkpoint, last_step=version)
        if result.steps != version:
            raise PlaitError(
                f"the re-run was stopped by {result.stopped} after step {result.steps} of {version}, so there is "
                "nothing to score with. Replay again to make it anew"
            )
        made = CheckpointStore(folder.checkpoints, keep=1).load(folder.checkpoints / f"step-{version}")
        notes = _differences(run, folder.path, start + 1, version)
    return Weights(made, f"{_steps(start + 1, version)} made again from {origin}", notes)


def batch_again(run: ReplayedRun, step: int, weights: Weights) -> tuple[StepBatch, tuple[str, ...]]:
    """The batch of a step, made again from the weights before it; and a note where it is not that of the run."""
    run.say(f"making {cost_of(run, step, step)} again for its batch, from {weights.source}, in a temporary folder")
    with tempfile.TemporaryDirectory(prefix="plait-replay-") as root, RunDir.create(Path(root), "rerun") as folder:
        try:
            run_again(run.config, folder, run.recipe_dir, weights.checkpoint, last_step=step, keeps_batch=True)
        except NonFiniteError:
            notes: tuple[str, ...] = ()  # the run ended at this step, and so does this
        else:
            notes = _differences(run, folder.path, step, step)
        batches = BadBatches(folder.bad_batches)
        if step not in batches.steps():
            raise PlaitError(f"the re-run was stopped before step {step} ended. Replay again to make it anew")
        return batches.load(step), notes


def start_for(run: ReplayedRun, version: int) -> tuple[int, str]:
    """The newest kept step before a version, and its name; 0 is the initial model."""
    start = max(step for step in (0, *_kept(run)[1]) if step < version)
    return start, f"checkpoint step-{start}" if start else "the start"


def cost_of(run: ReplayedRun, first: int, last: int) -> str:
    """Which steps a re-run makes, and how long they took the run."""
    records = recorded(run.folder)
    times = [records[step]["time/step_s"] for step in range(first, last + 1) if step in records]
    if not times:
        return _steps(first, last)
    mean_s, number = float(np.mean(times)), last - first + 1
    return f"{_steps(first, last)} ({number} x {mean_s:.2g} s as recorded, about {duration(number * mean_s)})"


def recorded(folder: Path) -> dict[int, dict[str, float]]:
    """The metrics of each training step of a run."""
    return {record["step"]: record for record in read_metrics(folder / METRICS_FILE) if record["kind"] == "train"}


def version_notes(run_dir: Path) -> list[str]:
    """What has another version now than when the run was started."""
    path = run_dir / "run.json"
    before = read_recipe(path)["versions"] if path.is_file() else {}
    now = versions()
    changed = [
        f"{name} {old} then, {now[name]} now" for name, old in before.items() if name in now and old != now[name]
    ]
    return [f"Versions differ from those of the run: {', '.join(changed)}"] if changed else []


def masters_of(weights: Weights, model: PreTrainedModel) -> dict[str, Tensor]:
    """fp32 masters by parameter name; the model gets them too, as the trainer derives its compute copy."""
    if weights.checkpoint is None:
        # The masters of a run begin as the compute copy's values, whatever type the folder holds.
        return {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    masters = weights.checkpoint.tensors["policy"]
    put(model, masters, weights.source)
    return masters


@torch.no_grad()
def put(model: PreTrainedModel, masters: dict[str, Tensor], source: str) -> None:
    """Derive the compute copy from masters, as the trainer does after each update."""
    parameters = dict(model.named_parameters())
    fits = masters.keys() == parameters.keys() and all(masters[name].shape == p.shape for name, p in parameters.items())
    if not fits:
        raise ConfigError(
            f"{source} holds other parameters than the model that the run names. Restore model.path as it was"
        )
    for name, parameter in parameters.items():
        parameter.copy_(masters[name])


def _kept(run: ReplayedRun) -> tuple[CheckpointStore, dict[int, Path]]:
    store = CheckpointStore(run.folder / CHECKPOINTS, run.config.checkpoint.keep)
    return store, {ref.step: ref.path for ref in store.complete()}


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _differences(run: ReplayedRun, again: Path, first: int, last: int) -> tuple[str, ...]:
    """A note where the re-run did not do what the run had done; its weights are then not those that sampled."""
    before, made = recorded(run.folder), recorded(again)
    for step in range(first, last + 1):
        for name in _DECIDED:
            if step not in before or name not in before[step]:
                continue
            old, new = before[step][name], made[step].get(name)
            if old != new:
                return (
                    f"The re-run differs from the run from step {step} on ({name} {new}, recorded {old}), so its "
                    "weights are not exactly those that sampled. Steps are equal only on the same kind of machine with "
                    "the same packages, verifiers and number of threads, and where train.num_steps was not changed",
                )
    return ()
