"""Reading recipe files and --set overrides."""

import json
from pathlib import Path

import pytest

from plait.config import ReasoningGymTask, RowsTask
from plait.errors import ConfigError
from plait.recipe import (
    apply_overrides,
    config_for_model,
    load_resolved_config,
    load_run_config,
    load_sft_config,
    packaged_recipes,
    parse_override,
    recipe_directory,
    resolved,
)


def message(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe, overrides)
    return str(caught.value)


def test_defaults_and_paths(write_recipe, tmp_path):
    recipe = write_recipe()
    config = load_run_config(recipe)
    assert config.batch.num_prompts_per_step == 16
    assert config.seed == 1
    assert config.model.path == str(tmp_path / "model")
    assert recipe_directory(recipe) == tmp_path


def test_rows_are_relative_to_the_recipe_and_overrides_to_the_current_folder(write_recipe, tmp_path, monkeypatch):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 20)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "other.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n' * 20)
    monkeypatch.chdir(elsewhere)
    recipe = write_recipe(tasks='source = "rows"\npath = "rows.jsonl"')
    task = load_run_config(recipe).tasks[0]
    assert isinstance(task, RowsTask)
    assert task.path == str(tmp_path / "rows.jsonl")
    task = load_run_config(recipe, ["tasks.0.path=other.jsonl"]).tasks[0]
    assert isinstance(task, RowsTask)
    assert task.path == str(elsewhere / "other.jsonl")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=3", 3),
        ("a.b = 3", 3),
        ("a.b=3e-4", 3e-4),
        ("a.b=1_000", 1000),
        ("a.b=true", True),
        ("a.b=foo/bar", "foo/bar"),
        ('a.b="foo"', "foo"),
        ('a.b=["x", "y"]', ["x", "y"]),
        ("a.b={c = 1}", {"c": 1}),
        ("a.b=", ""),
        ("a.b=null", None),
        ("a.b=x=y", "x=y"),
        ("a.b=1\nc = 2", "1\nc = 2"),
    ],
)
def test_override_values(text, expected):
    assert parse_override(text) == ("a.b", expected)


@pytest.mark.parametrize("text", ["foo", "=3", "a..b=3", "", ".a=1"])
def test_override_without_key(text):
    with pytest.raises(ConfigError, match="key=value"):
        parse_override(text)


def test_overrides_reach_nested_keys_and_lists(write_recipe):
    config = load_run_config(
        write_recipe(),
        [
            "tasks.0.params.min_digits=3",
            "rollout.sampling.temperature=0.7",
            "algorithm.dynamic_sampling.enabled=true",
            "seed=4",
            "seed=5",
        ],
    )
    task = config.tasks[0]
    assert isinstance(task, ReasoningGymTask)
    assert task.params == {"min_digits": 3}
    assert config.rollout.sampling.temperature == 0.7
    assert config.algorithm.dynamic_sampling.enabled
    assert config.seed == 5


def test_null_restores_the_default(write_recipe):
    recipe = write_recipe(train="num_steps = 3\nwall_clock_limit_s = 60", algorithm='kl_estimator = "k2"')
    config = load_run_config(recipe, ["train.wall_clock_limit_s=null", "algorithm.kl_estimator=null"])
    assert config.train.wall_clock_limit_s is None
    assert config.algorithm.kl_estimator == "k3"
    assert "Did you mean algorithm.kl_estimator?" in message(recipe, "algorithm.kl_estimatr=null")


def test_overrides_that_fit_nowhere_are_reported_together(write_recipe):
    text = message(write_recipe(), "foo", "train.num_steps.x=3", "tasks.3.task=chain_sum", "tasks.x.task=a")
    assert '"foo" is not of the form key=value' in text
    assert "train.num_steps: it is a value" in text
    assert 'tasks: "3" is not one of its 1 items' in text
    assert 'tasks: "x" is not one of its 1 items' in text


def test_a_text_that_looks_like_a_number_says_how_to_quote_it(write_recipe):
    assert "--set 'name=\"123\"'" in message(write_recipe(), "name=123")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('name = "x"\n[batch]\nnum_prompts_per_step = ten\n', ["line 3", "num_prompts_per_step = ten", "quotes"]),
        ('name = "x"\n[batch\n', ["line 2", "Expected ']'"]),
        ('name = "x"\nname = "y"\n', ["line 2", "Cannot overwrite a value"]),
        ('name = "x', ["Unterminated string"]),
    ],
)
def test_syntax_errors_name_file_and_line(tmp_path, text, parts):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    answer = message(str(path))
    assert "broken.toml" in answer
    assert all(part in answer for part in parts), answer


def test_files_that_are_no_text(tmp_path):
    path = tmp_path / "binary.toml"
    path.write_bytes(b'name = "\xff"')
    assert "not UTF-8" in message(str(path))


def test_byte_order_mark_is_read_over(write_recipe):
    path = Path(write_recipe())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_run_config(str(path)).name == "base"


@pytest.mark.parametrize("recipe", ["no_such_recipe", "no/such.toml", "missing.toml"])
def test_missing_recipe_lists_the_packaged_ones(recipe):
    answer = message(recipe)
    assert recipe in answer
    assert all(name in answer for name in packaged_recipes())


def test_dates_are_not_turned_into_text(write_recipe):
    assert "is a date" in message(write_recipe(), "name=2024-01-01")


def test_recipe_of_the_other_job(tmp_path, write_recipe):
    path = tmp_path / "sft.toml"
    path.write_text('name = "x"\n[data]\nsource = "worked_solutions"\n[train]\nnum_updates = 1\n')
    assert "plait sft" in message(str(path))
    with pytest.raises(ConfigError, match="plait train"):
        load_sft_config(write_recipe())


def test_resolved_configuration_comes_back(write_recipe):
    config = load_run_config(write_recipe(algorithm="kl_coefficient = 0.1\nkl_estimator = 'k2'"))
    data = json.loads(json.dumps(resolved(config)))
    assert data["rollout"]["sampling"]["temperature"] == 1.0
    assert load_resolved_config(data) == config


def test_resolved_defaults_do_not_count_as_set(write_recipe):
    config = load_run_config(write_recipe())
    again = load_resolved_config(resolved(config))
    assert "kl_estimator" not in again.algorithm.model_fields_set
    assert apply_overrides(again, ["train.num_steps=9"]).train.num_steps == 9


def test_resolved_configuration_is_strict(write_recipe):
    data = resolved(load_run_config(write_recipe()))
    with pytest.raises(ConfigError, match="unknown key"):
        load_resolved_config({**data, "extra": 1})


def test_a_run_is_evaluated_with_its_own_settings(write_recipe, tmp_path):
    config = load_run_config(write_recipe())
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(resolved(config)))
    own, directory = config_for_model(str(run), None, ["evaluation.num_prompts=7"])
    assert (own.evaluation.num_prompts, directory) == (7, run)
    (run / "run.json").write_text(json.dumps({"recipe_dir": str(tmp_path)}))
    assert config_for_model(str(run), None, [])[1] == tmp_path
    # A model folder has a config.json as well.
    assert config_for_model(str(tmp_path / "model"), write_recipe(), [])[1] == tmp_path


@pytest.mark.parametrize("name", sorted(packaged_recipes()))
def test_packaged_recipes_say_what_they_do(name):
    assert packaged_recipes()[name]


def test_a_resolved_configuration_is_a_recipe_too(write_recipe, tmp_path):
    config = load_run_config(write_recipe())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(resolved(config)))
    assert load_run_config(str(path), ["seed=7"]) == config.model_copy(update={"seed": 7})
    path.write_text('{"name": 3')
    assert "not valid JSON" in message(str(path))
