"""The trace of a run: what each device did when, as Chrome trace events (open trace.json in ui.perfetto.dev).

A process of the trace is a device ("cpu:0"), a thread is a stage or a role. Times are microseconds from the
start of the run; a resumed run continues the axis where the earlier trace ended.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from plait.errors import PlaitError
from plait.telemetry.files import encode_json, write_atomically

MAX_EVENTS = 200_000
"""About 40 MB of JSON, which Perfetto opens without effort."""


class Trace:
    """Collects spans. At most `max_events` are kept, the newest; totals per stage count those dropped too.

    Not for use from several threads at once.
    """

    def __init__(
        self,
        device: str = "cpu:0",
        *,
        clock: Callable[[], float] = time.perf_counter,
        max_events: int = MAX_EVENTS,
    ):
        """device: where spans happen that name no other. clock: seconds, rising; its zero does not matter."""
        assert max_events >= 1, f"max_events is {max_events}; at least 1 was expected"
        self._device = device
        self._clock = clock
        self._origin = clock()
        self._events: deque[dict[str, Any]] = deque(maxlen=max_events)
        self._num_dropped = 0
        self._seconds: dict[str, float] = {}
        self._process_ids: dict[str, int] = {}
        self._thread_ids: dict[tuple[str, str], int] = {}

    @classmethod
    def load(
        cls,
        path: Path,
        device: str = "cpu:0",
        *,
        last_step: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_events: int = MAX_EVENTS,
    ) -> "Trace":
        """Continue the trace of a run that is resumed; an empty one where nothing was written yet.

        last_step: spans of later steps are dropped, since those steps will run again; None keeps all.
        PlaitError where the file is not a trace that Plait wrote.
        """
        trace = cls(device, clock=clock, max_events=max_events)
        if not path.exists():
            return trace
        try:
            data = json.loads(path.read_bytes())
            trace._restore(data, last_step)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlaitError(
                f"{path} is not a trace that Plait wrote ({error}). Remove it to resume the run without it."
            ) from error
        return trace

    def _restore(self, data: dict[str, Any], last_step: int | None) -> None:
        metadata = data["metadata"]
        self._num_dropped = int(metadata["dropped_events"])
        self._seconds = {stage: float(seconds) for stage, seconds in metadata["seconds_per_stage"].items()}
        devices = {}
        threads = {}
        for event in data["traceEvents"]:
            if event["ph"] == "M" and event["name"] == "process_name":
                devices[event["pid"]] = event["args"]["name"]
            elif event["ph"] == "M" and event["name"] == "thread_name":
                threads[event["pid"], event["tid"]] = event["args"]["name"]
        for event in data["traceEvents"]:
            if event["ph"] != "X":
                continue
            step = event["args"]["step"]
            if last_step is not None and step is not None and step > last_step:
                left_s = self._seconds[event["name"]] - event["dur"] * 1e-6
                self._seconds[event["name"]] = max(0.0, left_s)  # rounding must not show as less than nothing
            else:
                device = devices[event["pid"]]
                pid, tid = self._ids(device, threads[event["pid"], event["tid"]])
                self._keep({**event, "pid": pid, "tid": tid})
        end_us = max((e["ts"] + e["dur"] for e in self._events), default=0.0)
        self._origin -= end_us * 1e-6

    def now_s(self) -> float:
        """Seconds since the start of the run, on the trace's axis."""
        return self._clock() - self._origin

    @contextmanager
    def span(
        self, stage: str, *, step: int | None = None, device: str = "", thread: str = "", **args: Any
    ) -> Iterator[None]:
        """Record how long the block takes, also when it raises.

        device: the trace's own when empty. thread: the stage when empty. args: shown with the span (JSON).
        """
        start_s = self.now_s()
        try:
            yield
        finally:
            self.record(stage, start_s, self.now_s(), step=step, device=device, thread=thread, **args)

    def record(
        self,
        stage: str,
        start_s: float,
        end_s: float,
        *,
        step: int | None = None,
        device: str = "",
        thread: str = "",
        **args: Any,
    ) -> None:
        """Add a span measured elsewhere; times in seconds on the axis of `now_s`."""
        assert end_s >= start_s, f"{stage} ends at {end_s} s, before it starts at {start_s} s"
        pid, tid = self._ids(device or self._device, thread or stage)
        event = {
            "name": stage,
            "cat": "stage",
            "ph": "X",
            "ts": round(start_s * 1e6, 3),
            "dur": round((end_s - start_s) * 1e6, 3),
            "pid": pid,
            "tid": tid,
            "args": {"step": step, **args},
        }
        if stage not in self._seconds:
            self._seconds[stage] = 0.0
        self._seconds[stage] += end_s - start_s
        self._keep(event)

    def _keep(self, event: dict[str, Any]) -> None:
        if len(self._events) == self._events.maxlen:
            self._num_dropped += 1
        self._events.append(event)

    def _ids(self, device: str, thread: str) -> tuple[int, int]:
        """Numbers of a device and of a thread, given in the order of first use."""
        pid = self._process_ids.setdefault(device, len(self._process_ids) + 1)
        return pid, self._thread_ids.setdefault((device, thread), len(self._thread_ids) + 1)

    def seconds_per_stage(self) -> dict[str, float]:
        """Total seconds of each stage's spans, on all devices. A span inside another counts in both."""
        return dict(self._seconds)

    @property
    def num_dropped(self) -> int:
        """Spans no longer kept, the oldest ones."""
        return self._num_dropped

    def to_dict(self) -> dict[str, Any]:
        """The trace in Chrome's trace-event form."""
        return {
            "traceEvents": [*self._name_events(), *sorted(self._events, key=lambda e: e["ts"])],
            "displayTimeUnit": "ms",
            "metadata": {"dropped_events": self._num_dropped, "seconds_per_stage": self._seconds},
        }

    def _name_events(self) -> Iterator[dict[str, Any]]:
        for device, pid in self._process_ids.items():
            yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": device}}
        for (device, thread), tid in self._thread_ids.items():
            pid = self._process_ids[device]
            yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": thread}}
            order = {"sort_index": tid}
            yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": order}

    def write(self, path: Path) -> None:
        """Write the whole trace, atomically. PlaitError where it cannot be written."""
        try:
            write_atomically(path, encode_json(self.to_dict()))
        except OSError as error:
            raise PlaitError(
                f"{path}: the trace cannot be written: {error.strerror}. Make room or give write permission."
            ) from error
