"""A plan as `plait explain` reads it, from a line or a TOML file. Torch-free."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from plait.cost.cluster import Cluster
from plait.cost.composition.fusion import ORDER
from plait.cost.composition.step import Schedule, ScheduleKind
from plait.errors import ConfigError, Violation
from plait.parallel.degrees import Layout, nearest
from plait.parallel.layout_words import parse_layout_words
from plait.stages.graph import Granularity, StepGraph

_KINDS: dict[str, type] = {
    **dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "zero", "num_virtual"), int),
    "sp": bool,
}
_WORDS = {int: "a whole number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """pools: name -> devices, {} for one of the whole cluster. place: stage or role -> pool. layout: stage or role
    ("" for every one) -> fields of a layout. fuse: consumer -> the granularity at which it may start.
    """

    pools: Mapping[str, int]
    place: Mapping[str, str]
    layout: Mapping[str, Mapping[str, Any]]
    schedule: Schedule = field(default_factory=Schedule)
    fuse: Mapping[str, Granularity] = field(default_factory=dict)


def read_plan(text: str | None) -> WrittenPlan:
    """See `Request`. Raises ConfigError with everything that cannot be read."""
    if text is None:
        return WrittenPlan({}, {}, {})
    found: list[Violation] = []
    if text.endswith(".toml"):
        table = _plan_table(Path(text))
    else:
        pairs = [part.partition("=") for part in text.split(",")]
        table = {"layout": {name.strip() if sign else "": rest if sign else name for name, sign, rest in pairs}}
    for key in ("pools", "place", "layout", "fuse"):
        if not isinstance(table.get(key, {}), dict):
            found.append(Violation(f"plan.{key}", f"{key} is {table[key]!r}", f"Write a table [plan.{key}]"))
    if found:
        raise ConfigError(found)
    layouts: dict[str, dict[str, Any]] = {}
    for name, written in table.get("layout", {}).items():
        try:
            layouts[name] = _layout_fields(written)
        except ValueError as error:
            where = f"plan.layout.{name}" if name else "plan"
            found.append(
                Violation(where, str(error), 'Write for example "fsdp8tp4:sp" or "policy=fsdp8,generate=dp4tp2"')
            )
    for key in sorted(set(table) - {"pools", "place", "layout", "schedule", "fuse", "runtime", "wait_limit_s"}):
        found.append(Violation(f"plan.{key}", "unknown key", "Known: pools, place, layout, schedule, fuse"))
    pools, place = table.get("pools", {}), table.get("place", {})
    for name, count in pools.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            found.append(Violation(f"plan.pools.{name}", f"it is {count!r}", "Write a whole number of at least 1"))
    for name, pool in place.items():
        if not isinstance(pool, str):
            found.append(Violation(f"plan.place.{name}", f"it is {pool!r}", "Write the name of a pool"))
    for name, piece in table.get("fuse", {}).items():
        if piece not in ORDER:
            found.append(Violation(f"plan.fuse.{name}", f"it is {piece!r}", f"Known: {', '.join(ORDER)}"))
    schedule = _schedule(table.get("schedule", "sync"), found)
    if found:
        raise ConfigError(found)
    return WrittenPlan(pools, place, layouts, schedule, table.get("fuse", {}))


def _schedule(written: Any, found: list[Violation]) -> Schedule:
    """A kind, or a table of kind and max_staleness."""
    table = written if isinstance(written, dict) else {"kind": written}
    kinds, kind = get_args(ScheduleKind), table.get("kind", "sync")
    before = len(found)
    for key in sorted(set(table) - {"kind", "max_staleness"}):
        found.append(Violation(f"plan.schedule.{key}", "unknown key", "Known: kind, max_staleness"))
    if kind not in kinds:
        found.append(Violation("plan.schedule", f"the schedule is {kind!r}", f"Known: {', '.join(kinds)}"))
    fixed = {"sync": 0, "one_step_off_policy": 1}.get(str(kind))
    bound = table.get("max_staleness", 1 if fixed is None else fixed)
    if not isinstance(bound, int) or isinstance(bound, bool) or bound < 0:
        rule = f"max_staleness is {bound!r}, a number of policy versions"
        found.append(Violation("plan.schedule.max_staleness", rule, "Write a whole number of at least 0"))
    elif fixed not in (None, bound):
        rule = f"{kind} has max_staleness {fixed}, not {bound}"
        found.append(Violation("plan.schedule.max_staleness", rule, 'Leave it out, or write kind = "fully_async"'))
    return Schedule(kind, bound) if len(found) == before else Schedule()


def _plan_table(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError([Violation("plan", f'"{path}" cannot be read: {error}', "Name a TOML file")]) from error
    except ValueError as error:
        raise ConfigError([Violation("plan", f'"{path}" is not TOML: {error}', "Correct it")]) from error
    # A recipe keeps its plan under [plan]; a file of a plan alone need not.
    plan = table.get("plan", table)
    if not isinstance(plan, dict):
        raise ConfigError([Violation("plan", f"plan is {plan!r}", "Write a table [plan]")])
    return plan


def _layout_fields(written: Any) -> dict[str, Any]:
    if isinstance(written, str):
        return parse_layout_words(written)
    if not isinstance(written, dict):
        raise ValueError(f"cannot read layout {written!r}: expected text or a table")
    known = {"degrees", *Layout.__dataclass_fields__}
    if unknown := sorted(set(written) - known):
        raise ValueError(f"unknown {', '.join(unknown)} in a layout: expected {', '.join(sorted(known))}")
    rest = {key: value for key, value in written.items() if key != "degrees"}
    for key, value in rest.items():
        kind = _KINDS.get(key, str)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ValueError(f"{key} is {value!r} in a layout: expected {_WORDS[kind]}")
    degrees = written.get("degrees", "")
    if not isinstance(degrees, str):
        raise ValueError(f'degrees is {degrees!r} in a layout: expected text such as "fsdp8tp4"')
    return parse_layout_words(degrees) | rest


def plan_pools(
    plan: WrittenPlan, cluster: Cluster, graph: StepGraph, found: list[Violation]
) -> tuple[dict[str, Cluster], dict[str, str]]:
    """(pool -> its devices, stage or role -> pool). Adds what is wrong to `found`."""
    if not plan.pools:
        pools = {"main": cluster}
    else:
        pools = {}
        each, total = cluster.devices_per_node, sum(plan.pools.values())
        if total > cluster.num_devices:
            rule = f"the pools have {total} devices, and {cluster.name} has {cluster.num_devices}"
            found.append(Violation("plan.pools", rule, "Take devices from a pool, or name a larger cluster"))
        for name, count in plan.pools.items():
            if count > each and count % each:
                options = [each * k for k in range(1, cluster.num_nodes + 1)]
                rule = f"pool {name} has {count} devices, neither inside a node of {each} nor whole nodes"
                found.append(Violation(f"plan.pools.{name}", rule, f"Set it to {nearest(options, count)}"))
            nodes = max(1, count // each)
            pools[name] = replace(cluster, name=name, num_nodes=nodes, devices_per_node=max(count // nodes, 1))
    for name, pool in plan.place.items():
        if pool not in pools:
            found.append(Violation(f"plan.place.{name}", f'there is no pool "{pool}"', f"Pools: {', '.join(pools)}"))
        found += unknown_name(f"plan.place.{name}", name, graph)
    return pools, {name: pool for name, pool in plan.place.items() if pool in pools}


def unknown_name(where: str, name: str, graph: StepGraph) -> Iterator[Violation]:
    """A name that is neither a stage nor a role."""
    known = {stage.name for stage in graph.stages} | {role for stage in graph.stages for role in stage.roles}
    if name not in known:
        rule = "it names neither a stage nor a role of this algorithm"
        yield Violation(where, rule, f"Known: {', '.join(sorted(known))}")
