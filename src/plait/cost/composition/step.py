"""A whole step, or N of them, from the estimates of its stages: work, depth, rounds, time, memory, bounds. Torch-free.

Work adds up over stages. Depth and rounds are those of the longest chain of the StepGraph, whatever the placement: side
by side or in turns changes time, not dependencies. Time follows placement, fusion and schedule (`timeline`). The same
code takes floats, arrays (many plans that differ in numbers, not in structure) and symbols.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from plait.cost.arithmetic import Number, maximum
from plait.cost.composition.bounds import (
    DEPENDENT_OP_S,
    Bounds,
    Demand,
    PoolRates,
    average_parallelism,
    brent_op,
    brent_s,
    pool_least_s,
)
from plait.cost.composition.flow import largest
from plait.cost.composition.fusion import ONE_PIECE, PieceCounts
from plait.cost.composition.placement import Run, served_stages
from plait.cost.composition.pool_memory import Held, pool_memory, state_names
from plait.cost.composition.timeline import Span, StageTime, timeline
from plait.cost.stage_estimate import StageEstimate
from plait.stages.graph import Granularity, StepGraph

ScheduleKind = Literal["sync", "one_step_off_policy", "fully_async"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """sync: max_staleness 0. one_step_off_policy: 1. fully_async: any; 0 is synchronous."""

    kind: ScheduleKind = "sync"
    max_staleness: int = 0

    def __post_init__(self) -> None:
        assert self.max_staleness >= 0, "staleness is counted in policy versions"
        fixed = {"sync": 0, "one_step_off_policy": 1}
        assert self.max_staleness == fixed.get(self.kind, self.max_staleness), f"{self.kind} has a fixed staleness"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """Where stages run and when they may start. pools: stage -> pools (`placement.pools_of`), every stage named.

    fuse: consumer -> granularity at which it may start. pieces: of a step. layouts: stage -> layout, to tell which
    stages share a copy of the weights. offloaded: states (`pool_memory.state_names`) that leave the devices between
    uses.
    """

    pools: Mapping[str, tuple[str, ...]]
    fuse: Mapping[str, Granularity] = field(default_factory=dict)
    pieces: PieceCounts = ONE_PIECE
    schedule: Schedule = Schedule()
    layouts: Mapping[str, object] | None = None
    offloaded: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PoolEstimate:
    """busy_s: of all steps. idle_share: of the time of all steps. held: memory of each device, stage by stage."""

    busy_s: Number
    idle_share: Number
    held: tuple[Held, ...]

    @property
    def peak_bytes(self) -> Number:
        """The most that a device of the pool holds at any time."""
        return largest(moment.total_bytes for moment in self.held)


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """num_steps steps together. least_s: what no schedule beats on these pools, None without rates.

    brent_op: on the operations that all devices have in flight (rate x latency); brent_s: the same in seconds.
    """

    num_steps: int
    work_op: Number
    depth_op: Number
    num_rounds: Number
    time_s: Number
    low_s: Number
    high_s: Number
    spans: Mapping[Run, Span]
    pools: Mapping[str, PoolEstimate]
    parallelism: Number
    brent_op: Bounds | None
    brent_s: Bounds | None
    least_s: Number | None

    @property
    def step_s(self) -> Number:
        """On average."""
        return self.time_s / self.num_steps


def compose(
    graph: StepGraph,
    estimates: Mapping[str, StageEstimate],
    arrangement: Arrangement,
    *,
    rates: Mapping[str, PoolRates] | None = None,
    dependent_op_s: Number = DEPENDENT_OP_S,
    num_steps: int = 1,
) -> StepEstimate:
    """num_steps steps of a graph whose stages are estimated, arranged on pools.

    rates: pool -> peak rates of its devices, for the bounds; pools without rates (processor cores) bound nothing.
    dependent_op_s: the stated latency of one dependent operation.
    """
    staleness = arrangement.schedule.max_staleness
    passes = {stage.name: _num_passes(estimates[stage.name], arrangement.pieces) for stage in graph.stages}

    def ends(seconds: Mapping[str, Number]) -> tuple[Mapping[Run, Span], Number]:
        spans = timeline(
            graph,
            {name: StageTime(seconds[name], passes[name]) for name in passes},
            arrangement.pools,
            fuse=arrangement.fuse,
            pieces=arrangement.pieces,
            max_staleness=staleness,
            num_steps=num_steps,
        )
        return spans, last_end(graph, spans)

    names = list(passes)
    spans, time_s = ends({name: estimates[name].time_s for name in names})
    work = num_steps * sum((estimates[name].work_op for name in names), start=0)
    depth = longest_chain(graph, {n: estimates[n].depth_op for n in names}, num_steps, staleness)
    total_rate = sum((pool.num_devices * pool.flop_per_s for pool in (rates or {}).values()), start=0)
    least = _least_s(graph, estimates, arrangement, rates or {})
    return StepEstimate(
        num_steps=num_steps,
        work_op=work,
        depth_op=depth,
        num_rounds=longest_chain(graph, {n: estimates[n].num_rounds for n in names}, num_steps, staleness),
        time_s=time_s,
        low_s=ends({name: estimates[name].low_s for name in names})[1],
        high_s=ends({name: estimates[name].high_s for name in names})[1],
        spans=spans,
        pools=_pools(graph, estimates, arrangement, time_s, num_steps),
        parallelism=average_parallelism(work, depth),
        brent_op=brent_op(work, depth, total_rate * dependent_op_s) if rates else None,
        brent_s=brent_s(work, depth, total_rate, dependent_op_s) if rates else None,
        least_s=maximum(num_steps * least, depth * dependent_op_s) if rates else None,
    )


def longest_chain(
    graph: StepGraph, lengths: Mapping[str, Number], num_steps: int = 1, max_staleness: int = 0
) -> Number:
    """The longest path through the stages of num_steps steps, as if every stage had devices of its own.

    Siblings count by the longer one (fork and join). Fusion does not shorten it: the last sample still passes every
    stage (arXiv 2608.27046, table 9, writes max(D_G, D_A), which is what streaming tends to in time, not a chain).
    """
    alone = {stage.name: (stage.name,) for stage in graph.stages}
    times = {name: StageTime(length) for name, length in lengths.items()}
    return last_end(graph, timeline(graph, times, alone, max_staleness=max_staleness, num_steps=num_steps))


def last_end(graph: StepGraph, spans: Mapping[Run, Span]) -> Number:
    """When everything has ended: the stages that no other waits for in their step."""
    waited = frozenset().union(*graph.predecessors.values())
    return largest(span.end_s for (_, name), span in spans.items() if name not in waited)


def _num_passes(estimate: StageEstimate, pieces: PieceCounts) -> float:
    """Over the step's samples. An array of plans must agree on it: it decides what can stream."""
    ratio = estimate.num_pieces / pieces.of(estimate.granularity)  # type: ignore[arg-type]
    values = np.unique(ratio) if isinstance(ratio, np.ndarray) else [ratio]
    assert len(values) == 1, "plans with different numbers of epochs are composed apart"
    return values[0]


def _pools(
    graph: StepGraph, estimates: Mapping[str, StageEstimate], arrangement: Arrangement, time_s: Number, num_steps: int
) -> dict[str, PoolEstimate]:
    states = state_names(graph, arrangement.layouts)
    found = {}
    for pool in dict.fromkeys(pool for stage in graph.stages for pool in arrangement.pools[stage.name]):
        here = served_stages(graph, arrangement.pools, pool, arrangement.schedule.max_staleness)
        busy = num_steps * sum((estimates[stage.name].time_s for stage in here), start=0)
        held = pool_memory(
            pool,
            graph,
            estimates,
            arrangement.pools,
            states=states,
            offloaded=arrangement.offloaded,
            max_staleness=arrangement.schedule.max_staleness,
        )
        found[pool] = PoolEstimate(busy, 1 - busy / time_s, held)
    return found


def _least_s(
    graph: StepGraph,
    estimates: Mapping[str, StageEstimate],
    arrangement: Arrangement,
    rates: Mapping[str, PoolRates],
) -> Number:
    """What one step keeps the busiest resource of any pool busy for, at peak rates.

    A stage on several pools leaves each a share of its FLOP that is proportional to the pool's rate.
    """
    power = {name: pool.num_devices * pool.flop_per_s for name, pool in rates.items()}
    bounds = []
    for name, pool in rates.items():
        demands = []
        for stage in graph.stages:
            here = arrangement.pools[stage.name]
            if name in here and stage.kind != "host" and all(other in rates for other in here):
                estimate = estimates[stage.name]
                share = power[name] / sum((power[other] for other in here), start=0)
                demands.append(Demand(estimate.flop * share, estimate.hbm_bytes, estimate.sent_bytes))
        bounds.append(pool_least_s(demands, pool))
    return largest(bounds)
