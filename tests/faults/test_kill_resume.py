"""Runs killed with SIGKILL at random moments and resumed equal the run that was never stopped; see the benchmark."""

import importlib
from pathlib import Path

import pytest

from plait.jobs.train import resume, train
from plait.jobs.training_run import TrainingRun

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def kill_resume(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("kill_resume")


@pytest.fixture
def model(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("random_models").write_random_model(tmp_path / "model", "60k")


@pytest.mark.timeout(120)
def test_five_kills_change_nothing(kill_resume, tmp_path, model):
    config = kill_resume.write_toy(tmp_path, model, num_steps=8)
    outcome = kill_resume.experiment(kill_resume.Lab(tmp_path, config), num_kills=5, seed=1)
    assert outcome.kills == 5
    assert outcome.differences == []
    assert (outcome.equal_runs, outcome.equal) == (outcome.runs, 5)


def test_a_difference_is_found(kill_resume, tmp_path, model):
    lab = kill_resume.Lab(tmp_path, kill_resume.write_toy(tmp_path, model, num_steps=2))
    other = kill_resume.write_toy(tmp_path, model, num_steps=2).model_copy(update={"seed": 2})
    lab.finish(tmp_path / "whole")
    kill_resume.Lab(tmp_path, other).finish(tmp_path / "other")
    found = kill_resume.differences(tmp_path / "whole", tmp_path / "other")
    assert {"samples.jsonl", "metrics.jsonl: reward/mean", "model/model.safetensors"} <= set(found)
    assert kill_resume.differences(tmp_path / "whole", tmp_path / "whole") == []


def test_killed_between_the_last_evaluation_and_its_checkpoint(kill_resume, tmp_path, model, monkeypatch):
    config = kill_resume.write_toy(tmp_path, model, num_steps=4)
    evaluate = TrainingRun._evaluate

    def dies(run):
        evaluate(run)
        if run.is_finished:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "_evaluate", dies)
        with pytest.raises(KeyboardInterrupt):
            train(config, run_dir=tmp_path / "run", recipe_dir=tmp_path, progress=False)
    assert resume(tmp_path / "run", progress=False).steps == 4
    train(config, run_dir=tmp_path / "whole", recipe_dir=tmp_path, progress=False)
    assert kill_resume.differences(tmp_path / "whole", tmp_path / "run") == []
