"""A run's folder has one owner, is never overwritten unasked, and its files are whole."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from plait.batch import Message, Prompt, Sample, Verdict
from plait.errors import ConfigError, PlaitError
from plait.telemetry.run_dir import RunDir, to_plain
from plait.telemetry.samples import SamplesLog, prompt_text, read_samples


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    with RunDir.create(tmp_path / "runs", "a") as first:
        first.write_json("config.json", {"name": "a"})
        first.write_json("summary.json", {"accuracy": 0.5})
        with RunDir.create(tmp_path / "runs", "a") as second:
            second.metrics.write_text("{}\n")
    with RunDir.create(tmp_path / "runs", "a") as third:
        assert [r.path.name for r in (first, second, third)] == ["a", "a-2", "a-3"]
    assert json.loads((first.path / "summary.json").read_text()) == {"accuracy": 0.5}


def test_a_run_without_results_leaves_its_folder_to_the_next(tmp_path):
    with RunDir.create(tmp_path, "a") as run:
        run.write_json("config.json", {"name": "old"})
    with RunDir.create(tmp_path, "a") as run:
        assert run.path.name == "a"
        assert not (run.path / "config.json").exists()


def test_a_folder_or_file_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.txt").write_text("precious")
    (tmp_path / "a-2").write_text("a file")
    with RunDir.create(tmp_path, "a") as run:
        assert run.path.name == "a-3"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["thesis.txt"]


def test_overwriting_removes_a_runs_files_and_nothing_else(tmp_path):
    with RunDir.create(tmp_path, "a") as run:
        run.write_json("summary.json", {})
        (run.checkpoints / "step-1").mkdir(parents=True)
        (run.path / "notes.txt").write_text("mine")
        with pytest.raises(PlaitError, match=f"process {os.getpid()} "):
            RunDir.create(tmp_path, "a", overwrite=True)
    with RunDir.create(tmp_path, "a", overwrite=True) as run:
        assert run.path.name == "a"
        assert {p.name for p in run.path.iterdir()} == {".lock", "notes.txt"}


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "-x", ".hidden", "a b", "a\n"])
def test_a_name_must_be_one_folder(tmp_path, name):
    with pytest.raises(ConfigError, match="becomes a folder"):
        RunDir.create(tmp_path, name)


def test_a_place_that_cannot_be_written_is_a_config_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written.*Choose another folder"):
        RunDir.create(tmp_path / "file", "a")

    def refuse(*args: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(ConfigError, match="Permission denied"):
            RunDir.create(tmp_path, "b")


def test_resuming_needs_a_run(tmp_path):
    with pytest.raises(ConfigError, match="is not a run"):
        RunDir.open(tmp_path / "none")
    with RunDir.create(tmp_path, "a") as run:
        run.write_json("config.json", {"name": "a"})
    with RunDir.open(tmp_path / "a") as again:
        assert again.read_json("config.json") == {"name": "a"}


OWNER = """
import os, sys, time
from pathlib import Path
from plait.telemetry.run_dir import RunDir
run = RunDir.create(Path(sys.argv[1]), "a")
run.write_json("config.json", {})
child = 0
if sys.argv[2] == "fork":
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(reading, 1)  # the worker is running
print(child, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["alone", "fork"])
def test_the_lock_names_its_owner_and_ends_with_it(tmp_path, kind):
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), kind], stdout=subprocess.PIPE, text=True)
    child = 0
    try:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        with pytest.raises(PlaitError, match=f"in use by process {owner.pid} on "):
            RunDir.open(tmp_path / "a")
        with RunDir.create(tmp_path, "a") as other:
            assert other.path.name == "a-2"
        owner.kill()
        owner.wait()
        with RunDir.open(tmp_path / "a") as resumed:  # although its forked worker is still alive
            assert json.loads((resumed.path / ".lock").read_text())["pid"] == os.getpid()
    finally:
        owner.kill()
        owner.wait()
        if child:
            os.kill(child, signal.SIGKILL)
        owner.stdout.close()


def test_json_is_written_whole_and_plain(tmp_path):
    with RunDir.create(tmp_path, "a") as run:
        path = run.write_json(
            "summary.json",
            {
                "nan": float("nan"),
                "np": np.float32(0.5),
                "array": np.arange(2),
                "path": Path("x"),
                "t": (1, "é"),
                3: None,
            },
        )
        assert json.loads(path.read_text()) == {
            "nan": None,
            "np": 0.5,
            "array": [0, 1],
            "path": "x",
            "t": [1, "é"],
            "3": None,
        }
        before = path.read_bytes()
        with pytest.raises(TypeError, match="cannot be written as JSON"):
            run.write_json("summary.json", {"x": object()})
        assert path.read_bytes() == before
        with pytest.raises(AssertionError):
            run.write_json("../x.json", {})
        with pytest.raises(PlaitError, match="cannot be read"):
            run.read_json("plan.json")
        assert {p.name for p in run.path.iterdir()} == {".lock", "summary.json"}
    with pytest.raises(TypeError, match="cannot be a key"):
        to_plain({(1, 2): 3})


def test_an_interrupted_replacement_leaves_the_old_file(tmp_path, monkeypatch):
    with RunDir.create(tmp_path, "a") as run:
        path = run.write_json("summary.json", {"a": 1})

        def full(source: object, target: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            with pytest.raises(PlaitError, match=r"No space left.*Make room"):
                run.write_json("summary.json", {"a": 2})
        assert json.loads(path.read_text()) == {"a": 1}
        assert {p.name for p in run.path.iterdir()} == {".lock", "summary.json"}


def sample(text: str, verdict: Verdict, num_tokens: int = 3) -> Sample:
    prompt = Prompt(id="p1", task="sums", messages=(Message("user", "1+1?"),), answer="2", verifier="exact")
    return Sample(
        id="p1/0",
        prompt=prompt,
        prompt_ids=(1, 2),
        response_ids_R=np.arange(num_tokens, dtype=np.int32),
        rollout_logprobs_R=np.zeros(num_tokens, dtype=np.float32),
        versions_R=np.array([5, 4, 5], dtype=np.int32)[:num_tokens],
        response_mask_R=np.ones(num_tokens, dtype=np.bool_),
        finish="stop",
        seed=11,
        text=text,
        verdict=verdict,
    )


def test_samples_are_written_as_they_are_and_truncated_on_resume(tmp_path):
    path = tmp_path / "samples.jsonl"
    odd = "\u2028 <think>\n\ud800 é \x00"  # a line separator, a lone surrogate, a zero byte
    with SamplesLog(path) as log:
        log.write(1, [sample(odd, Verdict("scored", 1.0, detail="correct", parts={"format": 0.5}))])
        log.write(2, [sample("", Verdict("failed", float("nan"), reason="raised"), 0)])
        with pytest.raises(AssertionError, match="samples of step 1 after"):
            log.write(1, [])
    with open(path, "ab") as file:
        file.write(b'{"id": "p')
    first, second, _ = path.read_bytes().split(b"\n")
    assert json.loads(first) == {
        "id": "p1/0",
        "step": 1,
        "task": "sums",
        "prompt": "1+1?",
        "completion": odd,
        "reward": 1.0,
        "verdict": {"kind": "scored", "detail": "correct", "reason": ""},
        "parts": {"format": 0.5},
        "policy_version": 4,
        "response_tokens": 3,
        "finish": "stop",
        "seed": 11,
        "versions": [[0, 5], [1, 4], [2, 5]],
        "prompt_ids": [1, 2],
        "response_ids": [0, 1, 2],
        "rollout_logprobs": [0.0, 0.0, 0.0],
    }
    assert json.loads(second)["reward"] == 0.0
    assert json.loads(second)["policy_version"] is None
    with SamplesLog.reopen(path, 1) as log:
        log.write(2, [sample("again", Verdict("scored", 0.0, detail="wrong"))])
    assert [json.loads(line)["completion"] for line in path.read_bytes().splitlines()] == [odd, "again"]
    path.write_text('{"id": 1}\n')
    with pytest.raises(PlaitError, match="has no step"):
        SamplesLog.reopen(path, 1)


def test_tokens_come_back_as_they_were_stored(tmp_path):
    path = tmp_path / "samples.jsonl"
    one = sample("a", Verdict("scored", 1.0), 3)
    one.versions_R = np.array([4, 4, 7], dtype=np.int32)
    one.rollout_logprobs_R = np.array([-1 / 3, -1.2345678e-4, np.nan], dtype=np.float32)
    with SamplesLog(path) as log:
        log.write(3, [one, sample("", Verdict("failed", 0.0, reason="empty"), 0)])
    with open(path, "ab") as file:
        file.write(b'{"id": "p')  # of a run that is still writing
    first, empty = read_samples(path)
    assert (first.id, first.step, first.seed, first.versions) == ("p1/0", 3, 11, ((0, 4), (2, 7)))
    assert (first.prompt_ids, first.response_ids) == ((1, 2), (0, 1, 2))
    assert first.rollout_logprobs == (-0.3333333, -0.0001234568, None)
    assert (empty.versions, empty.response_ids) == ((), ())
    assert b"-0.3333333," in path.read_bytes()


def test_samples_of_another_version_are_refused_by_name(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text('{"id": "p", "step": 1, "seed": 3}\n')
    with pytest.raises(PlaitError, match="no usable 'prompt_ids'"):
        read_samples(path)
    with pytest.raises(PlaitError, match="cannot be read"):
        read_samples(tmp_path / "none.jsonl")


def test_prompts_read_as_a_chat():
    two = (Message("system", "Be brief."), Message("user", "Hi"))
    prompt = Prompt(id="p", task="t", messages=two, answer=None, verifier="v", prefix="<think>")
    assert prompt_text(prompt) == "system: Be brief.\n\nuser: Hi\n\nassistant: <think>"
