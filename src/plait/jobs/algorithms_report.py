"""The named algorithms as a person reads them."""

import json
from collections.abc import Sequence

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from plait.jobs.algorithms import GENERAL, Catalogue, Loop, Specification, StageSpec


def render_catalogue(catalogue: Catalogue) -> RenderableType:
    """One table, an algorithm per row; factors of one kind share a cell."""
    columns = ("name", "advantage", "policy loss", "KL to reference", "besides")
    table = Table(*columns, title="Named algorithms, by factors", title_justify="left", box=SIMPLE)
    for column in table.columns:
        column.overflow = "fold"
    for row in catalogue.rows:
        scale = [] if row["scale"] == "none" else [f"/ {row['scale']}"]
        returns = [] if row["returns"] in ("monte_carlo", "-") else [f"by {row['returns']}"]
        critic = [] if row["critic"] == "-" else [f"{row['critic']} critic"]
        besides = [] if row["besides"] == "-" else [row["besides"]]
        table.add_row(
            row["name"],
            "\n".join([row["baseline"], *scale, *returns]),
            "\n".join([f"{row['policy loss']} {row['clip low / high']}".removesuffix(" -"), row["reduction"]]),
            row["KL"],
            ", ".join([*critic, *besides]) or "-",
        )
    return Group(table, Text('One of them: plait algorithms NAME. In a recipe: [algorithm] name = "NAME".'))


def render_specification(spec: Specification) -> RenderableType:
    """The step as loops, forks and joins; then every setting with its source."""
    lines = [
        f"{spec.title}, {spec.paper}",
        spec.summary,
        "",
        "One step, from weights v to v+1. Prompts, samples, minibatches and epochs are the recipe's.",
        "Turns of a parallel loop do not wait for each other. [axes] may split a loop or a stage.",
        *_step(spec.stages),
        _next_step(spec),
        "",
        "[algorithm]",
        *_settings(spec),
    ]
    # Within a group, since a lone text loses that it must not be wrapped.
    return Group(Text("\n".join(lines), no_wrap=True, overflow="ignore"))


def _next_step(spec: Specification) -> str:
    if any(stage.name == "sync_weights" for stage in spec.stages):
        return "Next step: generate, with engine_weights@v+1."
    return f"Next step: {spec.stages[0].name}, with other pairs; update_policy goes on from policy_weights@v+1."


def _settings(spec: Specification) -> list[str]:
    """As a recipe writes them; those on which the algorithm's file is silent come last."""
    named = [(f"{s.key} = {json.dumps(s.value)}", s.source) for s in spec.settings if s.source != GENERAL]
    general = [f"{s.key} = {json.dumps(s.value)}" for s in spec.settings if s.source == GENERAL]
    width = max(len(text) for text, _ in named)
    return [
        *(f"  {text:{width}}  # {source}" for text, source in named),
        f"  # {GENERAL}s",
        *(f"  {t}" for t in general),
    ]


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
