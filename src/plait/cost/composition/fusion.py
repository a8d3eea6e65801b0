"""At which granularity a stage may start on what another has done. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from plait.cost.arithmetic import Number
from plait.stages.graph import Granularity, Stage, StepGraph

ORDER: tuple[Granularity, ...] = get_args(Granularity)
"""From fine to coarse."""


@dataclass(frozen=True, slots=True)
class PieceCounts:
    """How many pieces of each granularity a step has."""

    num_samples: Number = 1
    num_groups: Number = 1
    num_minibatches: Number = 1

    def of(self, granularity: Granularity) -> Number:
        """sample, group, minibatch; a step is one."""
        counts = (self.num_samples, self.num_groups, self.num_minibatches, 1)
        return counts[ORDER.index(granularity)]


ONE_PIECE = PieceCounts()


def coarsest(*granularities: Granularity) -> Granularity:
    """The one with the fewest pieces."""
    return max(granularities, key=ORDER.index)


def streams(graph: StepGraph, fuse: Mapping[str, Granularity]) -> dict[tuple[str, str], Granularity]:
    """(producer, consumer) -> the pieces in which data pass; "step" where the consumer waits for all of it.

    fuse: consumer -> the granularity at which it may start. No finer than its producer delivers, nor than it works
    itself: an advantage with batch statistics is a step, whatever is fused.
    """
    passed: dict[tuple[str, str], Granularity] = {}
    emitted: dict[str, Granularity] = {}
    for stage in graph.stages:
        asked = fuse.get(stage.name, "step")
        taken: list[Granularity] = []
        for producer in sorted(graph.predecessors[stage.name]):
            # Weights are there when the whole stage that writes them has ended.
            only_weights = all("weights@" in datum for datum in graph[producer].writes & stage.reads)
            piece = "step" if only_weights else coarsest(asked, emitted[producer], stage.granularity)
            passed[producer, stage.name] = piece
            taken.append(piece)
        emitted[stage.name] = coarsest(stage.granularity, *(piece for piece in taken if piece != "step"))
        for producer in graph.predecessors[stage.name]:
            # One stage works in one kind of piece: the coarsest of those in which its inputs come.
            if passed[producer, stage.name] != "step":
                passed[producer, stage.name] = emitted[stage.name]
    return passed


def own_granularity(stage: Stage, passed: Mapping[tuple[str, str], Granularity]) -> Granularity:
    """The pieces in which a stage works and delivers, given those in which its inputs come."""
    taken = [piece for (_, consumer), piece in passed.items() if consumer == stage.name and piece != "step"]
    return coarsest(stage.granularity, *taken)
