"""metrics.jsonl: what is accepted, what is on disk, and what a resume leaves of it."""

import builtins
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plait.errors import ConfigError, PlaitError
from plait.telemetry.files import JsonLinesFile
from plait.telemetry.metrics import (
    METRICS,
    STAGES,
    MetricsLog,
    hints_for,
    metric_of,
    read_metrics,
    render,
    render_run,
    run_to_dict,
    to_dict,
)


class FakeClock:
    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_record_holds_kind_step_time_and_values(tmp_path):
    clock = FakeClock(100.0)
    with MetricsLog(tmp_path / "metrics.jsonl", clock=clock) as log:
        clock.now = 101.5
        log.log(1, {"accuracy": 0.25, "tokens_trained": 12, "reward/mean/sums": np.float32(0.5)})
        assert lines(log._file.path) == [
            {
                "kind": "train",
                "step": 1,
                "time_s": 1.5,
                "accuracy": 0.25,
                "tokens_trained": 12,
                "reward/mean/sums": 0.5,
            }
        ]  # while the file is still open: every record is flushed


@pytest.mark.parametrize("name", ["acuracy", "reward/mean/", "reward/mean/<task", "time/unknown_s", ""])
def test_a_name_that_is_not_registered_is_refused(tmp_path, name):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        if name == "reward/mean/<task":
            log.log(1, {name: 1.0})  # any text may be a task's name
        else:
            with pytest.raises(KeyError, match="not a registered metric"):
                log.log(1, {name: 1.0})
            assert lines(tmp_path / "metrics.jsonl") == []


def test_values_that_are_not_finite_become_null_and_are_named(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.log(1, {"grad_norm": math.nan, "loss/total": -math.inf, "entropy": 1.0})
    (record,) = lines(tmp_path / "metrics.jsonl")
    assert record["grad_norm"] is None
    assert record["loss/total"] is None
    assert record["entropy"] == 1.0
    assert record["nonfinite"] == ["grad_norm", "loss/total"]


def test_a_value_that_is_not_a_number_is_refused(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log, pytest.raises(TypeError, match="accuracy is '1'"):
        log.log(1, {"accuracy": "1"})  # type: ignore[dict-item]


def test_steps_rise_within_a_kind_and_do_not_fall_between_kinds(tmp_path):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.log(0, {"eval/accuracy": 0.1}, kind="eval")
        log.log(1, {"accuracy": 0.1})
        log.log(1, {"eval/accuracy": 0.2}, kind="eval")
        assert log.has("eval", 1)
        assert not log.has("train", 2)
        for step, kind in ((1, "train"), (0, "train"), (1, "eval")):
            with pytest.raises(AssertionError, match="steps must rise"):
                log.log(step, {}, kind=kind)
        log.log(5, {}, kind="eval")
        with pytest.raises(AssertionError, match="after another record of step 5"):
            log.log(4, {})


def test_an_existing_file_is_never_overwritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("precious\n")
    with pytest.raises(PlaitError, match="already exists"):
        MetricsLog(path)
    assert path.read_text() == "precious\n"


@pytest.mark.parametrize("torn", ["", '{"kind": "train", "st', '{"kind": "train", "step": 9}', "\0\0\0\n"])
def test_reopen_drops_later_steps_and_a_torn_line_and_continues_the_axes(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    clock = FakeClock()
    with MetricsLog(path, clock=clock) as log:
        log.log(0, {"eval/accuracy": 0.1}, kind="eval")
        for step in (1, 2, 3, 4):
            clock.now = step * 10.0
            log.log(step, {"accuracy": step / 10})
    with open(path, "a") as file:
        file.write(torn)
    clock.now = 5000.0
    with MetricsLog.reopen(path, 2, clock=clock) as log:
        assert log.has("train", 2)
        assert log.has("eval", 0)
        clock.now = 5001.0
        log.log(3, {"accuracy": 0.9})
    assert [(r["kind"], r["step"], r["time_s"]) for r in lines(path)] == [
        ("eval", 0, 0.0),
        ("train", 1, 10.0),
        ("train", 2, 20.0),
        ("train", 3, 21.0),
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_reopen_begins_a_missing_file(tmp_path):
    with MetricsLog.reopen(tmp_path / "metrics.jsonl", 0) as log:
        log.log(1, {"accuracy": 0.5})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize("content", ['broken\n{"kind": "train", "step": 1, "time_s": 1}\n', '{"a": 1}\n'])
def test_reopen_refuses_damage_that_no_crash_makes(tmp_path, content):
    path = tmp_path / "metrics.jsonl"
    path.write_text(content)
    with pytest.raises(PlaitError, match=r"metrics\.jsonl"):
        MetricsLog.reopen(path, 5)
    assert path.read_text() == content
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_reading_leaves_out_a_line_being_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1, "time_s": 1.0}\n{"kind": "tr')
    assert [r["step"] for r in read_metrics(path)] == [1]
    with pytest.raises(PlaitError, match="cannot be read"):
        read_metrics(tmp_path / "none.jsonl")


def test_a_full_disk_is_reported_with_what_to_do(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    file = JsonLinesFile(path, exclusive=False)
    with pytest.raises(PlaitError, match=r"No space left.*Make room"):
        file.append({"a": 1})
    file.close()


def test_hints_come_once_and_only_where_the_value_looks_odd():
    shown: set[str] = set()
    first = hints_for({"loss/policy": 1e-6, "grad_norm": 0.5, "clip/binds_share": 0.1, "gap/mean": 0.01}, shown)
    assert len(first) == 2
    assert "see grad_norm" in first[0]
    assert "bfloat16" in first[1]
    assert hints_for({"loss/policy": 0.0, "clip/binds_share": 0.0}, shown) == [METRICS["clip/binds_share"].hint]
    assert hints_for({"loss/policy": 0.0, "clip/binds_share": 0.0, "kl/reference": math.nan}, shown) == []


def test_the_registry_is_complete_and_says_what_each_metric_is():
    for stage in STAGES:
        assert f"time/{stage}_s" in METRICS
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.definition.endswith("."), name
        assert metric.expected, name
        assert (metric.hint == "") == (metric.hint_when is None), name
    assert metric_of("eval/accuracy/sums") is METRICS["eval/accuracy/<task>"]
    assert metric_of("eval/accuracy_low") is METRICS["eval/accuracy_low"]
    assert json.loads(json.dumps(to_dict()))["accuracy"]["unit"] == "share"


def show(table: object) -> str:
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=200)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_tables_show_registry_and_run():
    assert "reward/mean/<task>" in show(render())
    records = [
        {"kind": "train", "step": 1, "time_s": 1.0, "accuracy": 0.25, "grad_norm": 2.0},
        {
            "kind": "train",
            "step": 2,
            "time_s": 2.0,
            "accuracy": 0.75,
            "grad_norm": None,
            "nonfinite": ["grad_norm"],
        },
        {"kind": "train", "step": 3, "time_s": 3.0, "accuracy": 0.5, "of another version": 1.0},
    ]
    summary = run_to_dict(records)
    assert summary["accuracy"] == {
        "records": 3,
        "first": 0.25,
        "last": 0.5,
        "min": 0.25,
        "max": 0.75,
        "last_step": 3,
        "nonfinite": 0,
    }
    assert summary["grad_norm"]["nonfinite"] == 1
    assert summary["grad_norm"]["max"] == 2.0
    text = show(render_run(records))
    assert "not finite" in text
    assert "not a metric of this version" in text


def test_tensorboard_shows_the_same_values_and_withdraws_what_a_resume_repeats(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path, tensorboard=True) as log:
        log.log(1, {"accuracy": 0.25, "grad_norm": math.nan})
        log.log(2, {"accuracy": 0.5})
    with MetricsLog.reopen(path, 1, tensorboard=True) as log:
        log.log(2, {"accuracy": 0.75})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["accuracy"]
    assert [(e.step, e.value) for e in events.Scalars("accuracy")] == [(1, 0.25), (2, 0.75)]


def test_a_missing_tensorboard_is_a_config_error_and_leaves_nothing(tmp_path, monkeypatch):
    original = builtins.__import__

    def without_tensorboard(name: str, *args: object, **kwargs: object) -> object:
        if name.startswith("tensorboard"):
            raise ImportError("No module named 'tensorboard'")
        return original(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "plait.telemetry.tensorboard", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_tensorboard)
    with pytest.raises(ConfigError, match=r'pip install "plait\[tensorboard\]"'):
        MetricsLog(tmp_path / "metrics.jsonl", tensorboard=True)
    assert list(tmp_path.iterdir()) == []


def test_importing_the_torch_free_modules_loads_neither_torch_nor_rich():
    code = (
        "import sys, plait.telemetry.metrics, plait.telemetry.trace, plait.telemetry.run_dir\n"
        "import plait.telemetry.samples, plait.telemetry.progress, plait.telemetry.stats\n"
        "print([m for m in ('torch', 'rich', 'tensorboard', 'pydantic') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
