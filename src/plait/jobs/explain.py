"""`plait explain`: what every stage of a step costs under a plan, and why, before anything runs. Torch-free."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from plait.cost.composition.step import StepEstimate
from plait.cost.fit import GIB, Change, changes, stage_memory, states_violation
from plait.cost.setting import ROLE_OF_STAGE, TRAINED, Setting, costed_as
from plait.cost.stage_estimate import StageEstimate
from plait.errors import Violation
from plait.jobs.explain_request import Asked, Request, read_request
from plait.jobs.explain_step import (
    coarser_pieces,
    composed,
    placement,
    pool_rates,
    stage_estimate,
    stage_least_s,
)
from plait.parallel.layout_words import layout_words
from plait.stages.graph import Stage, StepGraph

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class StageLine:
    """One stage: its estimate, where and how it runs, and what no schedule of it beats.

    memory: bytes per device by term while it runs, other models' included; usable_bytes: what a device has for them.
    changes: what would make it fit, if it does not.
    """

    estimate: StageEstimate
    pool: str
    layout: str
    least_s: float
    memory: Mapping[str, float]
    usable_bytes: float
    changes: tuple[Change, ...]

    @property
    def num_bytes(self) -> float:
        """Per device."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether a device has room."""
        return self.num_bytes <= self.usable_bytes


@dataclass(frozen=True, slots=True)
class Explanation:
    """step: the stages as the plan arranges them. notes: what was chosen or left out. violations: of memory."""

    asked: Asked
    stages: tuple[StageLine, ...]
    step: StepEstimate
    notes: tuple[str, ...]
    violations: tuple[Violation, ...]

    @property
    def setting(self) -> Setting:
        """Models, pools, layouts, batch."""
        return self.asked.setting

    @property
    def placement(self) -> str:
        """What the field calls it."""
        return placement(self.asked.setting, self.asked.graph)

    @property
    def fits(self) -> bool:
        """Whether every stage has room."""
        return all(line.fits for line in self.stages)

    @property
    def peak(self) -> StageLine:
        """The stage that needs most of a device."""
        return max(self.stages, key=lambda line: line.num_bytes / max(line.usable_bytes, 1))

    def to_dict(self) -> dict[str, Any]:
        """As JSON: model, cluster, batch, stages, memory, totals, notes, violations."""
        from plait.jobs.explain_json import to_dict

        return to_dict(self)

    def render(self) -> "RenderableType":
        """As a person reads it, in 100 columns."""
        from plait.jobs.explain_report import render

        return render(self)


def explain(request: Request) -> Explanation:
    """Estimate every stage, and the step that the plan makes of them. Raises ConfigError with everything that is wrong
    with the request.
    """
    asked = read_request(request)
    setting, graph = asked.setting, asked.graph
    names = tuple(stage.name for stage in graph.stages)
    lines = tuple(_line(setting, stage, names) for stage in graph.stages)
    step = composed(asked, {line.estimate.name: line.estimate for line in lines})
    notes = [*(f"chosen: {text}" for text in asked.chosen), *coarser_pieces(graph, asked.fuse), *_left_out(graph)]
    if not all(line.fits for line in lines):
        notes.append("times of stages that do not fit are those they would have if they did")
    return Explanation(asked, lines, step, tuple(notes), tuple(_violations(asked, lines)))


def _line(setting: Setting, stage: Stage, names: tuple[str, ...]) -> StageLine:
    name, how = stage.name, costed_as(stage)
    estimate, cluster = stage_estimate(setting, stage, names), setting.cluster_of(how)
    memory = {term: float(size) for term, size in stage_memory(setting, how, names).items()}
    layout = layout_words(setting.layout_of(how)) if name in ROLE_OF_STAGE and name != "sync_weights" else ""
    line = StageLine(
        estimate, setting.pool_of(how), layout, stage_least_s(estimate, pool_rates(cluster, setting.precision)),
        memory, setting.usable_bytes(how), (),
    )  # fmt: skip
    return line if line.fits else replace(line, changes=tuple(changes(setting, how, names)))


def _left_out(graph: StepGraph) -> list[str]:
    """What an estimate says nothing about: later rounds of a stage."""
    return [
        f"{stage.name} is estimated for one round of up to {stage.repeat} ({stage.why})"
        for stage in graph.stages
        if stage.repeat > 1 and stage.kind == "generation"
    ]


def _violations(asked: Asked, lines: tuple[StageLine, ...]) -> list[Violation]:
    """Of stages that do not fit: states alone where they are too large, else all of it."""
    found: list[Violation] = []
    setting = asked.setting
    for line in lines:
        # Weights arrive where the engine runs: what makes that fit makes this fit.
        if line.fits or (line.estimate.name == "sync_weights" and found):
            continue
        name, cluster = line.estimate.name, setting.pools[line.pool]
        role = ROLE_OF_STAGE[name]
        if role in TRAINED and name.startswith("update"):
            alone = states_violation(
                name,
                float(setting.models[role].num_parameters),
                setting.training,
                cluster.num_devices,
                cluster.device.memory_bytes,
            )
            if alone is not None:
                found.append(alone)
                continue
        largest = max(line.memory, key=lambda term: line.memory[term])
        rule = (
            f"needs {line.num_bytes / GIB:.1f} GiB per device, and {line.usable_bytes / GIB:.1f} can be used; "
            f"the largest part is {largest.replace('_', ' ')}, {line.memory[largest] / GIB:.1f} GiB"
        )
        found.append(Violation(f"memory.{name}", rule, _remedy(line)))
    return found


def _remedy(line: StageLine) -> str:
    fitting = [change for change in line.changes if change.fits]
    if not fitting:
        return f"Nothing that was tried fits; least: {said(line.changes[0])}" if line.changes else "Use more devices"
    return "Any of: " + "; or ".join(said(change) for change in fitting)


def said(change: Change) -> str:
    """A change with what it comes to."""
    return f"{change.what} ({change.num_bytes / GIB:.1f} GiB on {_devices(change.num_devices)})"


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"


def batch_dict(setting: Setting) -> dict[str, Any]:
    """The batch in numbers."""
    batch = setting.batch
    return {
        "prompts": batch.num_prompts,
        "samples_per_prompt": batch.num_samples_per_prompt,
        "prompt_tokens": batch.prompt_tokens,
        "mean_response_tokens": batch.lengths.mean,
        "max_response_tokens": batch.lengths.cap,
        "expected_longest_response": batch.lengths.expected_max(batch.num_sequences),
        "microbatch_tokens": batch.num_tokens_per_microbatch,
        "updates": batch.num_updates,
    }


def parameters_dict(setting: Setting) -> dict[str, Any]:
    """The policy's parameters by part."""
    spec = setting.models["policy"]
    return {
        "name": spec.name,
        "parameters": int(spec.num_parameters),
        "active_parameters": int(spec.num_active_parameters),
        "parts": {part: int(count) for part, count in asdict(spec.parameters).items()},
        "layers": int(spec.num_layers),
        "positions": int(spec.max_positions),
    }
