"""The plan: who computes what, where, how it is split and in what order.

One value read by four interpreters (estimate, simulate, search, execute). This release executes plans of one pool, in
this process or over the ranks of a layout; a plan that asks for more is refused here, before anything starts.
"""

from dataclasses import asdict, dataclass
from typing import Any

from plait.config import LayoutConfig, PlanConfig, RunConfig
from plait.errors import ConfigError, Violation
from plait.parallel.degrees import Layout, parse_degrees
from plait.parallel.layout_rules import layout_violations
from plait.parallel.layout_words import parse_layout_words
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
    layout: stage or role -> Layout (stage wins over role; what is not named has the policy's).
    is_on_ray: ranks are actors on Ray; else the one rank is this process.
    """

    pools: dict[str, int]
    place: dict[str, str]
    layout: dict[str, Layout]
    schedule: str
    is_on_ray: bool
    engine: EngineSettings
    batch: BatchCounts

    @classmethod
    def from_config(cls, config: RunConfig) -> "Plan":
        return cls(
            pools=dict(config.plan.pools),
            place=dict(config.plan.place),
            layout={name: parse_layout(written) for name, written in config.plan.layout.items()},
            schedule=config.plan.schedule,
            is_on_ray=is_on_ray(config.plan),
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
        """Of a stage, else of its first role that has one, else the policy's."""
        for name in (stage, *roles, "policy"):
            if name in self.layout:
                return self.layout[name]
        return Layout()

    @property
    def num_ranks(self) -> int:
        """Processes that hold the models."""
        return sum(self.pools.values())

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["layout"] = {
            name: {"degrees": str(layout), "recompute": layout.recompute, **layout.settings()}
            for name, layout in self.layout.items()
        }
        return data


def plan_overrides(text: str) -> list[str]:
    """What `--plan` is short for: "fsdp2tp2:sp" for every role, or "policy=fsdp4,reference=tp4". Raises ConfigError."""
    pairs = [part.partition("=") for part in text.split(",")]
    layouts = {name.strip() if sign else "policy": words.strip() if sign else name for name, sign, words in pairs}
    try:
        sizes = {name: Layout(**parse_layout_words(words)).world_size for name, words in layouts.items()}
    except ValueError as error:
        raise ConfigError(f"--plan {text}: {error}") from error
    return [f"plan.pools.main={max(sizes.values())}", *(f'plan.layout.{n}="{words}"' for n, words in layouts.items())]


def is_on_ray(plan: PlanConfig) -> bool:
    """Whether the ranks of a plan are actors on Ray."""
    return plan.runtime == "ray" or (plan.runtime == "auto" and sum(plan.pools.values()) > 1)


def layout_fields(written: str | LayoutConfig) -> dict[str, Any]:
    """The fields of a layout as a recipe writes it, not yet checked against each other. Raises ValueError."""
    if isinstance(written, str):
        return parse_layout_words(written)
    return written.model_dump(exclude={"degrees"}, exclude_unset=True) | parse_degrees(written.degrees)


def parse_layout(written: str | LayoutConfig) -> Layout:
    """A layout as a recipe writes it. Raises ValueError."""
    return Layout(**layout_fields(written))


def plan_violations(config: RunConfig, graph: StepGraph) -> list[Violation]:
    """Every rule that the recipe's plan breaks against its StepGraph, at once."""
    plan = config.plan
    known = {stage.name for stage in graph.stages} | {role for stage in graph.stages for role in stage.roles}
    found: list[Violation] = []
    if len(plan.pools) != 1:
        rule = f"there are {len(plan.pools)} pools, and this release runs every role on one, in turns"
        found.append(Violation("plan.pools", rule, "Write one, for example plan.pools = { main = 4 }"))
    for name, pool in plan.place.items():
        if name not in known:
            found.append(_unknown_name("plan.place", name, known))
        if pool not in plan.pools:
            pools = ", ".join(sorted(plan.pools))
            found.append(Violation(f"plan.place.{name}", f'there is no pool "{pool}"', f"Pools: {pools}"))
    num_ranks = sum(plan.pools.values())
    for name, written in plan.layout.items():
        if name not in known:
            found.append(_unknown_name("plan.layout", name, known))
        try:
            fields = layout_fields(written)
        except ValueError as error:
            found.append(Violation(f"plan.layout.{name}", str(error), 'Write for example "fsdp4tp2"'))
            continue
        found += [
            Violation(f"plan.layout.{name}", broken.rule, broken.change)
            for broken in layout_violations(fields, num_devices=num_ranks)
        ]
    if num_ranks > 1 and "policy" not in plan.layout:
        rule = f"the pool has {num_ranks} devices, and no layout says how the policy is split over them"
        found.append(Violation("plan.layout", rule, f'Write plan.layout = {{ policy = "fsdp{num_ranks}" }}'))
    if plan.runtime == "inline" and num_ranks > 1:
        rule = f"one process cannot be {num_ranks} devices"
        found.append(Violation("plan.runtime", rule, 'Set it to "ray", or leave it out'))
    return found


def _unknown_name(where: str, name: str, known: set[str]) -> Violation:
    return Violation(
        f"{where}.{name}",
        "it names neither a stage nor a role of this algorithm",
        f"Known: {', '.join(sorted(known))}",
    )
