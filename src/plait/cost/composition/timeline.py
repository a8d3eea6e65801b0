"""When every stage of N steps starts and ends: data, pools that serve in turns, streams, staleness. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise

from plait.cost.arithmetic import Number
from plait.cost.composition.flow import Flow, largest, serve
from plait.cost.composition.fusion import ONE_PIECE, PieceCounts, own_granularity, streams
from plait.cost.composition.placement import Run, pool_orders
from plait.stages.graph import Granularity, StepGraph


@dataclass(frozen=True, slots=True)
class Span:
    """One run of one stage: its first piece starts, its last piece ends."""

    start_s: Number
    end_s: Number


@dataclass(frozen=True, slots=True)
class StageTime:
    """seconds of a whole stage on its pool. num_passes: over the step's samples (epochs), in those seconds."""

    seconds: Number
    num_passes: float = 1


def weight_edges(graph: StepGraph, max_staleness: int) -> dict[tuple[str, str], int]:
    """(writer, reader) -> how many steps later the reader needs what the writer wrote.

    "x@v" is what an earlier step wrote as "x@v+1". Stages that train or score need the newest weights; those that
    generate may lag by max_staleness policy versions.
    """
    writers = {datum: stage.name for stage in graph.stages for datum in stage.writes}
    edges: dict[tuple[str, str], int] = {}
    for stage in graph.stages:
        lag = 1 + (max_staleness if stage.kind == "generation" else 0)
        for datum in stage.reads:
            if datum.endswith("@v") and f"{datum}+1" in writers:
                edges[writers[f"{datum}+1"], stage.name] = lag
    return edges


def timeline(
    graph: StepGraph,
    times: Mapping[str, StageTime],
    pools: Mapping[str, tuple[str, ...]],
    *,
    fuse: Mapping[str, Granularity] | None = None,
    pieces: PieceCounts = ONE_PIECE,
    max_staleness: int = 0,
    num_steps: int = 1,
) -> dict[Run, Span]:
    """Starts and ends of all stages of num_steps steps, exact for pieces of equal length.

    max_staleness 0 is synchronous: every stage of a step ends before the next step begins. Piece counts must divide
    each other. A stage with several passes streams during the first one only, and delivers at its end.
    """
    passed = streams(graph, fuse or {})
    data, turns = _data_edges(graph, num_steps, max_staleness), _turns(graph, pools, num_steps, max_staleness)
    before = {run: [*data[run], *turns[run], *((run[0], p) for p in graph.predecessors[run[1]])] for run in data}
    flows: dict[Run, Flow] = {}
    spans: dict[Run, Span] = {}
    for run in TopologicalSorter(before).static_order():
        step, name = run
        stage, time = graph[name], times[name]
        num_pieces = pieces.of(own_granularity(stage, passed))
        waits = [flows[other].last_s for other in dict.fromkeys((*data[run], *turns[run]))]
        arrivals = []
        for producer in sorted(graph.predecessors[name]):
            flow, piece = flows[step, producer], passed[producer, name]
            arrivals.append(flow.whole() if piece == "step" else flow.regrouped(pieces.of(piece)))
        flow = serve(arrivals, waits, time.seconds / time.num_passes / num_pieces, num_pieces)
        if time.num_passes != 1:
            flow = Flow(((flow.last_s + time.seconds * (1 - 1 / time.num_passes), 0),))
        flows[run] = flow
        spans[run] = Span(largest([*(flow.first_s for flow in arrivals), *waits]), flow.last_s)
    return spans


def _data_edges(graph: StepGraph, num_steps: int, max_staleness: int) -> dict[Run, list[Run]]:
    """What each run waits for in earlier steps: weights; everything, where all is synchronous."""
    edges = weight_edges(graph, max_staleness)
    before: dict[Run, list[Run]] = {}
    for step in range(1, num_steps + 1):
        for stage in graph.stages:
            waits = [
                (step - lag, writer)
                for (writer, reader), lag in edges.items()
                if reader == stage.name and step - lag >= 1
            ]
            if max_staleness == 0 and step > 1:
                waits += [(step - 1, other.name) for other in graph.stages]
            before[step, stage.name] = waits
    return before


def _turns(
    graph: StepGraph, pools: Mapping[str, tuple[str, ...]], num_steps: int, max_staleness: int
) -> dict[Run, list[Run]]:
    """What each run's pools serve before it."""
    before: dict[Run, list[Run]] = {(step, s.name): [] for step in range(1, num_steps + 1) for s in graph.stages}
    for order in pool_orders(graph, pools, num_steps, max_staleness).values():
        for earlier, later in pairwise(order):
            before[later].append(earlier)
    return before
