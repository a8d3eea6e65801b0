"""Derived numbers of `plait check`, against counts worked out by hand or taken from reports."""

import json
import math

import pytest

from plait.jobs.check import CheckReport, check, check_recipe
from plait.jobs.rows_count import count_rows
from plait.recipe import load_run_config

ROWS = 'source = "rows"\npath = "train.jsonl"\neval_path = "eval.jsonl"'


def rows(tmp_path, name: str, count: int) -> None:
    lines = [json.dumps({"prompt": f"{i}+1", "answer": str(i + 1)}) for i in range(count)]
    (tmp_path / name).write_text("\n".join(lines) + "\n\n")


def report(recipe: str, *overrides: str) -> CheckReport:
    return check(load_run_config(recipe, overrides))


def test_c02_c09_step_numbers(write_recipe):
    got = report(write_recipe(batch="num_prompts_per_step = 1\nnum_samples_per_prompt = 8"))
    assert (got.number("samples_per_update"), got.number("prompts_per_update")) == (8, 1)
    settings = "num_prompts_per_step = 48\nnum_samples_per_prompt = 6\nnum_sequences_per_minibatch = 96"
    got = report(write_recipe(batch=settings))
    assert (got.number("samples_per_step"), got.number("updates_per_step")) == (288, 3)
    assert got.number("prompts_per_update") == 16


def test_n40_a_run_over_rows(write_recipe, tmp_path):
    rows(tmp_path, "train.jsonl", 1000)
    rows(tmp_path, "eval.jsonl", 130)
    got = report(
        write_recipe(
            tasks=ROWS,
            batch="num_prompts_per_step = 64\nnum_samples_per_prompt = 8\nnum_sequences_per_minibatch = 128",
            optimizer="warmup_share = 0.05",
            train="num_steps = 30",
        )
    )
    assert got.number("samples_per_step") == 512
    assert got.number("updates_per_step") == 4
    assert got.number("steps") == 30
    assert got.number("optimizer_updates") == 120
    assert got.number("warmup_updates") == 6
    task = got.rows[0]
    assert (task.rows, task.training_rows, task.held_out_rows) == (1000, 1000, 130)
    assert task.steps_per_epoch == 15
    # They would be lost where an epoch is cut; here they begin the next one.
    assert task.left_over_prompts_per_epoch == 40
    assert task.dropped_prompts_per_epoch == 0
    assert task.epochs == pytest.approx(30 * 64 / 1000)


def test_c32_the_last_partial_batch_is_scored(write_recipe, tmp_path):
    rows(tmp_path, "train.jsonl", 10)
    rows(tmp_path, "eval.jsonl", 130)
    evaluation = "num_prompts = 500\nnum_samples_per_prompt = 1"
    got = report(write_recipe(tasks=ROWS, evaluation=evaluation, rollout="num_slots = 64"))
    assert got.number("eval_prompts") == 130
    assert got.number("eval_samples") == 130
    assert got.number("eval_batches") == 3


@pytest.mark.parametrize(
    ("share", "updates", "expected"),
    [("0.05", 120, 6), ("0.07", 100, 7), ("0.1", 25, 3), ("0.0", 10, 0), ("1.0", 10, 10), ("0.01", 10, 1)],
)
def test_warmup_is_rounded_up_but_not_by_floating_point(write_recipe, share, updates, expected):
    got = report(write_recipe(), f"optimizer.warmup_share={share}", f"train.num_steps={updates}")
    assert got.number("warmup_updates") == expected


@pytest.mark.parametrize(
    ("minibatch", "budget", "upper", "lower"),
    # 1024 tokens per sequence at most, 2 at least.
    [(64, 8192, 8, 1), (64, 1024, 64, 1), (64, 2047, 64, 1), (16, 3072, 6, 1)],
)
def test_microbatch_bounds(write_recipe, minibatch, budget, upper, lower):
    got = report(
        write_recipe(),
        f"batch.num_sequences_per_minibatch={minibatch}",
        f"batch.num_tokens_per_microbatch={budget}",
    )
    assert got.number("max_microbatches_per_update") == upper == math.ceil(minibatch / (budget // 1024))
    assert got.number("min_microbatches_per_update") == lower


def test_age_of_data_and_epochs(write_recipe):
    got = report(write_recipe(), "batch.num_sequences_per_minibatch=16", "batch.num_epochs_per_step=2")
    assert got.number("updates_per_step") == 8
    assert got.number("oldest_data_in_updates") == 7
    assert got.number("max_tokens_per_step") == 64 * 1024
    assert report(write_recipe()).number("oldest_data_in_updates") == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], 2),
        (["evaluation.at_start=false"], 1),
        (["evaluation.every_steps=2", "train.num_steps=6"], 4),
        (["evaluation.every_steps=2", "train.num_steps=5"], 4),
    ],
)
def test_number_of_evaluations(write_recipe, settings, expected):
    assert report(write_recipe(), *settings).number("evaluations") == expected


def test_stages_in_order(write_recipe):
    got = report(write_recipe(), "batch.num_sequences_per_minibatch=16", "algorithm.kl_coefficient=0.1")
    names = [stage.name for stage in got.stages]
    assert set(names) == {
        "generate",
        "score_verifier",
        "old_logprob",
        "ref_logprob",
        "advantage",
        "update_policy",
        "sync_weights",
    }
    assert names[0] == "generate"
    assert names[-2:] == ["update_policy", "sync_weights"]
    assert {stage.name: stage.repeat for stage in got.stages}["update_policy"] == 4
    assert {stage.pool for stage in got.stages} == {"main"}
    assert got.plan["schedule"] == "sync"


def test_broken_rules_do_not_hide_the_numbers(write_recipe):
    got = check_recipe(write_recipe(), ["batch.num_sequences_per_minibatch=24", "rollout.sampling.temperature=0"])
    assert not got.is_valid
    assert len(got.violations) == 2
    assert got.number("samples_per_step") == 64
    got = check_recipe(write_recipe(), ["batch.num_sequences_per_minibatch=512"])
    assert (len(got.violations), got.stages) == (1, ())


def test_wrong_fields_are_in_the_report(write_recipe):
    got = check_recipe(write_recipe(), ["train.num_steps=0", "rollout.sampling.temperature=0"])
    assert {v.where for v in got.violations} == {"train.num_steps", "rollout.sampling.temperature"}
    assert got.numbers == ()


def test_json_round_trip(write_recipe, tmp_path):
    rows(tmp_path, "train.jsonl", 10)
    rows(tmp_path, "eval.jsonl", 3)
    data = json.loads(json.dumps(report(write_recipe(tasks=ROWS)).to_dict(), allow_nan=False))
    assert data["is_valid"] is True
    assert {"name", "numbers", "rows", "stages", "plan", "violations", "warnings"} <= data.keys()
    assert data["numbers"][0] == {
        "name": "samples_per_step",
        "value": 64,
        "formula": "num_prompts_per_step x num_samples_per_prompt",
    }


def test_rows_are_counted_without_blank_lines(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n  \n{"a": 2}')
    assert count_rows(path) == 2
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": [1, 2, 3]}), tmp_path / "rows.parquet")
    assert count_rows(tmp_path / "rows.parquet") == 3


def test_holdout_share_leaves_rows_on_both_sides(write_recipe, tmp_path):
    rows(tmp_path, "train.jsonl", 100)
    task = report(write_recipe(tasks='source = "rows"\npath = "train.jsonl"')).rows[0]
    assert (task.training_rows, task.held_out_rows) == (90, 10)
    rows(tmp_path, "train.jsonl", 3)
    task = report(write_recipe(tasks='source = "rows"\npath = "train.jsonl"')).rows[0]
    assert (task.training_rows, task.held_out_rows) == (2, 1)
