"""alarms.jsonl: when an alarm began, once per onset; exact across a resume."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from plait.telemetry.alarms import ALARMS, Alarm, History
from plait.telemetry.files import JsonLinesFile

CLEARED_AFTER = 5
"""Steps in a row without a finding after which an alarm is over, so that a value near its limit is said once."""


@dataclass(frozen=True, slots=True)
class Onset:
    """An alarm began at a step. finding, cause, next_step: for people."""

    step: int
    alarm: str
    finding: str
    cause: str
    next_step: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.alarm}: {self.finding}. Likely cause: {self.cause}. Next: {self.next_step}."


class AlarmWatch:
    """Which alarms are on, as a function of the metrics of every step so far and of nothing else."""

    def __init__(self, alarms: Sequence[Alarm] = ALARMS) -> None:
        self._alarms = alarms
        self._history = History()
        self._num_quiet: dict[str, int] = {}
        """Of the alarms that are on: steps in a row in which they found nothing."""

    @property
    def active(self) -> tuple[str, ...]:
        """Names of the alarms that are on."""
        return tuple(self._num_quiet)

    def see(self, metrics: Mapping[str, float | None]) -> list[tuple[Alarm, str]]:
        """Take in the metrics of the next step. Returns the alarms that begin with it, and what each found."""
        self._history.add(metrics)
        begun = []
        for alarm in self._alarms:
            if not self._history.newest.keys() >= set(alarm.metrics):
                continue
            finding = alarm.rule(self._history)
            if finding is not None:
                if alarm.name not in self._num_quiet:
                    begun.append((alarm, finding))
                self._num_quiet[alarm.name] = 0
            elif alarm.name in self._num_quiet:
                self._num_quiet[alarm.name] += 1
                if self._num_quiet[alarm.name] == CLEARED_AFTER:
                    del self._num_quiet[alarm.name]
        return begun


class AlarmLog:
    """Watches a run and writes each onset to alarms.jsonl."""

    def __init__(self, path: Path, last_step: int, records: Iterable[Mapping[str, Any]]):
        """Begin the file, or continue it after a resume: what came after last_step is dropped.

        records: the lines of metrics.jsonl up to last_step, from which the state of every alarm follows exactly.
        PlaitError where a line before the last is damaged.
        """
        self.onsets: list[Onset] = []
        self._watch = AlarmWatch()
        for record in records:
            if record["kind"] == "train":
                self._watch.see(record)
        self._file = JsonLinesFile.reopen(
            path, lambda record: record["step"] <= last_step, lambda record: self.onsets.append(Onset(**record))
        )

    def see(self, step: int, metrics: Mapping[str, float], *, run: Path, sample: str) -> list[Onset]:
        """Take in a step, write and return the alarms that begin with it. run, sample: named in what to try next."""
        onsets = [
            Onset(step, alarm.name, finding, alarm.cause, alarm.next_step.format(run=run, step=step, sample=sample))
            for alarm, finding in self._watch.see(metrics)
        ]
        for onset in onsets:
            self._file.append(asdict(onset))
        self.onsets += onsets
        return onsets

    def summary(self) -> list[dict[str, Any]]:
        """One entry per alarm that was raised, in order: steps of its onsets, whether it is on, and its last words."""
        entries: dict[str, dict[str, Any]] = {}
        for onset in self.onsets:
            words = asdict(onset)
            step, name = words.pop("step"), words["alarm"]
            steps = [*entries[name]["steps"], step] if name in entries else [step]
            entries[name] = {**words, "steps": steps, "is_active": name in self._watch.active}
        return list(entries.values())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "AlarmLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
