"""The last lines of a run: before and after, where the time went, where the results are."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from plait.telemetry.progress import duration

if TYPE_CHECKING:
    from rich.console import RenderableType

    from plait.jobs.train import TrainResult


def render(result: "TrainResult") -> "RenderableType":
    """A Rich renderable for the terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = []
    if result.before is not None or result.after is not None:
        table = Table(title=f"Held-out evaluation, {result.steps} of {result.num_steps} steps", title_justify="left")
        for heading in ("", "before", "after"):
            table.add_column(heading, justify="left" if not heading else "right")
        for row in evaluation_rows(result):
            table.add_row(*row)
        parts.append(table)
    parts.append(Text(where_the_time_went(result)))
    parts.extend(Text(line) for line in alarm_lines(result.alarms))
    if result.num_failed_samples:
        parts.append(
            Text(f"The verifier failed on {result.num_failed_samples} samples; samples.jsonl has the reasons.")
        )
    if result.num_dropped_prompts:
        parts.append(Text(f"{result.num_dropped_prompts} prompts were over the length limit and were dropped."))
    if result.stopped:
        parts.append(
            Text(
                f"Stopped by {result.stopped} after step {result.steps} of {result.num_steps}. "
                f"Go on with: plait train --resume {result.run_dir}"
            )
        )
    parts.append(Text(f"Run: {result.run_dir}"))
    return Group(*parts)


def evaluation_rows(result: "TrainResult") -> list[tuple[str, str, str]]:
    """Rows (what, before, after); "-" where an evaluation was not made."""
    both = (result.before, result.after)

    def row(name: str, values: list[str | None]) -> tuple[str, str, str]:
        return name, values[0] or "-", values[1] or "-"

    rows = [row("accuracy (95 % interval)", [None if e is None else str(e) for e in both])]
    tasks = sorted({task for e in both if e is not None for task in e.accuracy_by_task})
    for task in tasks if len(tasks) > 1 else []:
        rows.append(row(f"accuracy, {task}", [None if e is None else f"{e.accuracy_by_task[task]:.1%}" for e in both]))
    rows.append(row("samples that reason", [None if e is None else f"{e.reasoning_share:.1%}" for e in both]))
    rows.append(row("mean length (tokens)", [None if e is None else f"{e.response_tokens_mean:.1f}" for e in both]))
    rows.append(row("cut at the limit", [None if e is None else f"{e.truncated_share:.1%}" for e in both]))
    return rows


def alarm_lines(alarms: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per alarm that was raised: when, what was found last, whether it is on still."""
    lines = []
    for entry in alarms:
        steps = entry["steps"]
        when = f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(map(str, steps))}"
        state = "on at the end" if entry["is_active"] else "cleared"
        lines.append(
            f"ALARM {entry['alarm']} ({when}; {state}): {entry['finding']}. Likely cause: {entry['cause']}. "
            f"Next: {entry['next_step']}."
        )
    return lines


def where_the_time_went(result: "TrainResult") -> str:
    """One line: total, the stages that took it, tokens per second, memory."""
    stages = sorted(result.seconds_per_stage.items(), key=lambda item: -item[1])
    shares = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in stages if seconds >= 0.5)
    rates = []
    for verb, tokens, stage in (
        ("sampled", result.tokens_generated, "generate"),
        ("trained", result.tokens_trained, "update_policy"),
    ):
        if stage in result.seconds_per_stage and result.seconds_per_stage[stage] > 0:
            rates.append(f"{verb} {tokens} tokens ({tokens / result.seconds_per_stage[stage]:.0f}/s)")
    memory = f"{result.peak_rss_bytes / 2**30:.2f} GiB at most in this process"
    return f"Time: {duration(result.seconds)} ({shares}); {'; '.join(rates)}; {memory}."
