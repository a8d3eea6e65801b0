"""Of the tallies that the ranks of a layout made in one step, the one of the step."""

from collections.abc import Sequence
from dataclasses import fields
from typing import TypeVar

from plait.stages.critic_update import CriticTally
from plait.stages.update import UpdateTally

Tally = TypeVar("Tally", UpdateTally, CriticTally)

_SAME_ON_ALL = frozenset(
    {
        *("num_applied", "num_without_signal", "num_trained_samples", "num_skipped_samples"),
        *("rate", "grad_norms", "num_nonfinite", "nonfinite_in", "pairs"),
    }
)
"""Every rank sees the whole batch and the global norm (and no pairs, which the rules keep off ranks); the other fields
are sums over the tokens that a rank owns."""


def merged_policy(tallies: Sequence[UpdateTally]) -> UpdateTally:
    """tallies: of every rank; those that own nothing of their own (tensor-parallel copies) have sums of 0."""
    made = UpdateTally()
    _merge(made, tallies)
    made.correction_max = max(tally.correction_max for tally in tallies)
    return made


def merged_critic(tallies: Sequence[CriticTally]) -> CriticTally:
    """As `merged_policy`."""
    made = CriticTally()
    _merge(made, tallies)
    return made


def _merge(made: object, tallies: Sequence[object]) -> None:
    for field in fields(made):  # type: ignore[arg-type]
        values = [getattr(tally, field.name) for tally in tallies]
        total = values[0] if field.name in _SAME_ON_ALL else sum(values[1:], start=values[0])
        setattr(made, field.name, total)


def without_sums(tally: Tally) -> Tally:
    """Of a rank whose tokens another one counts."""
    kept = type(tally)()
    for name in _SAME_ON_ALL & {field.name for field in fields(tally)}:
        setattr(kept, name, getattr(tally, name))
    return kept
