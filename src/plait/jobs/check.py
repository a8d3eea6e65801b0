"""`plait check`: what a recipe comes to, numbers with formulas, and the rules that it breaks. Torch-free."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.algorithms.settings import step_graph
from plait.config import RowsTask, RunConfig
from plait.cost.run_memory import MemoryPrediction, predict_run_memory
from plait.data.naming import task_name
from plait.errors import Violation
from plait.jobs.machine import available_memory_bytes
from plait.jobs.memory_room import kv_bytes, room_violations
from plait.jobs.rows_count import count_rows
from plait.plan import BatchCounts, Plan
from plait.recipe import draft
from plait.rules import config_violations, config_warnings, section_violations
from plait.stages.graph import StageGraphError

if TYPE_CHECKING:
    from rich.console import RenderableType

MIN_SEQUENCE_TOKENS = 2
"""One token of prompt and one of completion: the shortest sequence there can be."""


@dataclass(frozen=True, slots=True)
class Number:
    """A derived number. name: with its unit. formula: how it follows from the settings, in words."""

    name: str
    value: float
    formula: str


@dataclass(frozen=True, slots=True)
class RowsSummary:
    """A task of rows. steps_per_epoch: full steps, were it the only task.

    held_out_rows and what follows from them are estimates under holdout_share.
    left_over_prompts_per_epoch: what the full steps leave; they begin the next epoch, so none is dropped.
    epochs: of the whole run; None without training rows.
    """

    task: str
    rows: int
    training_rows: int
    held_out_rows: int
    prompts_per_step: float
    steps_per_epoch: int
    left_over_prompts_per_epoch: int
    dropped_prompts_per_epoch: int
    epochs: float | None


@dataclass(frozen=True, slots=True)
class StageSummary:
    name: str
    kind: str
    roles: tuple[str, ...]
    granularity: str
    repeat: int
    pool: str
    layout: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Everything that `plait check` says. Numbers are there wherever the fields are right."""

    name: str
    numbers: tuple[Number, ...]
    rows: tuple[RowsSummary, ...]
    stages: tuple[StageSummary, ...]
    plan: dict[str, Any]
    memory: MemoryPrediction
    violations: tuple[Violation, ...]
    warnings: tuple[Violation, ...]

    @property
    def is_valid(self) -> bool:
        return not self.violations

    def number(self, name: str) -> float:
        """The value of a derived number; KeyError if it was not derived."""
        return {number.name: number.value for number in self.numbers}[name]

    def to_dict(self) -> dict[str, Any]:
        return {"is_valid": self.is_valid, **asdict(self)}

    def render(self) -> "RenderableType":
        from plait.jobs.check_report import render

        return render(self)


def check(config: RunConfig) -> CheckReport:
    """Check a configuration whose fields are right: rules, warnings and derived numbers. Raises nothing."""
    violations = config_violations(config)
    rows = _rows(config)
    stages, plan = _stages(config)
    return CheckReport(
        name=config.name,
        numbers=(
            *(*_batch_numbers(config), *_token_numbers(config)),
            *(*_evaluation_numbers(config, rows), *_memory_numbers(config)),
        ),
        rows=tuple(rows),
        stages=tuple(stages),
        plan=plan,
        memory=predict_run_memory(config),
        violations=tuple(violations),
        # Only warnings: the run may be meant for another machine. `plait train` refuses slots that do not fit.
        warnings=(*config_warnings(config), *_room_warnings(config)),
    )


def check_recipe(recipe: str, overrides: Sequence[str] = ()) -> CheckReport:
    """Check a recipe; wrong fields and broken rules are in the report.

    Raises ConfigError only where the file cannot be read at all.
    """
    read = draft(RunConfig, recipe, overrides)
    if read.config is not None:
        return check(read.config)
    violations = [*read.violations, *section_violations(RunConfig, read.sections)]
    name = read.sections["name"] if "name" in read.sections else Path(recipe).stem
    memory = MemoryPrediction((), None, "", "settings are missing or wrong")
    return CheckReport(name, (), (), (), {}, memory, tuple(violations), ())


def _batch_numbers(config: RunConfig) -> list[Number]:
    counts, steps = BatchCounts.from_config(config), config.train.num_steps
    samples, per_step = counts.num_samples_per_step, counts.num_updates_per_step
    warmup = config.optimizer.num_warmup_updates(steps * per_step)
    passes = f" x {config.batch.num_epochs_per_step} epochs" if config.batch.num_epochs_per_step > 1 else ""
    prompts = counts.num_sequences_per_minibatch / counts.num_samples_per_prompt
    shown_prompts = int(prompts) if prompts.is_integer() else prompts
    return [
        Number("samples_per_step", samples, "num_prompts_per_step x num_samples_per_prompt"),
        Number(
            "samples_per_update",
            counts.num_sequences_per_minibatch,
            "num_sequences_per_minibatch" if config.batch.num_sequences_per_minibatch else "all samples of a step",
        ),
        Number("prompts_per_update", shown_prompts, "samples_per_update / num_samples_per_prompt"),
        Number("updates_per_step", per_step, f"samples_per_step / samples_per_update{passes}"),
        Number("steps", steps, "train.num_steps"),
        Number("optimizer_updates", steps * per_step, "steps x updates_per_step"),
        Number("warmup_updates", warmup, "warmup_share x optimizer_updates, rounded up"),
        Number("samples_in_run", steps * samples, "steps x samples_per_step"),
        Number(
            "oldest_data_in_updates",
            max(per_step - 1, 0),
            "updates_per_step - 1: the last update of a step trains on samples that are so many updates old",
        ),
    ]


def _token_numbers(config: RunConfig) -> list[Number]:
    counts, rollout = BatchCounts.from_config(config), config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    budget, units = counts.num_tokens_per_microbatch, counts.num_sequences_per_minibatch
    packed, unit = "max_sequence_tokens", "samples_per_update"
    size = 1
    if config.algorithm.has_pairs:
        units = units // counts.num_samples_per_prompt  # one pair of each prompt
        size, packed, unit = 2, "(2 x max_sequence_tokens)", "prompts_per_update"
    numbers = [
        Number("max_sequence_tokens", longest, "max_prompt_tokens + max_completion_tokens"),
        Number(
            "max_tokens_per_step",
            counts.num_samples_per_step * longest,
            "samples_per_step x max_sequence_tokens",
        ),
    ]
    if budget >= size * longest:
        upper = -(-units // (budget // (size * longest)))
        lower = -(-units * size * MIN_SEQUENCE_TOKENS // budget)
        numbers += [
            Number(
                "max_microbatches_per_update",
                upper,
                f"{unit} / (num_tokens_per_microbatch / {packed}): all of full length",
            ),
            Number(
                "min_microbatches_per_update",
                lower,
                f"{unit} x {size * MIN_SEQUENCE_TOKENS} tokens / num_tokens_per_microbatch",
            ),
        ]
    dynamic = config.algorithm.dynamic_sampling
    if dynamic.enabled:
        numbers.append(
            Number(
                "max_samples_generated_per_step",
                counts.num_samples_per_step * dynamic.max_rounds,
                "samples_per_step x dynamic_sampling.max_rounds",
            )
        )
    return numbers


def _memory_numbers(config: RunConfig) -> list[Number]:
    size = kv_bytes(config)
    formula = "2 x layers x KV width x num_slots x tokens per slot x bytes of a number; taken when the engine is made"
    return [] if size is None else [Number("kv_slots_bytes", size, formula)]


def _room_warnings(config: RunConfig) -> list[Violation]:
    """Memory of this machine against that of a run on its CPU."""
    return [] if config.model.device == "cuda" else room_violations(config, available_memory_bytes())


def _evaluation_numbers(config: RunConfig, rows: Sequence[RowsSummary]) -> list[Number]:
    evaluation = config.evaluation
    if not evaluation.takes_place:
        return []
    prompts, formula = _eval_prompts(config, rows)
    samples = prompts * evaluation.num_samples_per_prompt
    between = 0
    if evaluation.every_steps:
        # The one after the last step is the one at the end.
        between = (config.train.num_steps - 1) // evaluation.every_steps
    times = int(evaluation.at_start) + int(evaluation.at_end) + between
    return [
        Number("eval_prompts", prompts, formula),
        Number("eval_samples", samples, "eval_prompts x evaluation.num_samples_per_prompt; every one is scored"),
        Number(
            "eval_batches",
            -(-samples // config.rollout.num_slots),
            "eval_samples / rollout.num_slots, rounded up",
        ),
        Number("evaluations", times, "at_start + at_end + every_steps"),
    ]


def _eval_prompts(config: RunConfig, rows: Sequence[RowsSummary]) -> tuple[int, str]:
    """Held-out prompts: split by the tasks' weights, and no more than a task of rows has."""
    from plait.data.task import split_counts

    held_out = {summary.task: summary.held_out_rows for summary in rows}
    counts = split_counts(config.evaluation.num_prompts, [task.weight for task in config.tasks])
    names = [task_name(task) for task in config.tasks]
    prompts = sum(min(n, held_out[name]) if name in held_out else n for n, name in zip(counts, names, strict=True))
    if prompts < config.evaluation.num_prompts:
        return prompts, f"held-out rows, fewer than the {config.evaluation.num_prompts} asked for"
    return prompts, "evaluation.num_prompts"


def _rows(config: RunConfig) -> list[RowsSummary]:
    total_weight = math.fsum(task.weight for task in config.tasks)
    summaries = []
    for task in config.tasks:
        if not isinstance(task, RowsTask) or not Path(task.path).is_file():
            continue
        if task.eval_path and not Path(task.eval_path).is_file():
            continue
        rows = count_rows(Path(task.path))
        held_out = count_rows(Path(task.eval_path)) if task.eval_path else _held_out(rows, task.holdout_share)
        training = rows if task.eval_path else rows - held_out
        per_step = config.batch.num_prompts_per_step * task.weight / total_weight
        summaries.append(
            RowsSummary(
                task=task_name(task),
                rows=rows,
                training_rows=training,
                held_out_rows=held_out,
                prompts_per_step=per_step,
                steps_per_epoch=math.floor(training / per_step),
                left_over_prompts_per_epoch=round(training - math.floor(training / per_step) * per_step),
                dropped_prompts_per_epoch=0,
                epochs=config.train.num_steps * per_step / training if training else None,
            )
        )
    return summaries


def _held_out(rows: int, share: float) -> int:
    """About so many: rows are chosen by a hash of their prompt, at least one on either side."""
    chosen = round(rows * share)
    return min(max(chosen, 1), rows - 1) if 0 < share < 1 and rows > 1 else chosen


def _stages(config: RunConfig) -> tuple[list[StageSummary], dict[str, Any]]:
    try:
        graph, plan = step_graph(config), Plan.from_config(config)
    except (StageGraphError, ValueError):
        return [], {}  # the rule that is broken is among the violations
    stages = [
        StageSummary(
            name=stage.name,
            kind=stage.kind,
            roles=stage.roles,
            granularity=stage.granularity,
            repeat=stage.repeat,
            pool=plan.pool_of(stage.name, stage.roles),
            layout=str(plan.layout_of(stage.name, stage.roles)) or "one device",
        )
        for stage in graph.stages
    ]
    return stages, plan.to_dict()
