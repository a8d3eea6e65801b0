"""A plan as `plait explain` reads it: pools, placement and layouts, from a line or a TOML file. Torch-free."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.cost.cluster import Cluster
from plait.errors import ConfigError, Violation
from plait.parallel.degrees import Layout, nearest
from plait.parallel.layout_words import parse_layout_words
from plait.stages.graph import StepGraph

_KINDS: dict[str, type] = {
    **dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "zero", "num_virtual"), int),
    "sp": bool,
}
_WORDS = {int: "a whole number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """pools: name -> devices, {} for one of the whole cluster. place: stage or role -> pool. layout: stage or role
    ("" for every one) -> fields of a layout.
    """

    pools: Mapping[str, int]
    place: Mapping[str, str]
    layout: Mapping[str, Mapping[str, Any]]


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
    for key in ("pools", "place", "layout"):
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
    for key in sorted(set(table) - {"pools", "place", "layout", "schedule", "fuse"}):
        found.append(Violation(f"plan.{key}", "unknown key", "Known: pools, place, layout"))
    pools, place = table.get("pools", {}), table.get("place", {})
    for name, count in pools.items():
        if not isinstance(count, int) or count < 1:
            found.append(Violation(f"plan.pools.{name}", f"it is {count!r}", "Write a whole number of at least 1"))
    for name, pool in place.items():
        if not isinstance(pool, str):
            found.append(Violation(f"plan.place.{name}", f"it is {pool!r}", "Write the name of a pool"))
    if found:
        raise ConfigError(found)
    return WrittenPlan(pools, place, layouts)


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
