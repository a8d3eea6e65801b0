"""Rules between settings. The numbers of the cases C.. come from reports about other frameworks."""

import pytest

from plait.errors import ConfigError
from plait.recipe import load_run_config, load_sft_config
from plait.rules import check_config, config_violations, config_warnings


def broken(recipe: str, *overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe, overrides)
    return {v.where: str(v) for v in caught.value.violations}


def warned(recipe: str, *overrides: str) -> dict[str, str]:
    return {v.where: str(v) for v in config_warnings(load_run_config(recipe, overrides))}


def batch(prompts: int, group: int, minibatch: int = 0) -> list[str]:
    return [
        f"batch.num_prompts_per_step={prompts}",
        f"batch.num_samples_per_prompt={group}",
        f"batch.num_sequences_per_minibatch={minibatch}",
    ]


def test_c01_groups_must_fit_into_updates(write_recipe):
    text = broken(write_recipe(), *batch(3, 8, 3))["batch.num_sequences_per_minibatch"]
    assert "samples per update (3) must be a multiple of batch.num_samples_per_prompt (8)" in text
    assert "24 (3 prompts)" in text
    assert "batch.num_samples_per_prompt to 3" in text


@pytest.mark.parametrize(
    ("prompts", "group", "minibatch", "suggestions"),
    [
        (16, 8, 12, ["8 (1 prompt)", "16 (2 prompts)", "num_samples_per_prompt to 3, 6 or 12"]),
        (48, 6, 100, ["96 (16 prompts)", "144 (24 prompts)"]),
        (48, 6, 108, ["96 (16 prompts)", "144 (24 prompts)", "num_prompts_per_step to 36 or 54"]),
        (10, 4, 16, ["8 (2 prompts)", "20 (5 prompts)", "num_prompts_per_step to 8 or 12"]),
    ],
)
def test_suggestions_are_valid_themselves(write_recipe, prompts, group, minibatch, suggestions):
    text = broken(write_recipe(), *batch(prompts, group, minibatch))["batch.num_sequences_per_minibatch"]
    assert all(suggestion in text for suggestion in suggestions), text


def test_every_suggested_number_is_accepted(write_recipe):
    recipe = write_recipe()
    for minibatch in (8, 16):
        load_run_config(recipe, batch(16, 8, minibatch))
    for group in (3, 6, 12):
        load_run_config(recipe, batch(16, group, 12))
    for prompts in (36, 54):
        load_run_config(recipe, batch(prompts, 6, 108))


@pytest.mark.parametrize(("prompts", "group", "minibatch"), [(1, 8, 8), (48, 6, 96), (1000, 8, 8), (7, 3, 0)])
def test_c02_c09_what_fits_is_accepted(write_recipe, prompts, group, minibatch):
    assert config_violations(load_run_config(write_recipe(), batch(prompts, group, minibatch))) == []


@pytest.mark.parametrize(
    "advantage",
    [
        [],
        ["algorithm.baseline=leave_one_out"],
        ["algorithm.baseline=none"],
        ["algorithm.baseline=group_mean", "algorithm.scale=none"],
    ],
)
def test_c04_one_sample_has_no_group(write_recipe, advantage):
    found = broken(write_recipe(), *batch(4, 1, 3), *advantage)
    assert list(found) == ["batch.num_samples_per_prompt"]
    text = found["batch.num_samples_per_prompt"]
    assert "needs at least 2 samples per prompt, got 1" in text
    assert "multiple" not in text
    assert "divi" not in text


def test_one_sample_is_enough_without_groups(write_recipe):
    plain = ["algorithm.baseline=none", "algorithm.scale=none"]
    load_run_config(write_recipe(), [*batch(4, 1), *plain])
    load_run_config(write_recipe(), [*batch(4, 1), "algorithm.baseline=none", "algorithm.scale=batch_std"])
    assert "batch.num_prompts_per_step" in broken(
        write_recipe(), *batch(1, 1), "algorithm.baseline=none", "algorithm.scale=batch_std"
    )


def test_c13_a_run_of_no_updates_names_all_four_values(write_recipe):
    found = broken(write_recipe(), *batch(16, 4, 512), "train.num_steps=3")
    text = found["batch.num_sequences_per_minibatch"]
    assert "3 * 16 * 4 = 192 samples in the whole run" in text
    assert "fewer than one update of 512" in text
    assert "0 updates" in text
    for key in ("num_steps 3", "num_prompts_per_step 16", "num_samples_per_prompt 4", "num_sequences_per_minibatch"):
        assert key in text
    assert len(found) == 1


def test_an_update_never_spans_steps(write_recipe):
    text = broken(write_recipe(), *batch(16, 4, 128), "train.num_steps=100")["batch.num_sequences_per_minibatch"]
    assert "128 samples is more than the 16 * 4 = 64 samples of a step" in text
    assert "num_prompts_per_step to 32" in text


def test_c19_lengths_against_the_model(write_recipe):
    lengths = ["rollout.max_prompt_tokens=3000", "rollout.max_completion_tokens=2800"]
    text = broken(write_recipe(), *lengths)["rollout.max_completion_tokens"]
    assert "3000 + rollout.max_completion_tokens 2800 = 5800 tokens is more than the 5000 positions" in text
    load_run_config(write_recipe(), ["rollout.max_prompt_tokens=2200", "rollout.max_completion_tokens=2800"])
    text = broken(write_recipe(), "evaluation.max_completion_tokens=4900")["evaluation.max_completion_tokens"]
    assert "512 + evaluation.max_completion_tokens 4900 = 5412" in text


def test_the_longest_sequence_fits_into_a_microbatch(write_recipe):
    text = broken(write_recipe(), "batch.num_tokens_per_microbatch=1023")["batch.num_tokens_per_microbatch"]
    assert "= 1024 tokens" in text
    assert "Set it to 1024 or more" in text
    load_run_config(write_recipe(), ["batch.num_tokens_per_microbatch=1024"])


def test_c22_training_temperature(write_recipe):
    both = ["rollout.sampling.temperature=0.0", "evaluation.sampling.temperature=0.0"]
    found = broken(write_recipe(), *both)
    assert list(found) == ["rollout.sampling.temperature"]
    assert "no sampling distribution" in found["rollout.sampling.temperature"]
    assert "evaluation.sampling.temperature may be 0" in found["rollout.sampling.temperature"]
    greedy = ["evaluation.sampling.temperature=0", "evaluation.num_samples_per_prompt=1"]
    assert config_warnings(load_run_config(write_recipe(), greedy)) == []
    assert "all 4 samples" in warned(write_recipe(), greedy[0])["evaluation.num_samples_per_prompt"]


@pytest.mark.parametrize(("name", "value"), [("top_p", "0.9"), ("top_k", "50"), ("min_p", "0.05")])
def test_training_is_not_truncated_and_evaluation_may_be(write_recipe, name, value):
    assert "truncated" in broken(write_recipe(), f"rollout.sampling.{name}={value}")[f"rollout.sampling.{name}"]
    load_run_config(write_recipe(), [f"evaluation.sampling.{name}={value}"])


def dynamic(*more: str) -> list[str]:
    return ["algorithm.dynamic_sampling.enabled=true", *more]


def test_c34_dynamic_sampling_that_cannot_fill_a_step(write_recipe):
    found = warned(
        write_recipe(),
        *batch(128, 8),
        *dynamic("algorithm.dynamic_sampling.max_rounds=10"),
        "algorithm.dynamic_sampling.expected_share_with_signal=0.02",
    )
    text = found["algorithm.dynamic_sampling"]
    assert "10 * 128 * 0.02 = 26 usable groups per step" in text
    assert "fewer than 128" in text
    assert all(advice in text for advice in ("fewer prompts per step", "easier data", "train on the partial batch"))
    assert "max_rounds to 50" in text


@pytest.mark.parametrize("share", ["1.0", "0.25"])
def test_dynamic_sampling_that_fills_a_step(write_recipe, share):
    overrides = dynamic(f"algorithm.dynamic_sampling.expected_share_with_signal={share}")
    assert warned(write_recipe(), *overrides) == {}


def test_dynamic_sampling_needs_groups_with_signal(write_recipe):
    plain = ["algorithm.baseline=none", "algorithm.scale=none"]
    assert "signal" in broken(write_recipe(), *dynamic(*plain))["algorithm.dynamic_sampling.enabled"]
    text = broken(write_recipe(), *dynamic("control.rewards=constant"))["algorithm.dynamic_sampling.enabled"]
    assert "no step can ever be filled" in text
    load_run_config(write_recipe(), dynamic("control.rewards=random"))


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["algorithm.kl_estimator=k3"], "algorithm.kl_estimator"),
        (["algorithm.eps=1e-4", "algorithm.scale=none"], "algorithm.eps"),
        (["algorithm.std_correction=0", "algorithm.scale=none"], "algorithm.std_correction"),
        (["optimizer.final_share=0.1"], "optimizer.final_share"),
    ],
)
def test_settings_that_nothing_reads(write_recipe, overrides, where):
    assert "changes nothing" in broken(write_recipe(), *overrides)[where]


def test_settings_that_something_reads(write_recipe):
    load_run_config(write_recipe(), ["algorithm.kl_estimator=k2", "algorithm.kl_coefficient=0.01"])
    load_run_config(write_recipe(), ["optimizer.final_share=0.1", "optimizer.schedule=cosine"])
    load_run_config(write_recipe(), ["algorithm.scale=none", "algorithm.kl_coefficient=0"])


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["algorithm.dynamic_sampling.max_rounds=3"], "algorithm.dynamic_sampling"),
        (["evaluation.every_steps=4"], "evaluation.every_steps"),
        (["checkpoint.every_steps=4"], "checkpoint.every_steps"),
        (["optimizer.warmup_share=1.0"], "optimizer.warmup_share"),
        (["optimizer.name=sgd", "optimizer.eps=1e-6"], "optimizer.eps"),
        (["evaluation.sampling.temperature=0", "evaluation.sampling.top_p=0.9"], "evaluation.sampling"),
    ],
)
def test_warnings(write_recipe, overrides, where):
    assert where in warned(write_recipe(), *overrides)


def test_defaults_warn_of_nothing(write_recipe):
    assert warned(write_recipe()) == {}


@pytest.mark.parametrize(
    ("override", "where", "part"),
    [
        ("tasks.0.task=chain_sums", "tasks.0.task", "chain_sum"),
        ("tasks.0.params.min_digit=3", "tasks.0.params.min_digit", "min_digits"),
        ("tasks.0.params.zzz=3", "tasks.0.params.zzz", "max_terms"),
        ("tasks.0.params.seed=3", "tasks.0.params.seed", "the run sets seed"),
        ("tasks.0.params.size=3", "tasks.0.params.size", "the run sets size"),
        ("name=a/b", "name", "folder"),
        ('name=""', "name", "folder"),
        ("rollout.stop_tokens=['a', 'a']", "rollout.stop_tokens.1", "twice"),
        ("rollout.stop_tokens=['']", "rollout.stop_tokens.0", "empty"),
        ("plan.pools.main=2", "plan.layout", "2 devices"),
        ("plan.layout.policy=fsdp2", "plan.layout.policy", "2 devices"),
        ("plan.layout.policy=zz", "plan.layout.policy", "cannot read layout"),
        ("plan.place.generat=main", "plan.place.generat", "generate"),
    ],
)
def test_names_and_plans(write_recipe, override, where, part):
    assert part in broken(write_recipe(), override)[where]


def test_stages_follow_the_settings_in_the_plan(write_recipe):
    load_run_config(write_recipe(), ["plan.place.ref_logprob=main", "algorithm.kl_coefficient=0.1"])
    assert "plan.place.ref_logprob" in broken(write_recipe(), "plan.place.ref_logprob=main")
    found = broken(write_recipe(), "plan.place.old_logprob=main", *batch(16, 4, 7))
    assert list(found) == ["batch.num_sequences_per_minibatch"]


def test_tasks_have_different_names(write_recipe):
    two = "[{source='reasoning_gym', task='chain_sum'}, {source='reasoning_gym', task='chain_sum'}]"
    assert "both named" in broken(write_recipe(), f"tasks={two}")["tasks.1.name"]
    named = two.replace("task='chain_sum'}]", "task='chain_sum', name='second'}]")
    load_run_config(write_recipe(), [f"tasks={named}"])
    assert "evaluation.num_prompts" in broken(write_recipe(), f"tasks={named}", "evaluation.num_prompts=1")


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("rows.jsonl", None, "no such file"),
        ("rows.csv", "a", "expected .jsonl or .parquet"),
        ("rows.jsonl", "", "is empty"),
    ],
)
def test_row_files(write_recipe, tmp_path, name, content, part):
    if content is not None:
        (tmp_path / name).write_text(content)
    assert part in broken(write_recipe(tasks=f'source = "rows"\npath = "{name}"'))["tasks.0.path"]


def test_row_tasks(write_recipe, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 20)
    recipe = write_recipe(tasks='source = "rows"\npath = "rows.jsonl"')
    load_run_config(recipe, ["tasks.0.verifier=my.module:score"])
    text = broken(recipe, "tasks.0.verifier=exakt")["tasks.0.verifier"]
    assert 'Did you mean "exact"' in text
    assert "module:function" in text
    assert "every row is held out" in broken(recipe, "tasks.0.holdout_share=1")["tasks.0.holdout_share"]
    assert "not evaluated" in warned(recipe, "tasks.0.holdout_share=0")["tasks.0.holdout_share"]
    near = broken(write_recipe(tasks='source = "rows"\npath = "row.jsonl"'))["tasks.0.path"]
    assert "Did you mean rows.jsonl?" in near


def test_missing_models(write_recipe, tmp_path):
    recipe = write_recipe()
    assert "no folder" in broken(recipe, "model.path=nowhere")["model.path"]
    assert "nothing is downloaded" in broken(recipe, "model.path=Qwen/Qwen3-0.6B")["model.path"]
    (tmp_path / "model" / "config.json").write_text("{")
    assert "JSON" in broken(recipe)["model.path"]
    (tmp_path / "model" / "config.json").unlink()
    assert "no config.json" in broken(recipe)["model.path"]


@pytest.mark.parametrize(
    "files",
    [
        {"config.json": {"eos_token_id": 0}},
        {"config.json": {"eos_token_id": [3, 4]}},
        {"config.json": {}, "generation_config.json": {"eos_token_id": 2}},
        {"config.json": {"eos_token_id": None}, "tokenizer_config.json": {"eos_token": "</s>"}},
        {"config.json": {"text_config": {"eos_token_id": 2}}},
    ],
)
def test_end_tokens_are_found(write_recipe, model_files, files):
    model_files.update(files)
    load_run_config(write_recipe())


def test_a_model_without_end_token(write_recipe, model_files):
    model_files["config.json"] = {"max_position_embeddings": 5000, "eos_token_id": None}
    model_files["tokenizer_config.json"] = {"eos_token": None}
    assert "end token" in broken(write_recipe())["model.path"]
    load_run_config(write_recipe(), ["rollout.stop_tokens=['<end>']"])


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        ({"sliding_window": 512}, True),
        ({"sliding_window": 1024}, False),
        ({"sliding_window": None}, False),
        ({"sliding_window": 512, "use_sliding_window": False}, False),
        ({"sliding_window": 512, "layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"sliding_window": 512, "layer_types": ["full_attention"]}, False),
        ({"layer_types": ["linear_attention", "full_attention"]}, True),
        ({"text_config": {"sliding_window": 512, "eos_token_id": 1}}, True),
    ],
)
def test_attention_windows(write_recipe, model_files, config, is_refused):
    model_files["config.json"] |= config
    if is_refused:
        assert "support" in broken(write_recipe())["model.path"]
    else:
        load_run_config(write_recipe())


def test_a_model_that_names_no_longest_sequence(write_recipe, model_files):
    model_files["config.json"] = {"eos_token_id": 1}
    assert "1024 tokens cannot be checked" in warned(write_recipe())["model.path"]
    model_files["config.json"] = {"eos_token_id": 1, "n_positions": 1000}
    assert "1000 positions" in broken(write_recipe())["rollout.max_completion_tokens"]


def test_configurations_made_in_python_are_checked_too(write_recipe):
    config = load_run_config(write_recipe())
    check_config(config)
    wrong = config.model_copy(update={"batch": config.batch.model_copy(update={"num_samples_per_prompt": 1})})
    with pytest.raises(ConfigError, match="at least 2 samples"):
        check_config(wrong)


def test_huge_numbers_are_answered_at_once(write_recipe):
    text = broken(write_recipe(), *batch(10**30 + 1, 3, 7))
    assert "batch.num_sequences_per_minibatch" in text


SFT = """
name = "warm"
[model]
path = "model"
[[tasks]]
source = "reasoning_gym"
task = "chain_sum"
[data]
source = "worked_solutions"
[train]
num_updates = 3
num_sequences_per_update = 4
"""


def test_supervised_training(write_recipe, tmp_path):
    write_recipe()
    path = tmp_path / "sft.toml"
    path.write_text(SFT)
    assert load_sft_config(str(path)).train.num_updates == 3

    def sft_broken(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_sft_config(str(path), overrides)
        return str(caught.value)

    assert "6000 tokens is more than the 5000 positions" in sft_broken("max_sequence_tokens=6000")
    assert "microbatch" in sft_broken("train.num_tokens_per_microbatch=100")
    assert "no worked solutions" in sft_broken("tasks.0.task=gcd")
    assert "there is none" in sft_broken("tasks=[]")
    assert "no such file" in sft_broken('data={source="rows", path="missing.jsonl"}')
    assert "no folder" in sft_broken("model.path=nowhere")


def test_experts_are_recorded_of_a_mixture_only(write_recipe, model_files):
    text = broken(write_recipe(), "rollout.record_experts=true")["rollout.record_experts"]
    assert "dense model" in text
    model_files["config.json"] |= {"num_experts": 8}
    assert load_run_config(write_recipe(), ["rollout.record_experts=true"]).rollout.record_experts
