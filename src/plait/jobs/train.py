"""`plait train`: start a run or go on with one, and say what came of it."""

import io
import platform
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.algorithms.settings import step_graph
from plait.config import CheckpointConfig, RowsTask, RunConfig, TaskConfig
from plait.data.tasks import build_tasks
from plait.errors import ConfigError, Violation
from plait.jobs.evaluate import EvaluationResult
from plait.jobs.roles import load_parts
from plait.jobs.setup import held_out, resolve_model
from plait.jobs.step_metrics import peak_rss_bytes
from plait.jobs.stop import StopRequest
from plait.jobs.training_run import Logs, TrainingRun, results_of
from plait.plan import Plan
from plait.recipe import apply_overrides, load_resolved_config
from plait.rewards.scoring import Scoring, open_scoring
from plait.rules import check_config
from plait.rules.tasks import is_evaluated
from plait.telemetry.checkpoint import Checkpoint, CheckpointStore
from plait.telemetry.metrics import MetricsLog
from plait.telemetry.progress import Progress
from plait.telemetry.run_dir import RunDir
from plait.telemetry.samples import SamplesLog
from plait.telemetry.trace import Trace

if TYPE_CHECKING:
    from rich.console import RenderableType

RESUMABLE_CHANGES = (
    "train.",
    "checkpoint.",
    "logging.",
    "verifiers.num_workers",
    "evaluation.every_steps",
    "evaluation.at_end",
)
"""Settings that `--resume` may change: none of them changes what a step computes."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to. stopped: why it ended before its last step, or empty."""

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
        folder.write_json("config.json", resolved.model_dump(mode="json"))
        folder.write_json("run.json", {"recipe_dir": str(recipe_dir.resolve()), "versions": versions()})
        return _run(resolved, folder, recipe_dir, None, progress)


def resume(run_dir: Path, overrides: Sequence[str] = (), *, progress: bool = True) -> TrainResult:
    """Go on with a run from its newest complete checkpoint."""
    with RunDir.open(run_dir) as folder:
        before = load_resolved_config(folder.read_json("config.json"))
        config = apply_overrides(before, overrides)
        _refuse_changes(before, config)
        check_config(config)
        store = CheckpointStore(folder.checkpoints, config.checkpoint.keep)
        latest = store.latest()
        notes = [f"passed over checkpoint {other.name}: {other.reason}" for other in latest.passed_over]
        if latest.newest is None:
            notes.append("there is no complete checkpoint, so the run starts from its first step again")
        checkpoint = None if latest.newest is None else store.load(latest.newest.path)
        if overrides:
            folder.write_json("config.json", config.model_dump(mode="json"))
        recipe_dir = Path(folder.read_json("run.json")["recipe_dir"])
        return _run(config, folder, recipe_dir, checkpoint, progress, notes)


def rerun(
    config: RunConfig, folder: RunDir, recipe_dir: Path, checkpoint: Checkpoint | None, *, last_step: int
) -> TrainResult:
    """Make a run's steps again in another folder: after a checkpoint (None: from the start), up to last_step.

    The steps alone decide what comes of them, so nothing is evaluated, and only the last state is kept.
    """
    changes: dict[str, Any] = {
        "evaluation": config.evaluation.model_copy(update={"at_start": False, "at_end": False, "every_steps": 0}),
        "checkpoint": CheckpointConfig(every_steps=0, keep=1),
        "logging": config.logging.model_copy(update={"tensorboard": False}),
        "train": config.train.model_copy(update={"wall_clock_limit_s": None}),
    }
    return _run(config.model_copy(update=changes), folder, recipe_dir, checkpoint, False, until=last_step)


def _new_folder(name: str, run_dir: Path | None) -> RunDir:
    """A named folder must be free; without a name the next free one is taken."""
    if run_dir is None:
        return RunDir.create(Path("runs"), name)
    if (run_dir / "config.json").exists():
        raise ConfigError(
            f'"{run_dir}" holds a run already. '
            f"Go on with it by plait train --resume {run_dir}, or choose another folder"
        )
    return RunDir.create(run_dir.parent, run_dir.name)


def _run(
    config: RunConfig,
    folder: RunDir,
    recipe_dir: Path,
    checkpoint: Checkpoint | None,
    show_progress: bool,
    notes: Sequence[str] = (),
    *,
    until: int | None = None,
) -> TrainResult:
    with StopRequest(config.train.wall_clock_limit_s) as stop, ExitStack() as stack:
        plan = Plan.from_config(config)
        folder.write_json("plan.json", _plan_json(config, plan))
        last_step = -1 if checkpoint is None else checkpoint.step
        trace = Trace.load(folder.trace, f"{config.model.device}:0", last_step=last_step)
        mixture = build_tasks(config.tasks, run_seed=config.seed, eval_config=config.evaluation, recipe_dir=recipe_dir)
        mixture.check_trainable()
        scorers = _open_scorers(stack, config, recipe_dir)
        parts = load_parts(config, plan, mixture, scorers, trace)
        prompts = []
        if is_evaluated(config.evaluation):
            prompts = held_out(mixture, parts.stream, config.evaluation.num_prompts)
        logs = _open_logs(stack, config, folder, last_step, show_progress)
        for note in (*notes, *(note for report in mixture.reports() for note in report.notes)):
            logs.progress.note(note)
        run = TrainingRun(config, plan, parts, logs, prompts, stop)
        if checkpoint is not None:
            run.restore(checkpoint)
            logs.progress.note(f"going on after step {run.position.step} of {config.train.num_steps}")
        run.run(until)
        logs.progress.close()
        trace.write(folder.trace)
        result = _result(run, config, folder, stop, trace)
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
    # A silent run keeps the same code path; what it would have shown goes nowhere.
    stream = None if show_progress else _Nowhere()
    return Logs(
        folder=folder,
        metrics=stack.enter_context(metrics),
        samples=stack.enter_context(samples),
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


def _refuse_changes(before: RunConfig, after: RunConfig) -> None:
    """A resumed run is the same run: only what does not change a step's result may differ."""
    changed = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    keys = sorted(key for key in changed[0].keys() | changed[1].keys() if changed[0].get(key) != changed[1].get(key))
    refused = [key for key in keys if not key.startswith(RESUMABLE_CHANGES)]
    if refused:
        raise ConfigError(
            [
                Violation(
                    key,
                    f"the run was started with {changed[0].get(key)!r}, "
                    f"and --resume would change it to {changed[1].get(key)!r}",
                    "Start a new run for that; a resumed one may change train.*, checkpoint.*, logging.* and "
                    "evaluation.every_steps",
                )
                for key in refused
            ]
        )


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict):
        return {prefix.removesuffix("."): data}
    return {key: value for name, part in data.items() for key, value in _flat(part, f"{prefix}{name}.").items()}


def _result(run: TrainingRun, config: RunConfig, folder: RunDir, stop: StopRequest, trace: Trace) -> TrainResult:
    before, after = results_of(run.position)
    return TrainResult(
        run_dir=folder.path,
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
        stopped="" if run.is_finished else stop.reason,
        exit_code=0 if run.is_finished else stop.exit_code,
    )
