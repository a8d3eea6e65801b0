"""What a task is: a stream of training prompts and a fixed set of held-out ones."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Protocol

from plait.batch import Message, Prompt


@dataclass(slots=True)
class TaskReport:
    """What loading a task found, and what was left out while it was used.

    rows, train_rows: rows read, and rows left for training; None for generated tasks, which have no end.
    eval_rows: prompts held out. duplicates: rows (or evaluation instances) that repeat an earlier prompt.
    dropped_overlap: training prompts left out because they are evaluation prompts; for generated tasks
        the number of training indices at which that has happened so far.
    dropped_overlong: for the caller, who knows the tokenizer. notes: remarks for the person who runs it.
    """

    name: str
    rows: int | None
    train_rows: int | None
    eval_rows: int
    duplicates: int = 0
    dropped_overlap: int = 0
    dropped_overlong: int = 0
    notes: tuple[str, ...] = ()


class Task(Protocol):
    """One [[tasks]] entry: a stream of training prompts and a fixed set of held-out ones."""

    @property
    def name(self) -> str: ...

    @property
    def num_train(self) -> int | None:
        """Number of different training prompts; None if they are generated without end."""
        ...

    @property
    def report(self) -> TaskReport: ...

    @property
    def held_out(self) -> frozenset[str]:
        """Keys (see `prompt_key`) of its held-out prompts."""
        ...

    def exclude(self, keys: frozenset[str]) -> None:
        """Keep prompts with these keys out of training too: another task holds them out."""
        ...

    def train_prompt(self, index: int) -> Prompt:
        """The training prompt at index >= 0; depends on nothing but the run's seed and the index."""
        ...

    def eval_prompts(self, limit: int) -> list[Prompt]:
        """The first `limit` held-out prompts, or all where there are fewer; a larger limit only adds."""
        ...


def prompt_key(messages: Sequence[Message]) -> str:
    """Identity of a question: its messages up to white space, without a prefilled answer's beginning."""
    return json.dumps([[message.role, " ".join(message.content.split())] for message in messages])


def stable_hash(*parts: str | int) -> int:
    """64 bits that depend on the parts only: not on the process, the platform or the order of calls."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def exact_shares(weights: Sequence[float]) -> list[int]:
    """Integers in the proportion of the weights."""
    # As written in the recipe: Fraction(0.1) would be the binary neighbour, with a huge denominator.
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]


def furthest_behind(shares: Sequence[int], counts: Sequence[int], order: Sequence[int]) -> int:
    """Which one is to be counted next so that counts follow shares; the first in `order` wins a tie."""
    num_next, total = sum(counts) + 1, sum(shares)
    return max(order, key=lambda i: num_next * shares[i] - counts[i] * total)


def split_counts(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` by weights, at least one each. A larger total gives no task less."""
    shares, counts = exact_shares(weights), [0] * len(weights)
    for _ in range(total):
        counts[furthest_behind(shares, counts, range(len(counts)))] += 1
    return [max(count, 1) for count in counts]
