"""What a resumed run may change: freely, by name, or never; and that every change is said."""

import json
from pathlib import Path

import pytest

from plait.errors import ConfigError, PlaitError
from plait.jobs import resume_changes
from plait.jobs.train import resume, train


def start(config, folder="r"):
    return train(config, run_dir=Path(folder), recipe_dir=Path.cwd(), progress=False)


def go_on(*overrides, accepted=(), folder="r"):
    return resume(Path(folder), overrides, accepted=accepted, progress=False)


def origin(folder="r"):
    return json.loads((Path(folder) / "run.json").read_text())


def unchanged(folder="r"):
    """What a refusal must leave alone."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture
def two_steps(toy):
    start(toy("train.num_steps=2"))
    return toy


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("optimizer.learning_rate=0.5", "optimizer.learning_rate"),
        ("seed=7", "seed"),
        ("batch.num_tokens_per_microbatch=256", "batch.num_tokens_per_microbatch"),
        ("tasks.0.holdout_share=0.3", "tasks.0.holdout_share"),
        ("verifiers.num_workers=0", "verifiers.num_workers"),
        ("verifiers.timeout_s=1.0", "verifiers.timeout_s"),
        ("evaluation.num_prompts=5", "evaluation.num_prompts"),
    ],
)
def test_a_setting_that_changes_the_run_is_refused_until_it_is_named(two_steps, override, name):
    before = unchanged()
    with pytest.raises(ConfigError, match=rf"(?m)^{name}: .*--accept {name}$") as caught:
        go_on("train.num_steps=3", override)
    assert len(caught.value.violations) == 1
    assert unchanged() == before
    assert go_on("train.num_steps=3", override, accepted=[name]).steps == 3
    record = origin()["changes"][0]
    assert record["after_step"] == 2
    assert [line.partition(":")[0] for line in record["changes"]] == sorted([name, "train.num_steps"])
    # Accepted once, it is the run's own setting.
    assert go_on("train.num_steps=4").steps == 4


def test_all_changes_are_refused_at_once_and_a_section_accepts_what_is_in_it(two_steps):
    overrides = ("train.num_steps=3", "optimizer.learning_rate=0.5", "optimizer.eps=1e-7", "seed=2")
    with pytest.raises(ConfigError) as caught:
        go_on(*overrides)
    assert [v.where for v in caught.value.violations] == ["optimizer.eps", "optimizer.learning_rate", "seed"]
    with pytest.raises(ConfigError) as caught:
        go_on(*overrides, accepted=["optimizer"])
    assert [v.where for v in caught.value.violations] == ["seed"]
    assert go_on(*overrides, accepted=["optimizer", "seed"]).steps == 3


def test_what_decides_no_step_is_free(two_steps):
    free = ("checkpoint.keep=1", "checkpoint.every_steps=1", "logging.samples_per_step=3", "evaluation.at_end=false")
    assert go_on("train.num_steps=3", "train.wall_clock_limit_s=500.0", "verifiers.num_workers=2", *free).steps == 3


def test_the_checkpoints_own_kind_of_state_cannot_be_changed(two_steps):
    with pytest.raises(ConfigError, match=r"optimizer\.name: 'adamw' -> 'sgd'.*start a new run"):
        go_on("train.num_steps=3", "optimizer.name=sgd", accepted=["optimizer.name"])


def test_fewer_steps_than_were_made_are_refused(two_steps):
    with pytest.raises(ConfigError, match=r"train\.num_steps: 1 steps are asked for.*step 2.*2 or more"):
        go_on("train.num_steps=1")


def test_rows_that_changed_are_refused_by_name(two_steps):
    rows = Path("rows.jsonl").read_bytes()
    Path("rows.jsonl").write_bytes(rows.replace(b"Say 7", b"Say 8"))
    before = unchanged()
    with pytest.raises(ConfigError, match=r"tasks\.0\.path: .*rows .*--accept tasks\.0\.path"):
        go_on("train.num_steps=3")
    assert unchanged() == before
    Path("rows.jsonl").write_bytes(rows)
    assert go_on("train.num_steps=3").steps == 3
    Path("rows.jsonl").write_bytes(rows.replace(b"Say 7", b"Say 8"))
    assert go_on("train.num_steps=4", accepted=["tasks.0.path"]).steps == 4
    assert any(line.startswith("tasks.0.path: ") for line in origin()["changes"][-1]["changes"])


def test_the_same_rows_elsewhere_are_the_same_rows(two_steps):
    Path("moved.jsonl").write_bytes(Path("rows.jsonl").read_bytes())
    Path("rows.jsonl").unlink()
    assert go_on("train.num_steps=3", "tasks.0.path=moved.jsonl").steps == 3
    assert "with the same content" in origin()["changes"][0]["changes"][0]


def test_evaluation_rows_that_changed_are_refused_by_name(toy):
    Path("held.jsonl").write_text(json.dumps({"prompt": "Say 99", "answer": "99"}) + "\n")
    start(toy("train.num_steps=2", "tasks.0.eval_path=held.jsonl"))
    Path("held.jsonl").write_text(json.dumps({"prompt": "Say 98", "answer": "98"}) + "\n")
    with pytest.raises(ConfigError, match=r"--accept tasks\.0\.eval_path"):
        go_on("train.num_steps=3")


def test_a_verifier_whose_source_changed_is_refused_by_name(two_steps):
    source = Path("toy_verifier.py").read_text()
    Path("toy_verifier.py").write_text(source + "\n# another\n")
    with pytest.raises(ConfigError, match=r"tasks\.0\.verifier: .*toy_verifier:letters.*--accept tasks\.0\.verifier"):
        go_on("train.num_steps=3")
    assert go_on("train.num_steps=3", accepted=["tasks.0.verifier"]).steps == 3


def test_a_verifier_that_only_rows_name_counts_too(toy):
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    rows[3]["verifier"] = "other:judge"
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("other.py").write_text("def judge(samples):\n    return [0.0 for s in samples]\n")
    start(toy("train.num_steps=2"))
    Path("other.py").write_text("def judge(samples):\n    return [1.0 for s in samples]\n")
    with pytest.raises(ConfigError, match=r"tasks\.0\.verifier: .*other:judge"):
        go_on("train.num_steps=3")


def test_a_model_folder_that_changed_is_refused_and_another_architecture_always(toy, tiny_model, tmp_path):
    import shutil

    folder = tmp_path / "mine"
    shutil.copytree(tiny_model, folder)
    start(toy("train.num_steps=2", f"model.path={folder}"))
    (folder / "README.md").write_text("notes")
    assert go_on("train.num_steps=3").steps == 3
    settings = folder / "generation_config.json"
    settings.write_text(settings.read_text() + "\n")
    with pytest.raises(ConfigError, match=r"model\.path: .*generation_config\.json.*--accept model\.path"):
        go_on("train.num_steps=4")
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    with pytest.raises(ConfigError, match=r"model\.path: .*start a new run"):
        go_on("train.num_steps=4", accepted=["model.path"])


def test_another_reasoning_gym_is_refused_and_another_torch_is_noted(toy, monkeypatch):
    from plait.telemetry.progress import Progress

    config = toy(
        "train.num_steps=1",
        "rollout.max_prompt_tokens=100",
        'tasks=[{ source = "reasoning_gym", task = "chain_sum", params = { max_terms = 2 } }]',
    )
    start(config)
    saved = origin()
    versions = saved["versions"] | {"torch": "1.0"}
    Path("r/run.json").write_text(json.dumps(saved | {"versions": versions}))
    notes = []
    monkeypatch.setattr(Progress, "note", lambda self, text: notes.append(text))
    go_on("train.num_steps=2")
    assert any("torch 1.0 -> " in note for note in notes)
    assert "going on after step 1 of 2; left: 1 steps, 16 samples, 1 updates" in notes
    inputs = saved["inputs"] | {"tasks.0.task": {"reasoning-gym": "0.0.1"}}
    Path("r/run.json").write_text(json.dumps(saved | {"inputs": inputs}))
    with pytest.raises(ConfigError, match=r"tasks\.0\.task: .*reasoning-gym 0\.0\.1 -> .*--accept tasks\.0\.task"):
        go_on("train.num_steps=3")
    with pytest.raises(ConfigError, match=r"tasks\.0\.params\.max_terms: 2 -> 3"):
        go_on("train.num_steps=3", "tasks.0.params.max_terms=3", accepted=["tasks.0.task"])


def test_a_run_that_failed_to_resume_keeps_its_settings(two_steps, monkeypatch):
    """What was accepted is recorded once everything is there, not before."""
    before = {name: Path("r", name).read_bytes() for name in ("config.json", "run.json")}
    from plait.jobs import train as job

    def broken(*arguments):
        raise PlaitError("no workers today")

    with monkeypatch.context() as patch:
        patch.setattr(job, "_open_scorers", broken)
        with pytest.raises(PlaitError, match="no workers"):
            go_on("train.num_steps=3", "seed=9", accepted=["seed"])
    assert {name: Path("r", name).read_bytes() for name in before} == before


def test_a_run_of_another_version_is_refused(two_steps):
    data = origin()
    del data["inputs"]
    Path("r/run.json").write_text(json.dumps(data))
    with pytest.raises(PlaitError, match=r"does not say inputs.*that version"):
        go_on("train.num_steps=3")


@pytest.mark.parametrize(
    ("optimizer", "done", "steps", "said"),
    [
        # Constant without warm-up: the rate does not depend on the number of steps.
        ({}, 10, 40, ""),
        # 2 of 20 updates warm up, 4 of 40: the same rates once both are over.
        ({"warmup_share": 0.1}, 10, 40, ""),
        # Update 3 of 20 is past the warm-up; of 40 it is the third of four: 3/4 of 0.01.
        ({"warmup_share": 0.1}, 2, 40, "update 3 would have the learning rate 0.0075 instead of 0.01"),
        # Linear: after 10 of 20 updates 1/2 of the rate is left, after 10 of 40 3/4.
        ({"schedule": "linear"}, 10, 40, "update 11 would have the learning rate 0.0075 instead of 0.005"),
        # Over: it ended at 1/20, and goes on from 1 - 20/40.
        ({"schedule": "linear"}, 20, 40, "ended at 0.0005 and would go on from 0.005"),
    ],
)
def test_another_number_of_steps_is_judged_by_the_learning_rates_to_come(toy, optimizer, done, steps, said):
    settings = [f"optimizer.{key}={value}" for key, value in optimizer.items()]
    before, after = toy("train.num_steps=20", *settings), toy(f"train.num_steps={steps}", *settings)
    (change,) = resume_changes.changes(before, after, {}, {}, done)
    assert change.where == "train.num_steps"
    assert change.effect.endswith(said) if said else change.effect == ""


def test_a_longer_schedule_is_accepted_by_name(toy):
    start(toy("train.num_steps=2", "optimizer.schedule=cosine"))
    with pytest.raises(ConfigError, match=r"train\.num_steps: 2 -> 3.*--accept train\.num_steps"):
        go_on("train.num_steps=3")
    assert go_on("train.num_steps=3", accepted=["train.num_steps"]).steps == 3


def test_a_name_accepted_for_nothing_is_said():
    assert resume_changes.notes_on([], ["seed"]) == ["--accept seed: nothing has changed there"]
