"""The StepGraph: the stages of one training step as a directed acyclic graph. Torch-free.

Edges follow from what stages read and write. Weights are data too, with their version: "policy_weights@v" is read
by the passes of a step and "policy_weights@v+1" written by its update, so that no streamed update can run before a
pass that needs the old weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal

Kind = Literal["generation", "inference", "training", "host", "transfer"]
Granularity = Literal["sample", "group", "minibatch", "step"]


class StageGraphError(ValueError):
    """The stages do not form a graph that can be run: a cycle, a missing producer, an unread output."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a step.

    granularity: the smallest piece after which a consumer may start.
    repeat: how often the stage runs in one step (epochs times minibatches, refill rounds).
    axes: the ways in which it may be split: parallel axes (dp, tp, sp, pp, cp, ep) and data (samples, groups).
    why: for a person, the reason for its granularity, its repeats or its being there.
    """

    name: str
    roles: tuple[str, ...]
    kind: Kind
    reads: frozenset[str]
    writes: frozenset[str]
    granularity: Granularity
    repeat: int = 1
    axes: frozenset[str] = frozenset()
    why: str = ""

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise StageGraphError(f"stage {self.name}: repeat is {self.repeat}, expected at least 1")
        if self.reads & self.writes:
            raise StageGraphError(f"stage {self.name} reads what it writes: {sorted(self.reads & self.writes)}")


class StepGraph:
    """Stages in an order that respects every edge.

    inputs: data that exist before the step. outputs: data that the step leaves behind; every other written
    datum must be read by a stage.
    """

    def __init__(self, stages: Iterable[Stage], *, inputs: Iterable[str], outputs: Iterable[str]):
        stages = tuple(stages)
        self.inputs, self.outputs = frozenset(inputs), frozenset(outputs)
        names = [stage.name for stage in stages]
        if len(set(names)) != len(names):
            raise StageGraphError(f"two stages have the same name: {sorted(names)}")
        producers: dict[str, str] = {}
        for stage in stages:
            for datum in stage.writes:
                if datum in producers or datum in self.inputs:
                    other = producers.get(datum, "the step's inputs")
                    raise StageGraphError(f'"{datum}" is written by {stage.name} and by {other}')
                producers[datum] = stage.name
        read = frozenset().union(*(stage.reads for stage in stages)) if stages else frozenset()
        if missing := sorted(read - self.inputs - producers.keys()):
            raise StageGraphError(f"nobody writes {missing}, which a stage reads")
        if unread := sorted(producers.keys() - read - self.outputs):
            raise StageGraphError(f"nobody reads {unread}, and they are not outputs of the step")
        if absent := sorted(self.outputs - producers.keys()):
            raise StageGraphError(f"no stage writes the outputs {absent}")
        self.predecessors: dict[str, frozenset[str]] = {
            stage.name: frozenset(producers[d] for d in stage.reads if d in producers) for stage in stages
        }
        try:
            order = list(TopologicalSorter({n: sorted(self.predecessors[n]) for n in names}).static_order())
        except CycleError as error:
            raise StageGraphError(f"the stages form a cycle: {' -> '.join(error.args[1])}") from error
        by_name = {stage.name: stage for stage in stages}
        self.stages: tuple[Stage, ...] = tuple(by_name[name] for name in order)

    def levels(self) -> tuple[tuple[Stage, ...], ...]:
        """Stages by the longest chain of predecessors before them: those of one level are parallel siblings."""
        depth: dict[str, int] = {}
        for stage in self.stages:
            depth[stage.name] = 1 + max((depth[name] for name in self.predecessors[stage.name]), default=-1)
        return tuple(
            tuple(s for s in self.stages if depth[s.name] == level) for level in range(len(set(depth.values())))
        )

    def __getitem__(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        return any(stage.name == name for stage in self.stages)
