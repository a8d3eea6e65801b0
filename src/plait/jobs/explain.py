"""`plait explain`: what every stage of a step costs under a plan, and why, before anything runs. Torch-free."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from plait.cost.cluster import Cluster
from plait.cost.estimate import estimate_stage
from plait.cost.fit import GIB, Change, changes, stage_memory, states_violation
from plait.cost.setting import ROLE_OF_STAGE, TRAINED, Setting
from plait.cost.stage_estimate import StageEstimate
from plait.cost.stage_times import Pieces
from plait.cost.step_totals import StepTotals, stage_least_s, step_totals
from plait.errors import Violation
from plait.jobs.explain_request import Request, read_request
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
    """notes: what was chosen and what is left out. violations: states that no device can hold."""

    setting: Setting
    algorithm: str
    cluster: Cluster
    stages: tuple[StageLine, ...]
    totals: StepTotals
    notes: tuple[str, ...]
    violations: tuple[Violation, ...]

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
    """Estimate every stage. Raises ConfigError with everything that is wrong with the request."""
    asked = read_request(request)
    setting, graph = asked.setting, asked.graph
    names = tuple(stage.name for stage in graph.stages)
    lines = tuple(_line(setting, stage, names) for stage in graph.stages)
    totals = step_totals(
        (line.estimate for line in lines), graph.predecessors, setting.pools,
        {name: setting.pool_of(name) for name in names}, setting.precision,
    )  # fmt: skip
    notes = [*(f"chosen: {text}" for text in asked.chosen), *_left_out(graph)]
    if not all(line.fits for line in lines):
        notes.append("times of stages that do not fit are those they would have if they did")
    return Explanation(
        setting, asked.algorithm, asked.cluster, lines, totals, tuple(notes), tuple(_violations(setting, lines))
    )


def _line(setting: Setting, stage: Stage, names: tuple[str, ...]) -> StageLine:
    name, cluster = stage.name, setting.cluster_of(stage.name)
    estimate = estimate_stage(setting, name, names, _pieces(setting, stage))
    memory = {term: float(size) for term, size in stage_memory(setting, name, names).items()}
    usable = setting.usable_bytes(name)
    layout = layout_words(setting.layout_of(name)) if name in ROLE_OF_STAGE and name != "sync_weights" else ""
    line = StageLine(
        estimate, setting.pool_of(name), layout, float(stage_least_s(estimate, cluster, setting.precision)),
        memory, usable, (),
    )  # fmt: skip
    if line.fits:
        return line
    return StageLine(estimate, line.pool, layout, line.least_s, memory, usable, tuple(changes(setting, name, names)))


def _pieces(setting: Setting, stage: Stage) -> Pieces:
    batch = setting.batch
    count = {
        "sample": batch.num_sequences,
        "group": batch.num_prompts,
        "minibatch": batch.num_updates,
        "step": 1,
    }[stage.granularity]
    return Pieces(stage.granularity, count)


def _left_out(graph: StepGraph) -> list[str]:
    """What an estimate says nothing about: later rounds of a stage, a trunk that two models share."""
    found = [
        f"{stage.name} is estimated for one round of up to {stage.repeat} ({stage.why})"
        for stage in graph.stages
        if stage.repeat > 1 and stage.kind == "generation"
    ]
    if any(stage.name == "value" and "policy" in stage.roles for stage in graph.stages):
        found.append("value is estimated as a pass of a critic of its own, and the policy and critic share a trunk")
    return found


def _violations(setting: Setting, lines: tuple[StageLine, ...]) -> list[Violation]:
    """Of stages that do not fit: states alone where they are too large, else all of it."""
    found: list[Violation] = []
    for line in lines:
        # Weights arrive where the engine runs: what makes that fit makes this fit.
        if line.fits or (line.estimate.name == "sync_weights" and found):
            continue
        name, cluster = line.estimate.name, setting.cluster_of(line.estimate.name)
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
            f"{name} needs {line.num_bytes / GIB:.1f} GiB per device, and {line.usable_bytes / GIB:.1f} can be used; "
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
