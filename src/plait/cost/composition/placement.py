"""Which pools a stage runs on, in which order a pool serves its stages, and what that is called. Torch-free.

A pool serves one stage at a time. Stages on one pool take turns; those on different pools run side by side; a stage on
several pools needs all of them at once. Stages of kind host run beside the devices, on a pool of processor cores.
"""

from collections.abc import Mapping
from typing import Any, Literal

from plait.stages.graph import Stage, StepGraph

HOST = "host"
"""The pool of host stages that are not placed."""

Kind = Literal["colocated", "hybrid", "partly_colocated", "disaggregated"]


def pools_of(graph: StepGraph, place: Mapping[str, str | tuple[str, ...]], first: str) -> dict[str, tuple[str, ...]]:
    """Every stage's pools. place: stage or role -> pool or pools; stage wins; what is not named goes to `first`."""

    def of(stage: Stage) -> tuple[str, ...]:
        for name in (stage.name, *stage.roles):
            if name in place:
                pools = place[name]
                return (pools,) if isinstance(pools, str) else pools
        return (HOST,) if stage.kind == "host" else (first,)

    return {stage.name: of(stage) for stage in graph.stages}


def placement_kind(
    graph: StepGraph, pools: Mapping[str, tuple[str, ...]], layouts: Mapping[str, Any] | None = None
) -> Kind:
    """What the field calls it: derived from where stages with a model run, never declared.

    colocated: all take turns on the same devices; hybrid: also, but under different layouts, with weights resharded
    between. disaggregated: no stage that generates shares a device with one that trains. Else partly_colocated.
    """
    stages = [stage for stage in graph.stages if stage.kind in ("generation", "inference", "training")]
    if len({frozenset(pools[stage.name]) for stage in stages}) == 1:
        return "hybrid" if layouts and len({layouts[stage.name] for stage in stages}) > 1 else "colocated"
    used = {
        kind: {pool for stage in stages if stage.kind == kind for pool in pools[stage.name]}
        for kind in ("generation", "training")
    }
    return "partly_colocated" if used["generation"] & used["training"] else "disaggregated"


Run = tuple[int, str]
"""One run of one stage: (step from 1, stage)."""


def served_stages(
    graph: StepGraph, pools: Mapping[str, tuple[str, ...]], pool: str, max_staleness: int = 0
) -> list[Stage]:
    """The stages that hold a pool while they run, in the graph's order.

    With staleness, an engine that does not share its devices with training takes new weights into a shadow copy while
    it generates: a transfer to it does not hold its pool.
    """
    here = [stage for stage in graph.stages if pool in pools[stage.name]]
    kinds = {stage.kind for stage in here}
    if max_staleness > 0 and "generation" in kinds and "training" not in kinds:
        return [stage for stage in here if stage.kind != "transfer"]
    return here


def pool_orders(
    graph: StepGraph, pools: Mapping[str, tuple[str, ...]], num_steps: int, max_staleness: int
) -> dict[str, list[Run]]:
    """The order in which each pool serves the runs of num_steps steps: step by step, in the graph's order."""
    names = dict.fromkeys(pool for used in pools.values() for pool in used)
    return {
        pool: [
            (step, stage.name)
            for step in range(1, num_steps + 1)
            for stage in served_stages(graph, pools, pool, max_staleness)
        ]
        for pool in names
    }
