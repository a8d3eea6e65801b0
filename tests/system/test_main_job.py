"""The main job as `make train` runs it: the starter model learns to reason before it answers."""

from pathlib import Path

import pytest

from plait.data.task import prompt_key
from plait.data.tasks import build_tasks
from plait.jobs.train import train
from plait.models.folder import model_folder
from plait.recipe import load_run_config, load_sft_config


@pytest.mark.timeout(1200)
def test_the_main_job_learns_to_reason(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = train(load_run_config("starter"), progress=False)
    assert result.before.accuracy <= 0.60
    assert result.after.accuracy >= 0.85
    assert result.after.accuracy_low > result.before.accuracy_high
    assert result.after.reasoning_share > result.before.reasoning_share + 0.2
    assert result.after.response_tokens_mean > result.before.response_tokens_mean
    assert result.peak_rss_bytes < 4 * 2**30


@pytest.mark.timeout(600)
def test_ppo_learns_on_the_same_task(tmp_path, monkeypatch):
    """The first 12 of its 40 steps: those reach about 0.9 of training accuracy, from 0.55."""
    monkeypatch.chdir(tmp_path)
    config = load_run_config("starter_ppo", ["train.num_steps=12", "evaluation.num_samples_per_prompt=2"])
    result = train(config, progress=False)
    assert result.after.accuracy_low > result.before.accuracy_high
    assert result.seconds_per_stage.keys() >= {"value", "update_critic", "old_logprob"}


@pytest.mark.timeout(600)
def test_random_rewards_teach_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load_run_config("starter", ["control.rewards=random", "train.num_steps=15"])
    result = train(config, progress=False)
    # In as many steps true rewards raise accuracy above 0.8. Under a fair coin the expected gain is 0, and the
    # interval of the start bounds what chance gives.
    assert result.after.accuracy <= result.before.accuracy_high


def test_the_recipe_trains_two_families_whose_held_out_instances_are_never_trained_on():
    config = load_run_config("starter")
    assert len({task.task for task in config.tasks}) >= 2
    warm_up = load_sft_config("starter_sft")
    held_out = set()
    for seeds, tasks, evaluation in (
        ((1, 2, 3), config.tasks, config.evaluation),
        ((warm_up.seed,), warm_up.tasks, warm_up.evaluation),
    ):
        for seed in seeds:
            mixture = build_tasks(tasks, run_seed=seed, eval_config=evaluation, recipe_dir=Path())
            if not held_out:
                prompts = mixture.eval_prompts(config.evaluation.num_prompts)
                held_out = {prompt_key(p.messages) for p in prompts}
                assert len(held_out) == len(prompts)
            trained = {prompt_key(mixture.prompt(n).messages) for n in range(4000)}
            assert not trained & held_out


def test_the_starter_is_small_whole_and_bf16():
    from safetensors.torch import load_file

    folder = model_folder("starter")
    assert (folder / "model.safetensors").stat().st_size <= 15 * 2**20
    assert {str(t.dtype) for t in load_file(folder / "model.safetensors").values()} == {"torch.bfloat16"}
