"""The display on pipes, on terminals narrow and wide, and on streams that fail."""

import io

import pytest

from plait.telemetry.progress import Progress, duration, printable

METRICS = {
    "reward/mean": 0.43123,
    "accuracy": 0.40625,
    "response_tokens/mean": 85.4,
    "reasoning_share": 0.984,
    "throughput/generated_tokens_per_s": 1234.5,
}
STAGES = {"generate": 1.25, "update_policy": 0.75, "advantage": 0.0001}


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Stream(io.StringIO):
    def __init__(self, encoding: str = "utf-8", is_terminal: bool = False):
        super().__init__()
        self._encoding = encoding
        self._is_terminal = is_terminal

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._is_terminal

    def write(self, text: str) -> int:
        text.encode(self._encoding)
        return super().write(text)


def test_a_plain_line_says_what_matters():
    stream = Stream()
    with Progress(12, stream=stream, clock=FakeClock()) as progress:
        progress.step(2, METRICS, STAGES, step_s=2.0)
    assert stream.getvalue() == (
        "step 2/12  reward 0.431  accuracy 0.406  length 85  reasoning 0.98  1234 tok/s  "
        "2.0s (gen 1.2s update 0.8s)  left 20s\n"
    )


def test_time_left_is_that_of_recent_steps_and_missing_metrics_show_as_a_dash():
    stream = Stream()
    with Progress(100, stream=stream, clock=FakeClock(), min_interval_s=0) as progress:
        for step in range(1, 31):
            progress.step(step, {"accuracy": float("nan")}, {}, step_s=100.0 if step <= 20 else 1.0)
    last = stream.getvalue().splitlines()[-1]
    assert last == "step 30/100  reward -  accuracy nan  length -  reasoning -  - tok/s  1.0s  left 1m10s"


def test_lines_come_at_most_every_two_seconds_and_the_last_always():
    stream, clock = Stream(), FakeClock()
    with Progress(10, stream=stream, clock=clock) as progress:
        for step in range(1, 9):
            progress.step(step, METRICS, STAGES, step_s=0.5)
            clock.now += 0.5
        progress.note("a warning")
    shown = [line.split()[1] for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert shown == ["1/10", "5/10", "8/10"]
    assert "a warning\n" in stream.getvalue()

    stream = Stream()
    with Progress(3, stream=stream, clock=FakeClock()) as progress:
        for step in (1, 2, 3):
            progress.step(step, METRICS, STAGES, step_s=0.5)
    assert [line.split()[1] for line in stream.getvalue().splitlines()] == ["1/3", "3/3"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
@pytest.mark.parametrize("columns", ["20", "80", "200"])
@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_terminals_of_every_width_and_encoding(monkeypatch, encoding, columns, term):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "10")
    monkeypatch.setenv("TERM", term)
    stream = Stream(encoding, is_terminal=True)
    with Progress(30, stream=stream) as progress:
        progress.stage("generate")
        for step in range(1, 31):
            progress.step(step, METRICS, STAGES, step_s=2.0)
            progress.note("日本語 \x1b[31m red … [bold]as written[/bold]")
        assert not progress._is_broken
    text = stream.getvalue()
    assert "30/30" in text
    assert "\x1b[31m" not in text
    assert "[bold]as" in text
    if encoding == "ascii":
        assert "\\u65e5" in text
    if columns == "200" and term == "xterm":
        assert "gen 1.2s update 0.8s" in text


class Broken(Stream):
    """Fails at the n-th write."""

    def __init__(self, good_writes: int, error: Exception, is_terminal: bool):
        super().__init__(is_terminal=is_terminal)
        self.left = good_writes
        self.error = error

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ValueError("closed")])
@pytest.mark.parametrize("good_writes", [0, 1, 2, 5])
def test_a_stream_that_fails_does_not_end_the_run(monkeypatch, is_terminal, error, good_writes):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress(9, stream=Broken(good_writes, error, is_terminal), clock=FakeClock(), min_interval_s=0)
    with progress:
        for step in range(1, 10):
            progress.step(step, METRICS, STAGES, step_s=1.0)
            progress.note("still here")
    progress.close()
    assert progress._is_broken


def test_a_closed_stream_does_not_end_the_run():
    stream = Stream()
    stream.close()
    with Progress(2, stream=stream) as progress:
        progress.step(1, METRICS, STAGES, step_s=1.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0s"),
        (59.4, "59s"),
        (200, "3m20s"),
        (3720, "1h02m"),
        (2 * 86400 + 3 * 3600, "2d03h"),
        (float("inf"), "?"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_control_characters_are_spelled_out():
    assert printable("a\x1b[2Jb\r\n\tc", "utf-8") == "a\\x1b[2Jb\\r\n\tc"
