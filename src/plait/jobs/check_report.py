"""A CheckReport as a person reads it."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.cost.run_memory import MemoryPrediction
from plait.errors import Violation
from plait.jobs.check import CheckReport, Number, RowsSummary


def render(report: CheckReport) -> RenderableType:
    """Derived numbers, stages and plan, then warnings and violations, then the verdict."""
    parts: list[RenderableType] = []
    if report.numbers:
        parts.append(_numbers(report.numbers))
    parts += [_rows(summary) for summary in report.rows]
    if report.stages:
        parts += [_stages(report), _plan(report), _memory(report.memory)]
    parts += violation_lines(report.warnings, "yellow", "warning: ")
    parts += violation_lines(report.violations, "red", "")
    verdict = f"{report.name}: ready to train" if report.is_valid else f"{report.name}: {_count(report)}"
    parts.append(Text(verdict, style="bold green" if report.is_valid else "bold red"))
    return Group(*parts)


def _count(report: CheckReport) -> str:
    number = len(report.violations)
    return f"{number} setting{'s' if number > 1 else ''} to change"


def violation_lines(violations: Sequence[Violation], style: str, prefix: str) -> list[RenderableType]:
    """One paragraph per violation; never read as Rich markup, since values may hold brackets."""
    return [Text(f"{prefix}{violation}", style=style, no_wrap=True, overflow="ignore") for violation in violations]


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _numbers(numbers: Sequence[Number]) -> Table:
    table = Table("number", "value", "how it follows", title="What this recipe comes to", title_justify="left")
    table.columns[1].justify = "right"
    for number in numbers:
        table.add_row(number.name.replace("_", " "), _shown(number.value), Text(number.formula))
    return table


def _rows(summary: RowsSummary) -> Table:
    table = Table("rows", "value", "", title=f"Task {summary.task}", title_justify="left")
    table.columns[1].justify = "right"
    steps = f"of about {summary.prompts_per_step:g} prompts of this task each"
    left_over = "a full pass leaves these over; they begin the next epoch"
    table.add_row("rows", _shown(summary.rows), "")
    table.add_row("training rows", _shown(summary.training_rows), "")
    table.add_row("held-out rows", _shown(summary.held_out_rows), "")
    table.add_row("full steps per epoch", _shown(summary.steps_per_epoch), steps)
    table.add_row("prompts left over per epoch", _shown(summary.left_over_prompts_per_epoch), left_over)
    table.add_row("prompts dropped per epoch", _shown(summary.dropped_prompts_per_epoch), "prompts just go on")
    table.add_row(
        "epochs",
        "-" if summary.epochs is None else _shown(summary.epochs),
        "steps x prompts per step / training rows",
    )
    return table


def _stages(report: CheckReport) -> Table:
    table = Table("stage", "kind", "roles", "hands on per", "times", "pool", "layout", title="Stages of a step")
    table.title_justify = "left"
    table.columns[0].no_wrap = True
    for stage in report.stages:
        roles = ", ".join(stage.roles) or "-"
        repeat = str(stage.repeat)
        table.add_row(stage.name, stage.kind, roles, stage.granularity, repeat, stage.pool, stage.layout)
    return table


def _plan(report: CheckReport) -> Text:
    pools = ", ".join(
        f"{name} ({devices} device{'s' if devices > 1 else ''})" for name, devices in report.plan["pools"].items()
    )
    engine = report.plan["engine"]
    return Text(
        f"Plan: pools {pools}; schedule {report.plan['schedule']}; engine with {engine['num_slots']} slots "
        f"of {engine['max_sequence_tokens']} tokens"
    )


def _memory(memory: MemoryPrediction) -> RenderableType:
    if memory.peak_bytes is None:
        return Text(f"Peak memory: not predicted, because {memory.not_predicted}", no_wrap=True, overflow="ignore")
    table = Table("memory", "MiB", "held", "how it follows", title="Predicted peak memory of the training process")
    table.title_justify = "left"
    table.columns[1].justify = "right"
    for term in memory.terms:
        table.add_row(term.name, _shown(round(term.num_bytes / 2**20)), term.phase, Text(term.formula))
    how = f"what is always held, and {memory.peak_phase}; verifier workers come on top"
    table.add_row("peak", _shown(round(memory.peak_bytes / 2**20)), "", how, style="bold")
    return table
