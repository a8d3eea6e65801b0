"""What a schedule may ask of the world that does the work. Torch-free; real and simulated executors implement it."""

from dataclasses import dataclass
from typing import Protocol

from plait.stages.graph import StepGraph


@dataclass(frozen=True, order=True, slots=True)
class Piece:
    """One run of one stage: of which step (from 1), and in which round of refilling (0 unless sampling is dynamic)."""

    step: int
    stage: str
    round: int = 0


class Executor(Protocol):
    """Verbs of a schedule. Time is the executor's own: wall clock here, virtual in a simulation."""

    graph: StepGraph

    def begin_step(self, step: int) -> bool:
        """Open a step; False when the run is to stop before it (a signal, the wall-clock limit)."""
        ...

    def submit(self, piece: Piece) -> None:
        """Hand over a piece of work; it may start at once."""
        ...

    def next_completed(self) -> Piece:
        """Wait for a piece to complete; of several, the smallest."""
        ...

    def num_missing_groups(self, step: int) -> int:
        """Groups that a step still lacks after scoring (dynamic sampling); 0 when it can go on."""
        ...

    def sync_weights(self, version: int) -> None:
        """Publish the trained weights to the engine as this policy version."""
        ...

    def end_step(self, step: int) -> None:
        """Close a step: metrics, checkpoint, evaluation where they are due."""
        ...
