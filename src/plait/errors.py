"""Errors that a person can act on: each states the value, what was expected, and what to change."""

from collections.abc import Sequence
from dataclasses import dataclass


class PlaitError(Exception):
    """Base of every error that Plait raises on purpose; the command line prints it without a traceback."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule of a configuration.

    where: dotted key or keys, for example "batch.num_samples_per_prompt".
    rule: the rule with its numbers filled in.
    change: what to change, with the nearest valid values.
    """

    where: str
    rule: str
    change: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}. {self.change}"


class ConfigError(PlaitError):
    """The user's settings, files or rows cannot be used; nothing was started.

    Carries every violation found, not only the first.
    """

    def __init__(self, violations: Sequence[Violation] | str):
        if isinstance(violations, str):
            self.violations: tuple[Violation, ...] = ()
            super().__init__(violations)
        else:
            self.violations = tuple(violations)
            super().__init__("\n".join(str(v) for v in self.violations))


class DataError(ConfigError):
    """Rows of a data set cannot be used; the message names the file, the row and the field."""


class VerifierContractError(PlaitError):
    """A verifier returned something other than one result per sample; the run stops at once."""


class VerifierFailureError(PlaitError):
    """Verifiers fail too often to train on what they say, or their workers cannot do their work."""


class NoSignalError(PlaitError):
    """No group of a step had rewards that differ, within the permitted number of sampling rounds."""


class WorkerError(PlaitError):
    """A process that holds models raised, died or did not answer in time; all of its group were ended."""


class NonFiniteError(PlaitError):
    """Too many updates in a row had gradients that are not finite; none of them was applied."""


class CheckpointError(PlaitError):
    """A checkpoint cannot be written, or is incomplete or damaged."""


class WeightSyncError(PlaitError):
    """The engine does not hold the weights that the trainer published."""
