"""`plait algorithms`: the list, and one algorithm as a specification."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from plait.algorithms.named import algorithm_names
from plait.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["algorithms", *arguments])


def spec(name):
    result = run(name, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_the_list_has_every_algorithm_with_its_factors():
    rows = {row["name"]: row for row in json.loads(run("--json").output)}
    assert tuple(rows) == algorithm_names()
    assert (rows["rloo"]["baseline"], rows["rloo"]["KL"]) == ("leave_one_out", "0.05 k1 in reward")
    assert (rows["gspo"]["policy loss"], rows["gspo"]["clip low / high"]) == ("gspo", "0.0003 / 0.0004")
    assert rows["ppo"]["critic"] == "independent"
    assert "dynamic sampling" in rows["dapo"]["besides"]
    text = run().output
    assert all(name in text for name in algorithm_names())


def test_dapo_as_a_specification():
    made = spec("dapo")
    stages = {stage["name"]: stage for stage in made["stages"]}
    generate = stages["generate"]
    assert [(loop["over"], loop["is_parallel"]) for loop in generate["loops"]] == [
        ("4 rounds (at most, until enough groups have rewards that differ)", False),
        ("samples of the step", True),
    ]
    assert generate["loops"][1]["axes"] == ["dp", "samples"]
    assert generate["axes"] == ["tp"]
    assert stages["advantage"]["granularity"] == "group"
    assert stages["advantage"]["why"] == "a sample is compared with its siblings"
    assert stages["update_policy"]["axes"] == ["cp", "ep", "pp", "sp", "tp"]
    assert stages["update_policy"]["after"] == ["advantage", "generate", "old_logprob"]
    settings = {setting["key"]: setting for setting in made["settings"]}
    assert settings["clip_high"]["value"] == 0.28
    assert "clip-higher" in settings["clip_high"]["source"]
    assert settings["entropy_coefficient"]["source"] == "general default"
    assert {"critic.kind", "shaping.overlong_buffer_share", "returns.estimator"} <= settings.keys()


def test_forks_and_joins_are_shown():
    text = run("ppo").output
    lines = [line.strip() for line in text.splitlines()]
    assert lines.count("join") == 2
    assert "fork: 3 parallel siblings" in lines  # score_verifier, old_logprob, value
    assert "fork: 2 parallel siblings" in lines  # update_policy, update_critic
    assert "hands on per step: whitening takes mean and deviation over all tokens of the step" in text
    levels = {stage["name"]: stage["level"] for stage in spec("ppo")["stages"]}
    assert levels["update_policy"] == levels["update_critic"] == 3
    assert levels["value"] == levels["score_verifier"] == 1


@pytest.mark.parametrize("name", algorithm_names())
def test_each_can_be_shown(name):
    text = run(name).output
    assert ("generate by policy" in text) == (name != "dpo")
    assert "update_policy by policy" in text
    assert "[algorithm]" in text
    assert spec(name)["paper"] in text


def test_losses_on_pairs_have_stages_of_their_own():
    rows = {row["name"]: row for row in json.loads(run("--json").output)}
    assert (rows["dpo"]["baseline"], rows["dpo"]["policy loss"]) == ("pairs of rows", "dpo, beta 0.1")
    assert rows["iterative_dpo"]["baseline"] == "pairs of rollouts"
    offline, iterative = ([stage["name"] for stage in spec(name)["stages"]] for name in ("dpo", "iterative_dpo"))
    assert offline == ["ref_logprob", "update_policy"]
    assert iterative == ["generate", "score_verifier", "pair", "ref_logprob", "update_policy", "sync_weights"]
    assert "Next step: ref_logprob, with other pairs" in run("dpo").output
    text = run("iterative_dpo").output
    assert "parallel for groups of the step [groups]:" in text
    assert "hands on per group: the best of a prompt's samples against the worst" in text
    assert "Next step: generate, with engine_weights@v+1." in text


def test_a_scale_over_the_batch_waits_for_the_step_and_says_why(tmp_path):
    """Streaming by group is no setting: the piece follows from the factors, and its reason is shown."""
    path = tmp_path / "mine.toml"
    text = 'title = "Mine"\npaper = "none"\nsummary = "Only here."\n[settings]\n'
    path.write_text(f'{text}scale = {{ value = "batch_std", source = "tried" }}\n')
    advantage = next(stage for stage in spec(str(path))["stages"] if stage["name"] == "advantage")
    assert (advantage["granularity"], advantage["axes"], advantage["loops"]) == ("step", [], [])
    assert advantage["why"] == "the scale is the standard deviation over the step"
    assert "hands on per step: the scale is the standard deviation over the step" in run(str(path)).output


def test_a_wrong_name_is_answered():
    result = run("grop")
    assert result.exit_code == 2
    assert 'Did you mean "grpo"?' in result.output


def test_a_file_of_ones_own_can_be_shown(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'title = "Mine"\npaper = "none"\nsummary = "Only here."\n'
        '[settings]\nclip_high = { value = 0.5, source = "tried" }\n'
    )
    assert {"key": "clip_high", "value": 0.5, "source": "tried"} in spec(str(path))["settings"]


def test_it_loads_no_torch():
    code = (
        "import sys; from typer.testing import CliRunner; from plait.cli import app; "
        "assert CliRunner().invoke(app, ['algorithms', 'vapo']).exit_code == 0; "
        "print(sorted({'torch', 'transformers', 'reasoning_gym'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
