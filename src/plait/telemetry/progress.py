"""What a person sees while a run goes on. A display must never end a run, whatever the terminal is."""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

_SHORT_STAGES = {
    "generate": "gen",
    "score_verifier": "score",
    "old_logprob": "old",
    "ref_logprob": "ref",
    "advantage": "adv",
    "update_policy": "update",
    "sync_weights": "sync",
}
_NUM_RECENT_STEPS = 10
"""Steps whose mean time gives the time left."""
_NUM_ROWS = 8
"""Steps shown on a terminal."""
_MIN_TABLE_WIDTH = 76
_STREAM_ERRORS = (OSError, ValueError, LookupError)
"""The stream is gone; it is closed or cannot encode; its encoding is unknown."""


class Progress:
    """Progress of a run: a table that is redrawn on a terminal, otherwise plain lines.

    Plain lines come at most every `min_interval_s`; the last step is always among them. Once the stream can
    no longer be written (a closed pipe), the display falls silent and the run goes on.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        min_interval_s: float = 2.0,
    ):
        """num_steps: of the whole run, earlier attempts included. stream: sys.stdout when None."""
        self._num_steps = num_steps
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._min_interval_s = min_interval_s
        self._step_times_s: deque[float] = deque(maxlen=_NUM_RECENT_STEPS)
        self._rows: deque[tuple[str, ...]] = deque(maxlen=_NUM_ROWS)
        self._line = ""
        self._stage = ""
        self._line_is_shown = True
        self._last_shown_s = -math.inf
        self._is_broken = False
        self._live: Live | None = None

    def __enter__(self) -> "Progress":
        self._guard(self._start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def step(
        self, step: int, metrics: Mapping[str, float], seconds_per_stage: Mapping[str, float], step_s: float
    ) -> None:
        """Show a finished step.

        metrics: by registered name; what is missing shows as "-". step_s: seconds the step took.
        """
        self._step_times_s.append(step_s)
        left_s = sum(self._step_times_s) / len(self._step_times_s) * max(0, self._num_steps - step)
        stages = " ".join(f"{_short(name)} {_seconds(s)}" for name, s in seconds_per_stage.items() if s >= 0.05)
        cells = (
            f"{step}/{self._num_steps}",
            _number(metrics, "reward/mean", ".3f"),
            _number(metrics, "accuracy", ".3f"),
            _number(metrics, "response_tokens/mean", ".0f"),
            _number(metrics, "reasoning_share", ".2f"),
            _number(metrics, "throughput/generated_tokens_per_s", ".0f"),
            _seconds(step_s),
            duration(left_s),
        )
        number, reward, accuracy, length, reasoning, rate, took, left = cells
        self._rows.append((*cells[:-1], stages))
        shown = f"reward {reward}  accuracy {accuracy}  length {length}  reasoning {reasoning}  {rate} tok/s"
        if "pairs/accuracy" in metrics:
            pairs = f"{_number(metrics, 'pairs/accuracy', '.3f')}  margin {_number(metrics, 'pairs/margin', '.3f')}"
            sampled = f"{shown}  " if "accuracy" in metrics else f"loss {_number(metrics, 'loss/pairwise', '.3f')}  "
            shown = f"{sampled}pair accuracy {pairs}"
        self._line = f"step {number}  {shown}  {took}{f' ({stages})' if stages else ''}  left {left}"
        self._line_is_shown = False
        is_due = self._clock() - self._last_shown_s >= self._min_interval_s
        if self._live is not None or is_due or step >= self._num_steps:
            self._guard(self._show)

    def stage(self, name: str) -> None:
        """Show on a terminal what is being done now; plain lines have no room for it."""
        self._stage = name
        if self._live is not None:
            self._guard(self._redraw)

    def note(self, text: str) -> None:
        """Show a message (a warning, a hint, an evaluation), at once and lasting."""
        self._guard(lambda: self._print(text))

    def close(self) -> None:
        """Show the last step if it was held back, and leave the terminal as it was. Twice is harmless."""
        if not self._line_is_shown:
            self._guard(self._show)
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(*_STREAM_ERRORS):  # tried on a broken stream too: it shows the cursor again
                live.stop()

    def _guard(self, action: Callable[[], None]) -> None:
        """Run an action on the stream; from the first that fails on, do nothing."""
        if self._is_broken:
            return
        try:
            action()
        except _STREAM_ERRORS:
            self._is_broken = True

    def _start(self) -> None:
        if not self._stream.isatty():
            return
        from rich.console import Console
        from rich.live import Live

        class RunConsole(Console):
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError  # Rich would end the process

        console = RunConsole(file=self._stream, highlight=False, markup=False, emoji=False)
        if console.is_dumb_terminal or console.width < _MIN_TABLE_WIDTH:
            return
        # No refresh thread and no redirection of what libraries print: an error of the terminal must surface
        # here, where it is caught.
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def _show(self) -> None:
        if self._live is None:
            self._print(self._line)
            self._last_shown_s = self._clock()
        else:
            self._redraw()
        self._line_is_shown = True

    def _redraw(self) -> None:
        assert self._live is not None, "only a terminal is redrawn"
        self._live.update(self._table(), refresh=True)

    def _print(self, text: str) -> None:
        text = printable(text, self._stream.encoding or "ascii")
        if self._live is None:
            self._stream.write(text + "\n")
            self._stream.flush()
        else:
            from rich.text import Text

            self._live.console.print(Text(text, overflow="fold"))

    def _table(self) -> "Table":
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.ASCII2 if _is_ascii(self._stream) else box.SIMPLE, caption=None)
        for heading in ("step", "reward", "accuracy", "length", "reasoning", "tok/s", "time"):
            table.add_column(heading, justify="right", overflow="fold", no_wrap=True)
        table.add_column("stages", overflow="fold")
        for row in self._rows:
            table.add_row(*(Text(printable(cell, "ascii")) for cell in row))
        left = self._line.rpartition("  ")[2]
        table.title = Text("   ".join(part for part in (left, self._stage and f"now: {self._stage}") if part))
        table.title_justify = "left"
        return table


def _is_ascii(stream: TextIO) -> bool:
    return not (stream.encoding or "ascii").lower().replace("-", "").startswith("utf")


def _short(stage: str) -> str:
    return _SHORT_STAGES.get(stage, stage)


def _number(metrics: Mapping[str, float], name: str, form: str) -> str:
    return format(metrics[name], form) if name in metrics else "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}s"


def duration(seconds: float) -> str:
    """For people: "12s", "3m20s", "1h02m", "2d03h"; "?" where it is not finite."""
    if not math.isfinite(seconds):
        return "?"
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{whole % 60:02d}s" if minutes else f"{whole}s"


def printable(text: str, encoding: str) -> str:
    """The text without control characters, in what the encoding can show; model output may be anything."""
    visible = "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    return visible.encode(encoding, errors="backslashreplace").decode(encoding)
