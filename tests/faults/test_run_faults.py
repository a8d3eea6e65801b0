"""Whole runs on bad ground: full disks, folders without rights, two processes, verifiers that misbehave."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from plait.errors import ConfigError, PlaitError
from plait.jobs.train import resume, train

pytestmark = pytest.mark.timeout(300)

ROWS = [{"id": f"r{i}", "prompt": f"Say {i}", "answer": str(i)} for i in range(20)]
VERIFIERS = '''
import os, sys, time

def letters(samples):
    """Share of ASCII letters in what was said."""
    return [sum(c.isascii() and c.isalpha() for c in s.completion) / max(len(s.completion), 1) for s in samples]

def allocate():
    kept = []
    while True: kept.append(bytearray(2**20))

def burn():
    while True: pass

def flood():
    for _ in range(256): print("x" * 2**20)

FAULTS = [lambda: time.sleep(1000), burn, allocate, lambda: os._exit(3), lambda: sys.exit(3), lambda: 1 / 0, flood]

def misbehaves(samples):
    """The first sample of prompt n does fault n; all others are judged."""
    for s in samples:
        if s.id.endswith("#0") and s.prompt.payload["fault"] is not None:
            FAULTS[s.prompt.payload["fault"]]()
    return letters(samples)
'''
RECIPE = """
name = "toy"
model = {{ path = "{model}", compute_dtype = "float32", num_threads = 1 }}
batch = {{ num_prompts_per_step = 4, num_samples_per_prompt = 4, num_tokens_per_microbatch = 512 }}
rollout = {{ max_prompt_tokens = 40, max_completion_tokens = 12 }}
optimizer = {{ learning_rate = 1e-2 }}
train = {{ num_steps = 4 }}
evaluation = {{ num_prompts = 4, num_samples_per_prompt = 2 }}
checkpoint = {{ every_steps = 2 }}
[[tasks]]
source = "rows"
path = "rows.jsonl"
verifier = "fault_verifiers:letters"
"""
LIMITED = """
import json, resource, sys
from pathlib import Path
from plait.errors import PlaitError
from plait.jobs.train import resume, train
from plait.recipe import load_run_config
from safetensors.torch import load_file

def attempt(function):
    try:
        function()
    except PlaitError as error:  # any other error is a bug, and ends this program with a traceback
        return str(error)
    return ""

def weights(folder):
    return load_file(folder / "checkpoints" / "step-4" / "policy.safetensors")

config = load_run_config("toy.toml")
train(config, run_dir=Path("whole"), recipe_dir=Path.cwd(), progress=False)
whole, unlimited = weights(Path("whole")), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
if sys.argv[1] == "export":
    from plait.executor import workers
    export, folder = workers.export, Path("export")
    def export_on_a_full_disk(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, unlimited))
        try:
            export(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    workers.export = export_on_a_full_disk
    said = attempt(lambda: train(config, run_dir=folder, recipe_dir=Path.cwd(), progress=False))
    left = sorted(path.name for path in folder.iterdir() if "model" in path.name)
    workers.export = export
    resume(folder, progress=False)
    print(json.dumps({"said": said, "left": left, "model": (folder / "model" / "model.safetensors").exists()}))
    sys.exit()
for limit in map(int, sys.argv[1:]):
    folder = Path(f"limit-{limit}")
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited))
    first = attempt(lambda: train(config, run_dir=folder, recipe_dir=Path.cwd(), progress=False))
    again = attempt(lambda: resume(folder, progress=False)) if (folder / "config.json").exists() else first
    resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
    if (folder / "config.json").exists():
        resume(folder, progress=False)
    else:
        train(config, run_dir=folder, recipe_dir=Path.cwd(), progress=False)
    now = weights(folder)
    equal = all((now[name] == whole[name]).all() for name in whole)
    summary = (folder / "summary.json").exists() and (folder / "model" / "model.safetensors").exists()
    print(json.dumps({"limit": limit, "first": first, "again": again, "equal": bool(equal), "complete": summary}))
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A folder with the recipe, its rows and verifiers and a model; the working directory."""
    from plait.recipe import load_run_config

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from random_models import write_random_model

    model = write_random_model(tmp_path / "model", "60k")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "fault_verifiers.py").write_text(VERIFIERS)
    (tmp_path / "toy.toml").write_text(RECIPE.format(model=model))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "fault_verifiers", raising=False)
    return lambda *overrides: load_run_config("toy.toml", overrides)


def python(program: str, *arguments: str, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, **more)


def test_a_disk_that_fills_at_any_file_costs_one_sentence_and_no_result(lab):
    """Whatever file is the first that no longer fits: one sentence, twice the same, and the run can be finished."""
    limits = ("600", "1500", "2500", "6000", "40000", "150000", "300000")
    done = python(LIMITED, *limits)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["limit"] for row in found] == [int(limit) for limit in limits]
    for row in found:
        assert row["equal"], row
        assert row["complete"], row
        for text in (row["first"], row["again"]):
            assert "File too large" in text, row
            assert "\n" not in text, row
    # The files that fill it are different ones.
    assert len({row["first"].partition(":")[0].partition(" ")[0].rpartition("/")[2] for row in found}) >= 4, found


def test_a_disk_that_is_full_for_the_trained_model_leaves_no_half_of_it(lab):
    done = python(LIMITED, "export")
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found["said"].startswith("export/model: the trained model cannot be written: ")
    assert "Make room" in found["said"]
    assert found["left"] == []
    assert found["model"]


NO_RIGHTS = """
import os, sys
from pathlib import Path
root = Path(sys.argv[1])
from plait.errors import PlaitError
from plait.telemetry.checkpoint import CheckpointStore
from plait.telemetry.metrics import MetricsLog
from plait.telemetry.run_dir import RunDir
from plait.telemetry.samples import SamplesLog
from plait.telemetry.trace import Trace
if os.getuid() == 0:  # nothing is forbidden to the superuser
    os.setgid(65534)
    os.setuid(65534)

def attempt(name, function):
    try:
        function()
        print(name, "| went through")
    except PlaitError as error:
        print(name, "|", type(error).__name__, "|", str(error))

attempt("create", lambda: RunDir.create(root / "closed", "a"))
attempt("open", lambda: RunDir.open(root / "closed" / "run"))
attempt("hidden", lambda: RunDir.open(root / "hidden" / "run"))
attempt("save", lambda: CheckpointStore(root / "closed" / "run" / "checkpoints", 1).save(3, {}, {}))
attempt("load", lambda: CheckpointStore(root / "unreadable", 1).load(root / "unreadable" / "step-1"))
attempt("metrics", lambda: MetricsLog.reopen(root / "closed" / "run" / "metrics.jsonl", 0))
attempt("samples", lambda: SamplesLog.reopen(root / "closed" / "run" / "samples.jsonl", 0))
attempt("trace", lambda: Trace.load(root / "closed" / "run" / "trace.json", "cpu:0", last_step=0).write(
    root / "closed" / "run" / "trace.json"))
"""


def test_folders_without_rights_cost_one_sentence_each():
    from plait.telemetry.checkpoint import CheckpointStore

    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        root.chmod(0o755)  # pytest's own folders are closed to others
        run = root / "closed" / "run"
        (run / "checkpoints").mkdir(parents=True)
        (run / "config.json").write_text("{}")
        (root / "hidden" / "run").mkdir(parents=True)
        (root / "hidden" / "run" / "config.json").write_text("{}")
        unreadable = CheckpointStore(root / "unreadable", 1).save(1, {}, {}) / "state.json"
        unreadable.chmod(0o000)
        for folder, rights in ((run / "checkpoints", 0o555), (run, 0o555), (run.parent, 0o555)):
            folder.chmod(rights)
        (root / "hidden").chmod(0o000)
        try:
            done = python(NO_RIGHTS, str(root), env=os.environ | {"HOME": temporary})
        finally:
            for folder in (root / "hidden", run.parent, run, run / "checkpoints"):
                folder.chmod(0o755)
    assert done.returncode == 0, done.stderr[-3000:]
    said = {line.partition(" |")[0]: line for line in done.stdout.splitlines()}
    assert said.keys() == {"create", "open", "hidden", "save", "load", "metrics", "samples", "trace"}
    for line in said.values():
        assert "Permission denied" in line, line
    assert said["create"].split(" | ")[1] == "ConfigError"
    assert said["load"].split(" | ")[1] == said["save"].split(" | ")[1] == "CheckpointError"


OWNER = """
import sys, time
from pathlib import Path
from plait.telemetry.run_dir import RunDir
with RunDir.open(Path(sys.argv[1])):
    print("mine", flush=True)
    time.sleep(200)
"""


def test_a_second_process_on_a_run_is_refused_and_disturbs_nothing(lab):
    train(lab("train.num_steps=2"), run_dir=Path("r"), recipe_dir=Path.cwd(), progress=False)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, "r"], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "mine\n"
        before = {path: path.read_bytes() for path in Path("r").rglob("*") if path.is_file()}
        with pytest.raises(PlaitError, match=rf"^r is in use by process {owner.pid} on \S+\. Wait for it[^\n]*$"):
            resume(Path("r"), ["train.num_steps=4"], progress=False)
        with pytest.raises(ConfigError, match="holds a run already"):
            train(lab(), run_dir=Path("r"), recipe_dir=Path.cwd(), progress=False)
        assert {path: path.read_bytes() for path in Path("r").rglob("*") if path.is_file()} == before
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert resume(Path("r"), ["train.num_steps=4"], progress=False).steps == 4


def test_a_named_folder_that_another_process_is_starting_in_is_refused(lab):
    """Its config.json is not there yet; the second run must not quietly go elsewhere."""
    from plait.telemetry.run_dir import RunDir

    with RunDir.create(Path.cwd(), "r"), pytest.raises(ConfigError, match=r'"r" is not free'):
        train(lab(), run_dir=Path("r"), recipe_dir=Path.cwd(), progress=False)
    assert not Path("r-2").exists()
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep")
    with pytest.raises(ConfigError, match=r'"mine" is not free'):
        train(lab(), run_dir=Path("mine"), recipe_dir=Path.cwd(), progress=False)
    assert [path.name for path in Path("mine").iterdir()] == ["notes.txt"]


@pytest.mark.skipif(sys.platform != "linux", reason="workers have their limits on Linux")
def test_misbehaving_verifiers_cost_their_samples_and_the_run_goes_on(lab):
    """Sleeps, burns, allocates, exits in two ways, raises, prints: all named, all others judged."""
    rows = [row | {"fault": i % 10 if i % 10 < 7 else None} for i, row in enumerate(ROWS)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = lab(
        *("tasks.0.verifier=fault_verifiers:misbehaves", "tasks.0.holdout_share=0.0", "train.num_steps=5"),
        *("evaluation.at_start=false", "evaluation.at_end=false", "verifiers.timeout_s=2.0", "verifiers.num_workers=2"),
        *(f"verifiers.memory_bytes={768 * 2**20}", "logging.samples_per_step=16"),
    )
    result = train(config, run_dir=Path("r"), recipe_dir=Path.cwd(), progress=False)
    assert (result.steps, result.stopped) == (5, "")
    records = [json.loads(line) for line in Path("r/samples.jsonl").read_text().splitlines()]
    assert len(records) == 5 * 16
    fault_of = {f"rows/{row['id']}": row["fault"] for row in rows}
    reasons = {}
    for record in records:
        prompt, _, number = record["id"].partition("#")
        fault = fault_of[prompt.partition("@")[0]] if number == "0" else None
        # Printing is no failure; all the others are, and of no sibling.
        assert (record["verdict"]["kind"] == "failed") == (fault is not None and fault != 6), record
        if record["verdict"]["kind"] == "failed":
            reasons[fault] = record["verdict"]["reason"]
    assert reasons.keys() == {0, 1, 2, 3, 4, 5}
    words = {0: "2 s", 1: "2 s", 2: "memory", 3: "exit", 4: "SystemExit", 5: "ZeroDivisionError"}
    for fault, said in words.items():
        assert said in reasons[fault], (fault, reasons[fault])
    assert result.num_failed_samples == sum(r["verdict"]["kind"] == "failed" for r in records)
