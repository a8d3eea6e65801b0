"""Unknown keys and wrong values: every one is answered with what to write instead."""

import pytest

from plait.config import RunConfig, SftConfig
from plait.errors import ConfigError
from plait.recipe import draft, load_run_config, load_sft_config
from plait.recipe_errors import foreign_keys, unknown_key
from plait.schema import keys_of


def answers(recipe: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe, overrides)
    return {v.where: f"{v.rule}. {v.change}" for v in caught.value.violations}


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        # C26, C27: a misspelled key and a renamed one, at the top and inside a section.
        ("learnign_rate", "optimizer.learning_rate"),
        ("optimizer.learnign_rate", "optimizer.learning_rate"),
        ("train.learnign_rate", "optimizer.learning_rate"),
        ("max_ckpt_to_keep", "checkpoint.keep"),
        ("checkpoint.max_ckpt_to_keep", "checkpoint.keep"),
        ("nmae", "name"),
        ("batch.num_sample_per_prompt", "batch.num_samples_per_prompt"),
        ("rollout.sampling.tempreature", "rollout.sampling.temperature"),
        ("algorithm.dynamic_sampling.enable", "algorithm.dynamic_sampling.enabled"),
        ("tasks.0.wieght", "tasks.0.weight"),
        ("model.compute-dtype", "model.compute_dtype"),
        ("train.learning_rate", "optimizer.learning_rate"),
        ("batch.temperature", "rollout.sampling.temperature"),
        ("optimiser.lr", "optimizer"),
        ("lr", "optimizer.learning_rate"),
        ("batch.num_generations", "batch.num_samples_per_prompt"),
        ("batch.group_size", "batch.num_samples_per_prompt"),
        ("batch.per_device_train_batch_size", "batch.num_tokens_per_microbatch"),
        ("batch.gradient_accumulation_steps", "batch.num_tokens_per_microbatch"),
        ("batch.train_batch_size", "batch.num_prompts_per_step"),
        ("batch.train_batch_size", "batch.num_sequences_per_minibatch"),
        ("rollout.n", "batch.num_samples_per_prompt"),
        ("actor_rollout_ref.rollout.n", "batch.num_samples_per_prompt"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "batch.num_sequences_per_minibatch"),
        ("algorithm.epsilon", "algorithm.clip_low"),
        ("algorithm.epsilon_high", "algorithm.clip_high"),
        ("algorithm.clip_ratio_high", "algorithm.clip_high"),
        ("algorithm.beta", "algorithm.kl_coefficient"),
        ("algorithm.beta", "algorithm.pairwise.beta"),
        ("algorithm.kl_coef", "algorithm.kl_coefficient"),
        ("algorithm.num_iterations", "batch.num_epochs_per_step"),
        ("algorithm.ppo_epochs", "batch.num_epochs_per_step"),
        ("rollout.max_prompt_length", "rollout.max_prompt_tokens"),
        ("rollout.max_completion_length", "rollout.max_completion_tokens"),
        ("data.max_response_length", "rollout.max_completion_tokens"),
        ("train.max_steps", "train.num_steps"),
        ("train.save_steps", "checkpoint.every_steps"),
        ("train.save_total_limit", "checkpoint.keep"),
        ("grpo.num_prompts_per_step", "batch.num_prompts_per_step"),
        ("loss_fn.ratio_clip_max", "algorithm.clip_high"),
        ("policy.train_global_batch_size", "batch.num_sequences_per_minibatch"),
        ("algo.kl.init_coef", "algorithm.kl_coefficient"),
        ("optimizer.warmup_ratio", "optimizer.warmup_share"),
        ("optimizer.lr_scheduler_type", "optimizer.schedule"),
        ("tasks.0.min_digits", "tasks.0.params.min_digits"),
    ],
)
def test_unknown_key_is_answered_with_ours(write_recipe, key, suggestion):
    found = answers(write_recipe(), f"{key}=2")
    where = key if key in found else key.partition(".")[0]
    assert "unknown key" in found[where]
    assert suggestion in found[where], found[where]


def test_units_are_named_where_they_differ(write_recipe):
    found = answers(write_recipe(), "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    text = found["actor_rollout_ref.actor.ppo_mini_batch_size"]
    assert "prompts" in text
    assert "multiply by batch.num_samples_per_prompt" in text


def test_hopeless_keys_get_the_list(write_recipe):
    found = answers(write_recipe(), "checkpoint.zzzqqq=2", "zzzqqq=1")
    assert "every_steps, keep" in found["checkpoint.zzzqqq"]
    assert "optimizer" in found["zzzqqq"]


def test_every_foreign_answer_is_a_key_of_ours():
    known = keys_of(RunConfig)
    for entry in foreign_keys()["keys"]:
        assert all(use in known for use in entry["use"]), entry
        assert entry["use"] or entry["note"], entry
        assert entry["framework"] in foreign_keys()["sources"]


FOREIGN_ONLY = [entry for entry in foreign_keys()["keys"] if entry["key"] not in keys_of(RunConfig)]


@pytest.mark.parametrize("entry", FOREIGN_ONLY, ids=lambda e: e["key"])
def test_every_foreign_key_leads_to_its_answer(entry):
    text = " ".join(v.change for v in unknown_key(RunConfig, entry["key"], 1))
    assert all(use in text for use in entry["use"]), text


def test_every_foreign_value_belongs_to_a_choice():
    known = keys_of(RunConfig)
    with_choices = {key for key, spec in known.items() if spec.choices} | {"algorithm.name"}
    assert all(entry["key"] in with_choices for entry in foreign_keys()["values"])


@pytest.mark.parametrize(
    ("override", "expected", "advice"),
    [
        ('train.num_steps="8"', 'expected an integer >= 1, got "8" (text)', "Write 8, without quotes"),
        ("train.num_steps=8.0", "expected an integer >= 1, got 8.0 (number)", "Write 8"),
        ("train.num_steps=8.5", "expected an integer >= 1", "whole number"),
        ("train.num_steps=0", "expected an integer >= 1, got 0 (integer)", "1 or more"),
        ("train.num_steps=true", "expected an integer >= 1, got true", ""),
        ("train.num_steps=[1]", "expected an integer >= 1, got [1] (list)", ""),
        ("train.wall_clock_limit_s=0", "expected a number > 0, got 0", "above 0"),
        ("optimizer.learning_rate=nan", "expected a number > 0", "finite"),
        ("optimizer.learning_rate=inf", "expected a number > 0", "finite"),
        ("optimizer.learning_rate=1e6x", "expected a number > 0", "without quotes"),
        ("optimizer.warmup_share=5", "expected a number >= 0 and <= 1, got 5", "1 or less"),
        ("optimizer.warmup_share=nan", "expected a number >= 0 and <= 1", "finite"),
        ("optimizer.betas=0.9", "expected a list of 2", "[0.9]"),
        ("optimizer.betas=[0.9]", "expected a list of 2", ""),
        ("optimizer.betas=[0.9, 0.9, 0.9]", "expected a list of 2", ""),
        ("rollout.stop_tokens=x", "expected a list", '["x"]'),
        ("evaluation.at_start=True", "expected true or false", "Write true"),
        ("evaluation.at_start=1", "expected true or false", ""),
        ("algorithm.std_correction=true", "expected one of 0, 1", "Write 1"),
        ("algorithm.std_correction=2", "expected one of 0, 1", ""),
        ("algorithm.reduction=token_mean", 'expected one of "token-mean"', '"token-mean"?'),
        ("algorithm.name=dapoo", 'there is no algorithm "dapoo"', 'Did you mean "dapo"?'),
        ("algorithm.name=REINFORCE++", 'there is no algorithm "REINFORCE++"', 'Write "reinforce_pp"'),
        ("algorithm.name=7", "expected text, got 7", "--set"),
        ("algorithm.kl_estimator=k1", "in the loss the expectation of the gradient of k1 is zero", '"reward"'),
        ("algorithm.policy_loss=geo_mean", "expected one of", '"gmpo"'),
        ("algorithm.kl_estimator=low_var_kl", "expected one of", '"k3"'),
        ("model.compute_dtype=bf16", 'expected one of "auto"', '"bfloat16"'),
        ("optimizer.name=adam", 'expected one of "adamw"', "adamw"),
        ("batch=3", "expected a table, got 3", "[batch]"),
        ("algorithm.dynamic_sampling=true", "expected a table", "[algorithm.dynamic_sampling]"),
        ("tasks=[]", "expected a list", ""),
        ("tasks={source='rows'}", "expected a list", "[[tasks]]"),
        ("tasks.0.source=gsm8k", 'expected one of "reasoning_gym", "rows"', ""),
        ("tasks.0.source=null", "names its source", 'source = "reasoning_gym"'),
        ("tasks.0.params=3", "expected a table", ""),
        ("plan.pools.main=0", "expected an integer >= 1", "1 or more"),
        ("name=1", "expected text, got 1", "--set"),
        ("seed=-1", "expected an integer >= 0, got -1", "0 or more"),
    ],
)
def test_wrong_values_say_what_was_expected(write_recipe, override, expected, advice):
    found = answers(write_recipe(), override)
    text = " ".join(found.values())
    assert expected in text, text
    assert advice in text, text
    assert len(found) == 1, found


def test_missing_settings_name_section_and_type(write_recipe):
    found = answers(write_recipe(without=("train",), batch="num_prompts_per_step = 4"))
    assert "[train] with num_steps" in found["train"]
    assert "expected an integer >= 1" in found["batch.num_samples_per_prompt"]
    assert "under [batch]" in found["batch.num_samples_per_prompt"]


def test_field_errors_and_rule_errors_come_together(write_recipe):
    found = answers(
        write_recipe(
            top="max_ckpt_to_keep = 2",
            batch="num_prompts_per_step = 16\nnum_samples_per_prompt = 8\nnum_sequences_per_minibatch = 12",
            optimizer="learnign_rate = 3e-4",
            rollout__sampling="temperature = 0.0",
            train='num_steps = "3"',
        )
    )
    assert found.keys() == {
        "max_ckpt_to_keep",
        "optimizer.learnign_rate",
        "train.num_steps",
        "batch.num_sequences_per_minibatch",
        "rollout.sampling.temperature",
    }


def test_a_wrong_section_hides_only_its_own_rules(write_recipe):
    recipe = write_recipe(batch="num_prompts_per_step = 0\nnum_samples_per_prompt = 1")
    read = draft(RunConfig, recipe, [])
    assert read.config is None
    assert "batch" not in read.sections
    assert {"algorithm", "rollout", "tasks", "train", "name"} <= read.sections.keys()


def test_supervised_training_answers_in_its_own_names(tmp_path, write_recipe):
    write_recipe()
    path = tmp_path / "sft.toml"
    path.write_text(
        'name = "x"\nmax_seq_length = 100\n[model]\npath = "model"\n[[tasks]]\nsource = "reasoning_gym"\n'
        'task = "chain_sum"\n[data]\nsource = "worked_solutions"\n[train]\nmax_steps = 3\nnum_updates = 3\n'
        "num_sequences_per_update = 8\nper_device_train_batch_size = 4\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_sft_config(str(path), ["train.num_tokens_per_microbatch=100"])
    text = str(caught.value)
    assert "max_sequence_tokens" in text
    assert "train.num_updates" in text
    assert "train.num_tokens_per_microbatch" in text
    assert "batch." not in text
    assert set(keys_of(SftConfig)) & {"data", "train.num_updates"}
