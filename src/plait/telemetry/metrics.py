"""metrics.jsonl: one record per step and kind, and how it is shown.

A record is {"kind": "train" or "eval", "step": int, "time_s": float, <metric>: number or null, ...}, with
"nonfinite": [names] where a value was NaN or infinite, which JSON cannot hold.
"""

import math
import numbers
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from plait.errors import ConfigError, PlaitError
from plait.telemetry.definitions import METRICS, STAGES, Metric, metric_of
from plait.telemetry.files import JsonLinesFile, iterate_json_lines

if TYPE_CHECKING:
    from rich.table import Table

    from plait.telemetry.tensorboard import TensorBoardMirror

__all__ = [
    "METRICS",
    "STAGES",
    "Metric",
    "MetricsLog",
    "hints_for",
    "metric_of",
    "read_metrics",
    "render",
    "render_run",
    "run_to_dict",
    "to_dict",
]

Kind = Literal["train", "eval"]
KINDS: tuple[Kind, ...] = ("train", "eval")
_NOT_METRICS = frozenset({"kind", "step", "time_s", "nonfinite"})


class MetricsLog:
    """Writes metrics.jsonl, flushed per record, and mirrors it to TensorBoard when asked.

    The steps of a kind rise strictly; a record of one kind may share its step with one of the other.
    `time_s` counts from the start of the run and continues after a resume.
    """

    def __init__(
        self,
        path: Path,
        *,
        tensorboard: bool = False,
        clock: Callable[[], float] = time.perf_counter,
        _continued: int | None = None,
    ):
        """Begin a new file; PlaitError if there is one (`reopen` continues it).

        tensorboard: also write event files to "tensorboard" beside `path`; ConfigError without the package.
        clock: seconds, rising.
        """
        # The package is looked for first: a setting that cannot be met must not leave files behind.
        mirror = _import_tensorboard_mirror() if tensorboard else None
        self._last_step: dict[Kind, int] = dict.fromkeys(KINDS, -1)
        self._last_time_s = 0.0
        if _continued is None:
            self._file = JsonLinesFile(path, exclusive=True)
        else:
            self._file = JsonLinesFile.reopen(
                path, lambda record: _check_record(path, record)["step"] <= _continued, self._seen
            )
        self._clock = clock
        self._origin = clock() - self._last_time_s
        self._mirror = None if mirror is None else mirror(path.parent / "tensorboard", _continued)

    @classmethod
    def reopen(
        cls,
        path: Path,
        last_step: int,
        *,
        tensorboard: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> "MetricsLog":
        """Continue after a resume: records after `last_step` and a torn last line are dropped atomically.

        A missing file is begun anew. PlaitError where a line before the last is damaged.
        """
        return cls(path, tensorboard=tensorboard, clock=clock, _continued=last_step)

    def _seen(self, record: Mapping[str, Any]) -> None:
        self._last_step[record["kind"]] = record["step"]
        self._last_time_s = record["time_s"]

    def has(self, kind: Kind, step: int) -> bool:
        """Whether the newest record of this kind is that of `step`; lets a resumed run skip an evaluation."""
        return self._last_step[kind] == step

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        """Write the one record of (kind, step).

        KeyError for a name that is not registered, TypeError for a value that is not a number,
        AssertionError for a step that does not rise, PlaitError for a file that cannot be written.
        """
        assert kind in KINDS, f'kind is "{kind}"; known are {KINDS}'
        previous = self._last_step[kind]
        assert step > previous, f"{kind} record of step {step} after that of step {previous}: steps must rise"
        newest = max(self._last_step.values())
        assert step >= newest, f"{kind} record of step {step} after another record of step {newest}"
        values, nonfinite = _to_json_numbers(metrics)
        time_s = max(self._last_time_s, self._clock() - self._origin)
        record: dict[str, Any] = {"kind": kind, "step": int(step), "time_s": round(time_s, 6), **values}
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._file.append(record)
        self._last_step[kind] = step
        self._last_time_s = time_s
        if self._mirror is not None:
            self._mirror.write(step, values)

    def close(self) -> None:
        self._file.close()
        if self._mirror is not None:
            self._mirror.close()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _check_record(path: Path, record: Mapping[str, Any]) -> Mapping[str, Any]:
    if record.keys() >= {"kind", "step", "time_s"} and record["kind"] in KINDS:
        return record
    raise PlaitError(f"{path}: a line has no kind, step and time_s; it is not a metrics file of Plait.")


def _to_json_numbers(metrics: Mapping[str, float]) -> tuple[dict[str, int | float | None], list[str]]:
    """Values that JSON can hold, and the names of those that were not finite (now None)."""
    values: dict[str, int | float | None] = {}
    nonfinite: list[str] = []
    for name, value in metrics.items():
        metric_of(name)
        if isinstance(value, numbers.Integral):
            values[name] = int(value)
        elif not isinstance(value, numbers.Real):
            raise TypeError(f"metric {name} is {value!r}; a number was expected")
        elif math.isfinite(value):
            values[name] = float(value)
        else:
            values[name] = None
            nonfinite.append(name)
    return values, nonfinite


def _import_tensorboard_mirror() -> "type[TensorBoardMirror]":
    """ConfigError with the way to install it where TensorBoard is missing."""
    try:
        from plait.telemetry.tensorboard import TensorBoardMirror
    except ImportError as error:
        raise ConfigError(
            f"logging.tensorboard is true, but TensorBoard cannot be imported ({error}). "
            'Install it with pip install "plait[tensorboard]", or set logging.tensorboard to false.'
        ) from error
    return TensorBoardMirror


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics.jsonl, also of a run that is still writing (a torn last line is left out).

    PlaitError where there is no such file or a line before the last is damaged.
    """
    try:
        return [record for _, record in iterate_json_lines(path)]
    except OSError as error:
        raise PlaitError(
            f"{path} cannot be read: {error.strerror}. It is begun with the run; check the run's name."
        ) from error


def hints_for(metrics: Mapping[str, float], already_shown: set[str]) -> list[str]:
    """Sentences for values that look odd but are right, each metric at most once per `already_shown`.

    already_shown: names whose hint was given; those given now are added.
    """
    hints = []
    for name, value in metrics.items():
        metric = metric_of(name)
        if metric.hint_when is None or metric.name in already_shown:
            continue
        low, high = metric.hint_when
        if low <= value <= high:
            already_shown.add(metric.name)
            hints.append(metric.hint)
    return hints


def to_dict() -> dict[str, dict[str, Any]]:
    """The registry as plain data: name -> definition, unit, expected, hint, hint_when."""
    return {name: asdict(metric) for name, metric in METRICS.items()}


def render() -> "Table":
    """The registry as a table: what each metric means and what a healthy run shows."""
    from rich.table import Table
    from rich.text import Text

    table = Table("metric", "unit", "definition", "on a healthy run", show_lines=False)
    for metric in METRICS.values():
        table.add_row(*map(Text, (metric.name, metric.unit, metric.definition, metric.expected)))
    return table


def run_to_dict(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per metric of a run: number of records, first and last value, lowest and highest finite one, last step.

    Values that were not finite are counted in "nonfinite"; "first" and "last" are None for them.
    """
    summary: dict[str, dict[str, Any]] = {}
    for record in records:
        for name, value in record.items():
            if name in _NOT_METRICS:
                continue
            if name not in summary:
                summary[name] = {"records": 0, "first": value, "min": None, "max": None, "nonfinite": 0}
            row = summary[name]
            row["records"] += 1
            row["last"], row["last_step"] = value, record["step"]
            if value is None:
                row["nonfinite"] += 1
            else:
                row["min"] = value if row["min"] is None else min(row["min"], value)
                row["max"] = value if row["max"] is None else max(row["max"], value)
    return summary


def render_run(records: Sequence[Mapping[str, Any]]) -> "Table":
    """A run's metrics as a table: first, last, lowest, highest value, beside what a healthy run shows."""
    from rich.table import Table
    from rich.text import Text

    table = Table("metric", "first", "last", "min", "max", "unit", "on a healthy run")
    for name, row in run_to_dict(records).items():
        try:
            metric = metric_of(name)
            unit, expected = metric.unit, metric.expected
        except KeyError:  # a file written by another version of Plait
            unit, expected = "?", "not a metric of this version"
        cells = (name, *(format_value(row[key]) for key in ("first", "last", "min", "max")), unit, expected)
        table.add_row(*map(Text, cells))
    return table


def format_value(value: float | None) -> str:
    """A number for people; "not finite" for None."""
    if value is None:
        return "not finite"
    if isinstance(value, int) or float(value).is_integer():
        return f"{value:.0f}"
    return f"{value:.3e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.4g}"
