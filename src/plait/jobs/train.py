"""`plait train`: start a run or go on with one, and say what came of it."""

import io
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from plait.algorithms.settings import step_graph
from plait.config import CheckpointConfig, RowsTask, RunConfig, TaskConfig
from plait.data.mixture import Mixture
from plait.data.tasks import build_tasks
from plait.errors import ConfigError, PlaitError
from plait.jobs.evaluate import EvaluationResult
from plait.jobs.inputs import describe_inputs
from plait.jobs.memory_room import memory_notes
from plait.jobs.resume_changes import changes, notes_on, refuse_changes, version_changes, work_left
from plait.jobs.roles import load_parts
from plait.jobs.setup import available_bytes, held_out, resolve_model
from plait.jobs.step_metrics import peak_rss_bytes
from plait.jobs.stop import StopRequest
from plait.jobs.training_run import Logs, TrainingRun, results_of
from plait.plan import Plan
from plait.recipe import apply_overrides, read_resolved_config
from plait.rewards.scoring import Scoring, open_scoring
from plait.rules import check_config
from plait.telemetry.alarm_log import AlarmLog
from plait.telemetry.bad_batches import BadBatches
from plait.telemetry.checkpoint import Checkpoint, CheckpointStore
from plait.telemetry.metrics import MetricsLog, read_metrics
from plait.telemetry.progress import Progress
from plait.telemetry.run_dir import CONFIG, ORIGIN, RunDir, is_run
from plait.telemetry.samples import SamplesLog
from plait.telemetry.trace import Trace

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to. stopped: why it ended before its last step, or empty. alarms: see `AlarmLog.summary`."""

    run_dir: Path
    steps: int
    num_steps: int
    before: EvaluationResult | None
    after: EvaluationResult | None
    seconds: float
    seconds_per_stage: dict[str, float]
    tokens_generated: int
    tokens_trained: int
    num_failed_samples: int
    num_dropped_prompts: int
    peak_rss_bytes: int
    alarms: list[dict[str, Any]]
    stopped: str
    exit_code: int

    def summary(self) -> dict[str, Any]:
        """The content of summary.json."""
        return {
            "steps": self.steps,
            "num_steps": self.num_steps,
            "stopped": self.stopped,
            "before": None if self.before is None else self.before.to_dict(),
            "after": None if self.after is None else self.after.to_dict(),
            "seconds": self.seconds,
            "seconds_per_stage": self.seconds_per_stage,
            "tokens_generated": self.tokens_generated,
            "tokens_trained": self.tokens_trained,
            "tokens_generated_per_s": self.tokens_generated / self.seconds_per_stage["generate"]
            if "generate" in self.seconds_per_stage
            else None,
            "num_failed_samples": self.num_failed_samples,
            "num_dropped_prompts": self.num_dropped_prompts,
            "peak_rss_bytes": self.peak_rss_bytes,
            "alarms": self.alarms,
            "versions": versions(),
        }

    def render(self) -> "RenderableType":
        from plait.jobs.train_report import render

        return render(self)


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers."""
    packages = ("plait", "torch", "transformers", "tokenizers", "reasoning-gym", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def train(
    config: RunConfig, *, run_dir: Path | None = None, recipe_dir: Path = Path(), progress: bool = True
) -> TrainResult:
    """Run a recipe from its start. Results go to run_dir, or to the first free runs/<name>."""
    check_config(config)
    resolved = config.model_copy(
        update={"model": resolve_model(config.model), "tasks": _absolute_paths(config, recipe_dir)}
    )
    with _new_folder(resolved.name, run_dir) as folder:
        mixture = _tasks(resolved, recipe_dir)
        inputs = describe_inputs(resolved, mixture, recipe_dir)
        origin = {"recipe_dir": str(recipe_dir.resolve()), "versions": versions(), "inputs": inputs, "changes": []}
        # Before config.json, which makes the folder that of a run.
        folder.write_json(ORIGIN, origin)
        folder.write_json(CONFIG, resolved.model_dump(mode="json"))
        return _run(resolved, folder, recipe_dir, mixture, None, progress)


def resume(
    run_dir: Path, overrides: Sequence[str] = (), *, accepted: Sequence[str] = (), progress: bool = True
) -> TrainResult:
    """Go on with a run from its newest complete checkpoint.

    accepted: names of settings that may differ from the run as it was started, or lead to other content. Raises
    ConfigError with every change that is not among them (see `plait.jobs.resume_changes`).
    """
    with RunDir.open(run_dir) as folder:
        before, origin = read_resolved_config(folder.read_json(CONFIG)), _origin(folder)
        config = apply_overrides(before, overrides)
        check_config(config)
        config = config.model_copy(update={"model": resolve_model(config.model)})
        recipe_dir = Path(origin["recipe_dir"])
        store = CheckpointStore(folder.checkpoints, config.checkpoint.keep)
        latest = store.latest()
        notes = [f"passed over checkpoint {other.name}: {other.reason}" for other in latest.passed_over]
        if latest.newest is None:
            notes.append("there is no complete checkpoint, so the run starts from its first step again")
        steps_done = 0 if latest.newest is None else latest.newest.step
        mixture = _tasks(config, recipe_dir)
        inputs = describe_inputs(config, mixture, recipe_dir)
        found = changes(before, config, origin["inputs"], inputs, steps_done)
        refuse_changes(found, accepted, config, steps_done)
        notes += notes_on(found, accepted)
        if other := version_changes(origin["versions"], versions()):
            notes.append(f"versions differ from those that the run was started with: {', '.join(other)}")
        checkpoint = None if latest.newest is None else store.load(latest.newest.path)
        record = {"after_step": steps_done, "changes": [str(change) for change in found], "versions": other}
        kept = [*origin["changes"], record] if found or other else origin["changes"]
        records = {
            CONFIG: config.model_dump(mode="json"),
            ORIGIN: origin | {"versions": versions(), "inputs": inputs, "changes": kept},
        }
        return _run(config, folder, recipe_dir, mixture, checkpoint, progress, notes, records)


def rerun(
    config: RunConfig,
    folder: RunDir,
    recipe_dir: Path,
    checkpoint: Checkpoint | None,
    *,
    last_step: int,
    keeps_batch: bool = False,
) -> TrainResult:
    """Make a run's steps again in another folder: after a checkpoint (None: from the start), up to last_step.

    keeps_batch: keep the batch of last_step there, finite or not.
    The steps alone decide what comes of them, so nothing is evaluated, and only the last state is kept.
    """
    settings: dict[str, Any] = {
        "evaluation": config.evaluation.model_copy(update={"at_start": False, "at_end": False, "every_steps": 0}),
        "checkpoint": CheckpointConfig(every_steps=0, keep=1),
        "logging": config.logging.model_copy(update={"tensorboard": False}),
        "train": config.train.model_copy(update={"wall_clock_limit_s": None}),
    }
    kept = last_step if keeps_batch else 0
    if checkpoint is not None:  # a run empties the one that it goes on from, and a replay needs it longer
        checkpoint = replace(checkpoint, tensors=dict(checkpoint.tensors))
    again = config.model_copy(update=settings)
    tasks = _tasks(again, recipe_dir)
    return _run(again, folder, recipe_dir, tasks, checkpoint, False, until=last_step, kept_step=kept)


def _origin(folder: RunDir) -> dict[str, Any]:
    """What run.json says of how the run was started."""
    origin = folder.read_json(ORIGIN)
    if missing := {"recipe_dir", "versions", "inputs", "changes"} - origin.keys():
        raise PlaitError(
            f"{folder.path / ORIGIN} does not say {', '.join(sorted(missing))}: another version of Plait started "
            "this run. Resume it with that version"
        )
    return origin


def _tasks(config: RunConfig, recipe_dir: Path) -> Mixture:
    mixture = build_tasks(config.tasks, run_seed=config.seed, eval_config=config.evaluation, recipe_dir=recipe_dir)
    mixture.check_trainable()
    return mixture


def _new_folder(name: str, run_dir: Path | None) -> RunDir:
    """A named folder must be free; without a name the next free one is taken."""
    if run_dir is None:
        return RunDir.create(Path("runs"), name)
    if is_run(run_dir):
        raise ConfigError(
            f'"{run_dir}" holds a run already. '
            f"Go on with it by plait train --resume {run_dir}, or choose another folder"
        )
    return RunDir.create(run_dir.parent, run_dir.name, is_exact=True)


def _run(
    config: RunConfig,
    folder: RunDir,
    recipe_dir: Path,
    mixture: Mixture,
    checkpoint: Checkpoint | None,
    show_progress: bool,
    notes: Sequence[str] = (),
    records: Mapping[str, Any] = MappingProxyType({}),
    *,
    until: int | None = None,
    kept_step: int = 0,
) -> TrainResult:
    """records: JSON files of the run that are replaced once everything it needs is there."""
    with StopRequest(config.train.wall_clock_limit_s) as stop, ExitStack() as stack:
        plan = Plan.from_config(config)
        folder.write_json("plan.json", _plan_json(config, plan))
        last_step = -1 if checkpoint is None else checkpoint.step
        trace = Trace.load(folder.trace, f"{config.model.device}:0", last_step=last_step)
        memory = memory_notes(config, available_bytes(config.model))
        logs = _open_logs(stack, config, folder, last_step, show_progress)
        for note in (*notes, *(note for report in mixture.reports() for note in report.notes), *memory):
            logs.progress.note(note)
        scorers = _open_scorers(stack, config, recipe_dir)
        parts = load_parts(stack, config, plan, mixture, scorers, trace)
        prompts = []
        if config.evaluation.takes_place:
            prompts = held_out(mixture, parts.stream, config.evaluation.num_prompts)
        run = TrainingRun(config, plan, parts, logs, prompts, stop)
        if checkpoint is not None:
            run.restore(checkpoint)
            logs.progress.note(work_left(config, run.position.step))
        for name, content in records.items():
            folder.write_json(name, content)
        run.run(until, kept_step=kept_step)
        logs.progress.close()
        trace.write(folder.trace)
        result = _result(run, config, logs, stop, trace)
        folder.write_json("summary.json", result.summary())
        return result


def _open_scorers(stack: ExitStack, config: RunConfig, recipe_dir: Path) -> tuple[Scoring, Scoring]:
    """(of training, of evaluation): one and the same, unless a control replaces the training rewards."""
    control = config.control.rewards
    scorer = stack.enter_context(open_scoring(config.verifiers, recipe_dir, control=control, seed=config.seed))
    if control == "verifier":
        return scorer, scorer
    return scorer, stack.enter_context(open_scoring(config.verifiers, recipe_dir))


class _Nowhere(io.StringIO):
    """A stream for silent runs."""

    def write(self, text: str) -> int:
        return len(text)


def _open_logs(stack: ExitStack, config: RunConfig, folder: RunDir, last_step: int, show_progress: bool) -> Logs:
    """Open what a run writes; everything after last_step is cut off, so that it can be written again."""
    metrics = MetricsLog.reopen(folder.metrics, last_step, tensorboard=config.logging.tensorboard)
    samples = SamplesLog.reopen(folder.samples, last_step)
    alarms = AlarmLog(folder.alarms, last_step, read_metrics(folder.metrics))
    bad_batches = BadBatches(folder.bad_batches)
    bad_batches.drop_after(last_step)
    # A silent run keeps the same code path; what it would have shown goes nowhere.
    stream = None if show_progress else _Nowhere()
    return Logs(
        folder=folder,
        metrics=stack.enter_context(metrics),
        samples=stack.enter_context(samples),
        alarms=stack.enter_context(alarms),
        bad_batches=bad_batches,
        checkpoints=CheckpointStore(folder.checkpoints, config.checkpoint.keep),
        progress=stack.enter_context(Progress(config.train.num_steps, stream=stream)),
    )


def _plan_json(config: RunConfig, plan: Plan) -> dict[str, Any]:
    """The plan with every stage's place and layout spelled out."""
    stages = [
        {
            "name": stage.name,
            "roles": list(stage.roles),
            "kind": stage.kind,
            "granularity": stage.granularity,
            "repeat": stage.repeat,
            "axes": sorted(stage.axes),
            "reads": sorted(stage.reads),
            "writes": sorted(stage.writes),
            "pool": plan.pool_of(stage.name, stage.roles),
            "layout": str(plan.layout_of(stage.name, stage.roles)),
        }
        for stage in step_graph(config).stages
    ]
    return plan.to_dict() | {"stages": stages}


def _absolute_paths(config: RunConfig, recipe_dir: Path) -> tuple[TaskConfig, ...]:
    """Row files by absolute path, so that a run can go on from any working directory."""
    tasks: list[TaskConfig] = []
    for task in config.tasks:
        if isinstance(task, RowsTask):
            paths = {"path": task.path, "eval_path": task.eval_path}
            made = {key: str((recipe_dir / value).resolve()) for key, value in paths.items() if value}
            task = task.model_copy(update=made | {"name": task.name or Path(task.path).stem})
        tasks.append(task)
    return tuple(tasks)


def _result(run: TrainingRun, config: RunConfig, logs: Logs, stop: StopRequest, trace: Trace) -> TrainResult:
    before, after = results_of(run.position)
    return TrainResult(
        run_dir=logs.folder.path,
        steps=run.position.step,
        num_steps=config.train.num_steps,
        before=before,
        after=after,
        seconds=run.seconds,
        seconds_per_stage=trace.seconds_per_stage(),
        tokens_generated=run.position.tokens_generated,
        tokens_trained=run.position.tokens_trained,
        num_failed_samples=run.position.num_failed,
        num_dropped_prompts=run.position.num_dropped,
        peak_rss_bytes=peak_rss_bytes(),
        alarms=logs.alarms.summary(),
        stopped="" if run.is_finished else stop.reason,
        exit_code=0 if run.is_finished else stop.exit_code,
    )
