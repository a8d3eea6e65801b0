"""Alarms of whole runs: said once, written, in the summary and in the last lines; the same after a resume."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from plait.jobs.train import resume, train
from plait.telemetry.definitions import METRICS

NO_EVALUATION = ("evaluation.at_start=false", "evaluation.at_end=false")


def use(verifier):
    recipe = Path("toy.toml")
    recipe.write_text(recipe.read_text().replace("toy_verifier:letters", f"toy_verifier:{verifier}"))


def alarms(folder):
    return [json.loads(line) for line in (folder / "alarms.jsonl").read_text().splitlines()]


def test_a_failing_verifier_is_said_once_and_listed_at_the_end(toy, capsys):
    """A quarter of the samples fail: above 0.05 from the fifth step on, when five have been seen."""
    use("four_kinds")
    config = toy("train.num_steps=8", *NO_EVALUATION)
    result = train(config, recipe_dir=Path.cwd())
    output = capsys.readouterr().out
    assert output.count("ALARM step 5: verifier_failures: 25% of the samples could not be judged") == 1
    assert output.count("verifier_failures") == 1
    onsets = {onset["alarm"]: onset["step"] for onset in alarms(result.run_dir)}
    assert onsets["verifier_failures"] == 5
    assert onsets["tasks_too_hard"] == 5  # all scores are 0
    summary = json.loads((result.run_dir / "summary.json").read_text())
    assert summary["alarms"] == result.alarms
    by_name = {entry["alarm"]: entry for entry in summary["alarms"]}
    assert (by_name["verifier_failures"]["steps"], by_name["verifier_failures"]["is_active"]) == ([5], True)
    console = Console(width=1000, record=True)
    console.print(result.render())
    text = console.export_text()
    assert "ALARM verifier_failures (step 5; on at the end): 25% of the samples could not be judged" in text
    assert "raise verifiers.timeout_s" in text


def test_a_run_without_trouble_has_an_empty_list(toy):
    config = toy("train.num_steps=4", *NO_EVALUATION)
    result = train(config, recipe_dir=Path.cwd(), progress=False)
    assert alarms(result.run_dir) == []
    assert json.loads((result.run_dir / "summary.json").read_text())["alarms"] == []


@pytest.mark.parametrize("cut", [4, 5, 6])
def test_resumed_equals_never_stopped(toy, cut):
    """Before, at and after the step of the onsets."""
    use("four_kinds")
    settings = ("train.num_steps=8", "checkpoint.every_steps=1", *NO_EVALUATION)
    whole = train(toy(*settings), run_dir=Path("whole"), recipe_dir=Path.cwd(), progress=False)
    with pytest.MonkeyPatch.context() as patch:
        from plait.jobs import stop

        patch.setattr(stop.StopRequest, "reason", property(lambda self: "SIGTERM" if steps_done() >= cut else ""))
        train(toy(*settings), run_dir=Path("cut"), recipe_dir=Path.cwd(), progress=False)
    resumed = resume(Path("cut"), progress=False)
    assert len(alarms(Path("whole"))) >= 2
    # The words name the run's folder; all else is equal.
    text = (Path("cut") / "alarms.jsonl").read_text().replace("plait sample cut", "plait sample whole")
    assert text == (Path("whole") / "alarms.jsonl").read_text()
    assert [(a["alarm"], a["steps"], a["is_active"]) for a in resumed.alarms] == [
        (a["alarm"], a["steps"], a["is_active"]) for a in whole.alarms
    ]


def steps_done():
    path = Path("cut/metrics.jsonl")
    return sum('"train"' in line for line in path.read_text().splitlines()) if path.exists() else 0


def test_loops_are_measured_on_the_ids(toy, monkeypatch):
    """An engine that repeats its first token: of 12 tokens five 8-grams, one of them distinct."""
    from plait.rollout.engine import Completion

    original = Completion.__init__

    def loop(self, *given, **named):
        original(self, *given, **named)
        self.token_ids_R[:] = self.token_ids_R[0]

    monkeypatch.setattr(Completion, "__init__", loop)
    result = train(toy("train.num_steps=1", *NO_EVALUATION), recipe_dir=Path.cwd(), progress=False)
    (record,) = map(json.loads, (result.run_dir / "metrics.jsonl").read_text().splitlines())
    assert record["repetition_share"] > 0.9
    assert record["nonfinite_logprob_share"] == 0
    assert {"repetition_share", "nonfinite_logprob_share"} <= METRICS.keys()
