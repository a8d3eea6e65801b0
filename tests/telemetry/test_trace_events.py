"""The trace as Perfetto reads it, its bound on memory, and its axis across a resume."""

import json

import pytest

from plait.errors import PlaitError
from plait.telemetry.trace import Trace


class FakeClock:
    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_spans_are_complete_events_in_microseconds_on_named_rows():
    clock = FakeClock(50.0)
    trace = Trace(clock=clock)
    clock.now = 51.0
    with trace.span("generate", step=1, num_tokens=7):
        clock.now = 53.5
    with trace.span("update_policy", step=1, thread="policy"):
        clock.now = 54.0
    data = json.loads(json.dumps(trace.to_dict()))
    spans = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["ts"], e["dur"], e["args"]) for e in spans] == [
        ("generate", 1e6, 2.5e6, {"step": 1, "num_tokens": 7}),
        ("update_policy", 3.5e6, 0.5e6, {"step": 1}),
    ]
    names = {
        (e["name"], e["pid"], e["tid"]): e["args"]["name"]
        for e in data["traceEvents"]
        if e["ph"] == "M" and "name" in e["args"]
    }
    pid = spans[0]["pid"]
    assert names == {
        ("process_name", pid, 0): "cpu:0",
        ("thread_name", pid, spans[0]["tid"]): "generate",
        ("thread_name", pid, spans[1]["tid"]): "policy",
    }
    assert trace.seconds_per_stage() == {"generate": 2.5, "update_policy": 0.5}


def test_a_span_that_raises_is_recorded():
    clock = FakeClock()
    trace = Trace(clock=clock)

    def fail() -> None:
        with trace.span("generate", step=1):
            clock.now = 2.0
            raise KeyError("generate")

    with pytest.raises(KeyError):
        fail()
    assert trace.seconds_per_stage() == {"generate": 2.0}


def test_memory_is_bounded_and_totals_are_not():
    trace = Trace(clock=FakeClock(), max_events=3)
    for i in range(5):
        trace.record("generate", i, i + 1.0, step=i)
    assert trace.num_dropped == 2
    assert trace.seconds_per_stage() == {"generate": 5.0}
    data = trace.to_dict()
    assert [e["args"]["step"] for e in data["traceEvents"] if e["ph"] == "X"] == [2, 3, 4]
    assert data["metadata"]["dropped_events"] == 2


def test_a_resumed_trace_keeps_earlier_spans_and_continues_the_axis(tmp_path):
    path = tmp_path / "trace.json"
    trace = Trace(clock=FakeClock(), max_events=3)
    for i in range(4):
        trace.record("generate", i, i + 0.5, step=i, device="cpu:1" if i == 2 else "")
    trace.record("advantage", 3.5, 3.6, step=3)
    trace.write(path)

    clock = FakeClock(900.0)
    resumed = Trace.load(path, last_step=2, clock=clock)
    assert resumed.now_s() == pytest.approx(2.5)
    assert resumed.num_dropped == 2
    assert resumed.seconds_per_stage() == pytest.approx({"generate": 1.5, "advantage": 0.0}, abs=1e-9)
    clock.now = 901.0
    with resumed.span("generate", step=3, device="cpu:1"):
        clock.now = 902.0
    spans = [e for e in resumed.to_dict()["traceEvents"] if e["ph"] == "X"]
    assert [(e["args"]["step"], e["ts"]) for e in spans] == [(2, 2e6), (3, pytest.approx(3.5e6))]
    assert spans[0]["pid"] == spans[1]["pid"]
    assert spans[0]["tid"] == spans[1]["tid"]
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]

    everything = Trace.load(path, clock=clock)
    assert everything.now_s() == pytest.approx(3.6)
    assert everything.seconds_per_stage() == pytest.approx({"generate": 2.0, "advantage": 0.1})


def test_nothing_written_yet_loads_as_an_empty_trace(tmp_path):
    assert Trace.load(tmp_path / "trace.json").seconds_per_stage() == {}


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": []}', '{"metadata": {}, "traceEvents": [{}]}'])
def test_a_file_that_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(PlaitError, match="is not a trace"):
        Trace.load(path)


def test_a_trace_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(PlaitError, match="cannot be written"):
        Trace(clock=FakeClock()).write(tmp_path / "none" / "trace.json")
