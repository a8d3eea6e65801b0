"""Stopping in good order: signals and the wall-clock limit end a run between two steps."""

import signal
import threading
import time
from types import FrameType, TracebackType


class StopRequest:
    """Context that turns SIGINT and SIGTERM into a request; a second SIGINT interrupts at once.

    wall_clock_limit_s: seconds from entering; None for no limit. A step as long as the longest so far must fit.
    """

    def __init__(self, wall_clock_limit_s: float | None):
        self._limit_s = wall_clock_limit_s
        self._signal: signal.Signals | None = None
        self._started_s = self._last_s = time.perf_counter()
        self._longest_step_s = 0.0
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        self._started_s = self._last_s = time.perf_counter()
        # Only the main thread may set handlers; a run started from another one is stopped by its limit alone.
        is_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGINT, signal.SIGTERM) if is_main else ():
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    def start_step(self) -> None:
        """Begin to measure a step: what went before (an evaluation, say) does not count as one."""
        self._last_s = time.perf_counter()

    def end_step(self) -> None:
        self._longest_step_s = max(self._longest_step_s, time.perf_counter() - self._last_s)

    @property
    def reason(self) -> str:
        """Why the run should stop now; empty while it may go on."""
        if self._signal is not None:
            return self._signal.name
        if self._limit_s is not None:
            elapsed_s = time.perf_counter() - self._started_s
            if elapsed_s + self._longest_step_s > self._limit_s:
                return f"wall-clock limit of {self._limit_s:g} s"
        return ""

    @property
    def exit_code(self) -> int:
        """128 plus the signal's number, as shells report it; 0 without a signal."""
        return 0 if self._signal is None else 128 + self._signal.value
