"""The plan: who computes what, where, how it is split and in what order.

One value read by four interpreters (estimate, simulate, search, execute). This release executes plans of one
process; a plan that asks for more is refused here, with the reason, before anything starts.
"""

from dataclasses import asdict, dataclass
from typing import Any

from plait.config import LayoutConfig, RunConfig
from plait.errors import Violation
from plait.parallel.degrees import Layout
from plait.stages.graph import StepGraph


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the rollout engine is given: places, tokens per place (prompt plus completion), and what it records."""

    num_slots: int
    max_sequence_tokens: int
    record_experts: bool = False


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Every count of a step, derived once. All counts are over all processes."""

    num_prompts_per_step: int
    num_samples_per_prompt: int
    num_samples_per_step: int
    num_sequences_per_minibatch: int
    num_updates_per_step: int
    num_tokens_per_microbatch: int

    @classmethod
    def from_config(cls, config: RunConfig) -> "BatchCounts":
        batch = config.batch
        samples = batch.num_prompts_per_step * batch.num_samples_per_prompt
        minibatch = batch.num_sequences_per_minibatch or samples
        return cls(
            num_prompts_per_step=batch.num_prompts_per_step,
            num_samples_per_prompt=batch.num_samples_per_prompt,
            num_samples_per_step=samples,
            num_sequences_per_minibatch=minibatch,
            num_updates_per_step=samples // minibatch * batch.num_epochs_per_step,
            num_tokens_per_microbatch=batch.num_tokens_per_microbatch,
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement, layouts, schedule, engine and batch of a run.

    pools: devices per pool. place: stage or role -> pool (what is not named goes to the first pool).
    layout: stage or role -> Layout (stage wins over role; what is not named is one device).
    """

    pools: dict[str, int]
    place: dict[str, str]
    layout: dict[str, Layout]
    schedule: str
    engine: EngineSettings
    batch: BatchCounts

    @classmethod
    def from_config(cls, config: RunConfig) -> "Plan":
        return cls(
            pools=dict(config.plan.pools),
            place=dict(config.plan.place),
            layout={name: parse_layout(written) for name, written in config.plan.layout.items()},
            schedule=config.plan.schedule,
            engine=EngineSettings(
                num_slots=config.rollout.num_slots,
                max_sequence_tokens=config.rollout.max_prompt_tokens
                + max(config.rollout.max_completion_tokens, config.evaluation.max_completion_tokens),
                record_experts=config.rollout.record_experts,
            ),
            batch=BatchCounts.from_config(config),
        )

    def pool_of(self, stage: str, roles: tuple[str, ...]) -> str:
        """The pool that runs a stage: by stage, else by its first placed role, else the first pool."""
        for name in (stage, *roles):
            if name in self.place:
                return self.place[name]
        return next(iter(self.pools))

    def layout_of(self, stage: str, roles: tuple[str, ...]) -> Layout:
        for name in (stage, *roles):
            if name in self.layout:
                return self.layout[name]
        return Layout()

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["layout"] = {
            name: {"degrees": str(layout), "recompute": layout.recompute, **layout.settings()}
            for name, layout in self.layout.items()
        }
        return data


def parse_layout(written: str | LayoutConfig) -> Layout:
    """A layout as a recipe writes it. Raises ValueError."""
    if isinstance(written, str):
        return Layout.parse(written)
    return Layout.parse(written.degrees).with_recompute(written.recompute)


def plan_violations(config: RunConfig, graph: StepGraph) -> list[Violation]:
    """Every rule that the recipe's plan breaks against its StepGraph, at once."""
    known = {stage.name for stage in graph.stages} | {role for stage in graph.stages for role in stage.roles}
    found: list[Violation] = []
    total = sum(config.plan.pools.values())
    if total != 1 or len(config.plan.pools) != 1:
        found.append(
            Violation(
                "plan.pools",
                f"the plan asks for {total} devices in {len(config.plan.pools)} pools, "
                "and this release runs one process with one device",
                "Leave [plan] out, or set plan.pools = { main = 1 }",
            )
        )
    for name, pool in config.plan.place.items():
        if name not in known:
            found.append(_unknown_name("plan.place", name, known))
        if pool not in config.plan.pools:
            pools = ", ".join(sorted(config.plan.pools))
            found.append(Violation(f"plan.place.{name}", f'there is no pool "{pool}"', f"Pools: {pools}"))
    for name, written in config.plan.layout.items():
        if name not in known:
            found.append(_unknown_name("plan.layout", name, known))
        try:
            layout = parse_layout(written)
        except ValueError as error:
            found.append(Violation(f"plan.layout.{name}", str(error), 'Write for example "fsdp4tp2"'))
            continue
        if layout.world_size != 1:
            found.append(
                Violation(
                    f"plan.layout.{name}",
                    f'"{layout}" needs {layout.world_size} devices, and this release runs one process',
                    "Leave the layout out",
                )
            )
    return found


def _unknown_name(where: str, name: str, known: set[str]) -> Violation:
    return Violation(
        f"{where}.{name}",
        "it names neither a stage nor a role of this algorithm",
        f"Known: {', '.join(sorted(known))}",
    )
