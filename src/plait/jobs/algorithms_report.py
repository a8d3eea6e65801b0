"""The named algorithms as a person reads them."""

import json
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.jobs.algorithms import GENERAL, Catalogue, Loop, Specification, StageSpec


def render_catalogue(catalogue: Catalogue) -> RenderableType:
    """One table, an algorithm per row; factors of one kind share a cell."""
    columns = ("name", "advantage", "policy loss", "KL", "critic", "besides")
    table = Table(*columns, title="Named algorithms, by factors", title_justify="left", show_lines=True)
    table.columns[0].no_wrap = True
    for row in catalogue.rows:
        advantage = f"{row['baseline']}\nscale {row['scale']}\n{row['returns']}"
        loss = f"{row['policy loss']}\nclip {row['clip low / high']}\n{row['reduction']}"
        table.add_row(row["name"], advantage, loss, row["KL"], row["critic"], row["besides"])
    return Group(table, Text('One of them: plait algorithms NAME. In a recipe: [algorithm] name = "NAME".'))


def render_specification(spec: Specification) -> RenderableType:
    """The step as loops, forks and joins; then every setting with its source."""
    settings = Table("setting", "value", "source", title="Settings of [algorithm]", title_justify="left")
    settings.columns[0].no_wrap = settings.columns[1].no_wrap = True
    for setting in sorted(spec.settings, key=lambda setting: setting.source == GENERAL):
        style = "dim" if setting.source == GENERAL else ""
        settings.add_row(setting.key, json.dumps(setting.value), setting.source, style=style)
    lines = [
        f"{spec.title}, {spec.paper}",
        spec.summary,
        "",
        "One step, from weights v to v+1. Prompts, samples, minibatches and epochs are the recipe's.",
        "Loops marked parallel have independent turns; [axes] may split a loop or a stage.",
        *_step(spec.stages),
        "Next step: generate, with engine_weights@v+1.",
        "",
    ]
    return Group(Text("\n".join(lines)), settings)


def _step(stages: Sequence[StageSpec]) -> list[str]:
    lines = []
    for level in sorted({stage.level for stage in stages}):
        siblings = [stage for stage in stages if stage.level == level]
        if len(siblings) == 1:
            lines += _stage(siblings[0], "  ")
            continue
        lines.append(f"  fork: {len(siblings)} parallel siblings")
        for stage in siblings:
            lines += _stage(stage, "  | ")
        lines.append("  join")
    return lines


def _stage(stage: StageSpec, indent: str) -> list[str]:
    lines = []
    for loop in stage.loops:
        lines.append(f"{indent}{_loop(loop)}")
        indent += "  "
    roles = f" by {' and '.join(stage.roles)}" if stage.roles else ""
    why = f": {stage.why}" if stage.why else ""
    after = f", after {', '.join(stage.after)}" if stage.after else ""
    lines.append(f"{indent}{stage.name}{roles} ({stage.kind}){_axes(stage.axes)}{after}")
    lines.append(f"{indent}  hands on per {stage.granularity}{why}")
    return lines


def _loop(loop: Loop) -> str:
    return f"{'parallel for' if loop.is_parallel else 'for'} {loop.over}{_axes(loop.axes)}:"


def _axes(axes: Sequence[str]) -> str:
    return f" [{', '.join(axes)}]" if axes else ""
