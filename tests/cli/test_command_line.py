"""The commands: exit codes, what they print, and what they do not import."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import plait
from plait.cli import app
from plait.errors import NoSignalError, VerifierContractError
from plait.recipe import packaged_recipes

runner = CliRunner()
HEAVY = ("torch", "transformers", "reasoning_gym", "ray", "vllm")


def run(*arguments: str):
    return runner.invoke(app, list(arguments))


def test_help_lists_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("train", "eval", "sample", "replay", "sft", "check", "doctor", "metrics", "recipes"):
        assert command in result.output


def test_version():
    assert plait.__version__ in run("--version").output


def test_check_of_a_good_recipe(write_recipe):
    result = run("check", write_recipe())
    assert result.exit_code == 0, result.output
    assert "ready to train" in result.output
    assert "samples per step" in result.output
    assert "update_policy" in result.output


def test_check_of_a_bad_recipe_names_every_violation_on_one_line(write_recipe):
    result = run("check", write_recipe(), "--set", "learnign_rate=3e-4", "--set", "rollout.sampling.temperature=0")
    assert result.exit_code == 2
    assert "Did you mean optimizer.learning_rate?" in result.output
    assert "a training temperature of 0 has no sampling distribution" in result.output
    assert "2 settings to change" in result.output
    assert "Traceback" not in result.output


def test_check_as_json(write_recipe):
    result = run("check", write_recipe(), "--json")
    assert json.loads(result.output)["is_valid"] is True
    result = run("check", write_recipe(), "--json", "--set", "train.num_steps=0")
    assert result.exit_code == 2
    assert json.loads(result.output)["violations"][0]["where"] == "train.num_steps"


def test_a_missing_recipe_is_answered_without_traceback():
    for command in ("check", "train"):
        result = run(command, "no_such_recipe")
        assert result.exit_code == 2
        assert 'there is no packaged recipe or file "no_such_recipe"' in result.output
        assert "Traceback" not in result.output


def test_values_with_brackets_are_shown_as_they_are(write_recipe):
    result = run("check", write_recipe(), "--set", "name=[red]x[/red]/y")
    assert "[red]x[/red]/y" in result.output


def test_train_refuses_before_torch_is_needed(write_recipe):
    result = run("train", write_recipe(), "--set", "batch.num_samples_per_prompt=1", "--seed", "-3")
    assert result.exit_code == 2
    assert "at least 2 samples per prompt" in result.output
    assert "seed: expected an integer >= 0" in result.output


def test_accept_belongs_to_resume(write_recipe):
    result = run("train", write_recipe(), "--accept", "seed")
    assert result.exit_code == 2
    assert "Give the run by --resume" in result.output


def test_resume_takes_no_recipe(write_recipe, tmp_path):
    result = run("train", write_recipe(), "--resume", str(tmp_path))
    assert result.exit_code == 2
    assert "--resume" in result.output


def test_recipes_are_listed():
    result = run("recipes", "--json")
    assert json.loads(result.output) == packaged_recipes()
    assert run("recipes").exit_code == 0


def test_metrics_are_explained():
    catalogue = json.loads(run("metrics", "--json").output)
    assert "reward/mean" in catalogue
    assert "reward/mean" in run("metrics").output


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VerifierContractError("3 results for 4 samples"), 1),
        (NoSignalError("no group has signal"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(monkeypatch, error, code):
    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("plait.jobs.check.check_recipe", fail)
    result = run("check", "x")
    assert result.exit_code == code
    assert (str(error) or "Interrupted") in result.output
    assert "Traceback" not in result.output


def test_debug_keeps_the_traceback(monkeypatch):
    def fail(*arguments: object) -> None:
        raise VerifierContractError("3 results for 4 samples")

    monkeypatch.setattr("plait.jobs.check.check_recipe", fail)
    assert isinstance(run("--debug", "check", "x").exception, VerifierContractError)
    monkeypatch.setenv("PLAIT_DEBUG", "1")
    assert isinstance(run("check", "x").exception, VerifierContractError)


def test_a_bug_is_not_dressed_up_as_a_mistake_of_the_user(monkeypatch):
    def fail(*arguments: object) -> None:
        raise RuntimeError("bug")

    monkeypatch.setattr("plait.jobs.check.check_recipe", fail)
    assert isinstance(run("check", "x").exception, RuntimeError)


def imported_by(*arguments: str) -> set[str]:
    """The heavy packages that a command imports, in a fresh process."""
    code = (
        "import sys\nfrom plait.cli import app\n"
        f"try:\n    app({list(arguments)!r})\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("HEAVY"), done.stdout
    return set(json.loads(last.removeprefix("HEAVY ").replace("'", '"')))


def test_light_commands_stay_light(write_recipe, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 5)
    recipe = write_recipe()
    assert imported_by("--help") == set()
    assert imported_by("check", recipe) == set()
    task = f"tasks.0={{source='rows', path='{tmp_path}/rows.jsonl'}}"
    assert imported_by("check", recipe, "--set", task) == set()
    assert imported_by("metrics") == set()
    assert imported_by("recipes") == set()


def test_the_module_runs():
    done = subprocess.run([sys.executable, "-m", "plait", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("plait ")


def test_importing_the_package_is_light():
    code = f"import sys, plait, plait.recipe, plait.rules; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_public_interface(write_recipe):
    config = plait.load_recipe(write_recipe(), "train.num_steps=2")
    assert config.train.num_steps == 2
    assert plait.check(config).is_valid
    assert all(hasattr(plait, name) for name in plait.__all__)
    with pytest.raises(AttributeError, match="no_such"):
        plait.no_such  # noqa: B018
