"""Rules between the factors of an algorithm: each names the value, the rule and the remedy, all at once."""

from pathlib import Path

import pytest

from plait.algorithms.named import algorithm_names
from plait.errors import ConfigError
from plait.recipe import load_run_config
from plait.rules import config_violations, config_warnings


def broken(recipe, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_run_config(recipe, overrides)
    return {v.where: str(v) for v in caught.value.violations}


def pairs_recipe(write_recipe, **sections):
    """A recipe with a file of preferences."""
    recipe = write_recipe(
        tasks='source = "preferences"\npath = "pairs.jsonl"',
        batch="num_prompts_per_step = 4\nnum_samples_per_prompt = 2",
        **sections,
    )
    (Path(recipe).parent / "pairs.jsonl").write_text('{"prompt": "a", "answer": "1", "chosen": "1", "rejected": "2"}\n')
    return recipe


CRITIC = ["algorithm.critic.kind=independent", "algorithm.baseline=value", "algorithm.scale=none"]
SHARED = ["algorithm.critic.kind=shared_trunk", "algorithm.baseline=value", "algorithm.scale=none"]
KL = ["algorithm.kl_coefficient=0.1", "algorithm.kl_in=reward"]
CASES = [
    # (overrides, where, part of the rule, part of the remedy)
    (["algorithm.baseline=value", "algorithm.scale=none"], "algorithm.critic.kind", "there is no critic", "shared_tr"),
    (["algorithm.critic.kind=independent"], "algorithm.baseline", "does not use it", 'kind = "none"'),
    (["algorithm.returns.estimator=gae"], "algorithm.returns.estimator", "needs the values of a critic", "monte_carlo"),
    (["algorithm.returns.estimator=n_step"], "algorithm.returns.estimator", "needs the values", "monte_carlo"),
    ([*CRITIC, "algorithm.returns.estimator=sequence"], "algorithm.returns.estimator", "one action", "gae"),
    (["algorithm.returns.gamma=0.9"], "algorithm.returns.gamma", "without a critic", "Set it to 1"),
    ([*CRITIC[:2], "algorithm.scale=group_std"], "algorithm.scale", "per token", "whitening"),
    (KL, "algorithm.returns.estimator", '"monte_carlo" gives each token its own return', '"sequence"'),
    ([*KL[:1], "algorithm.kl_estimator=k1"], "algorithm.kl_estimator", "pulls nowhere", "k3"),
    ([*KL, "algorithm.scale=none", "algorithm.kl_estimator=k3_with_k2_gradient"], "algorithm.kl_estimator", "k3", "k1"),
    (["algorithm.kl_in=reward"], "algorithm.kl_in", "no reference is loaded", "kl_coefficient above 0"),
    (["algorithm.adaptive_kl.target=1.0"], "algorithm.adaptive_kl.target", "it is multiplied", "kl_coefficient"),
    (["algorithm.dual_clip=1.0"], "algorithm.dual_clip", "must be above 1", "Set it to 3"),
    (["algorithm.dual_clip=3.0", "algorithm.policy_loss=cispo"], "algorithm.dual_clip", "changes nothing", "ppo"),
    (["algorithm.clip_low=1.5"], "algorithm.clip_low", "never below 0", "0.2"),
    (["algorithm.clip_low=0.1", "algorithm.policy_loss=reinforce"], "algorithm.clip_low", "changes nothing", "ppo"),
    (["algorithm.behaviour_cap=2.0"], "algorithm.behaviour_cap", "changes nothing", "decoupled_ppo"),
    (
        ["algorithm.correction.kind=mask", "algorithm.policy_loss=decoupled_ppo"],
        "algorithm.correction.kind",
        "applied twice",
        "behaviour_cap",
    ),
    (
        ["algorithm.correction.kind=mask", "algorithm.correction.low=2.0"],
        "algorithm.correction.low",
        "not below",
        "below 2",
    ),
    (["algorithm.correction.high=3.0"], "algorithm.correction.high", "changes nothing", "truncate"),
    ([*SHARED, "algorithm.critic.path=model"], "algorithm.critic.path", "names another model", "independent"),
    ([*SHARED, "algorithm.critic.pretraining_steps=1"], "algorithm.critic.pretraining_steps", "the policy", "to 0"),
    ([*SHARED, "algorithm.critic.learning_rate=1e-3"], "algorithm.critic.learning_rate", "one rate", "independent"),
    ([*CRITIC, "algorithm.critic.path=nowhere"], "algorithm.critic.path", 'no folder "nowhere"', "policy's own"),
    (
        [*CRITIC, "algorithm.critic.pretraining_steps=3"],
        "algorithm.critic.pretraining_steps",
        "the policy would never be updated",
        "Set it to 2 or less",
    ),
    ([*CRITIC, "algorithm.critic.value_loss=plain", "algorithm.critic.value_clip=0.1"], "algorithm.critic.value_clip",
     "changes nothing", "clipped"),
    (["algorithm.critic.value_loss=plain"], "algorithm.critic.value_loss", "changes nothing", "independent"),
    ([*CRITIC, "algorithm.returns.lambda_policy=0.9"], "algorithm.returns.lambda_policy", "changes nothing", "gae"),
    ([*CRITIC, "algorithm.returns.num_steps=3"], "algorithm.returns.num_steps", "changes nothing", "n_step"),
    (["algorithm.returns.bootstrap_truncated=true"], "algorithm.returns.bootstrap_truncated", "no critic", "value"),
    (["algorithm.shaping.overlong_penalty=2.0"], "algorithm.shaping.overlong_penalty", "changes nothing", "0.2"),
    (["algorithm.adaptive_kl.horizon=10"], "algorithm.adaptive_kl.horizon", "no target", "target"),
    (["verifiers.weight=0"], "verifiers.weight", "nothing is rewarded", "to 1"),
    (["verifiers.weight=2.0"], "verifiers.weight", "without [[reward_models]]", "add a reward model"),
    (["batch.num_samples_per_prompt=1", "algorithm.name=opo"], "batch.num_samples_per_prompt", "at least 2", "8 is"),
    (["batch.num_samples_per_prompt=1", "algorithm.name=dapo"], "batch.num_samples_per_prompt", "at least 2", "8 is"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "where", "rule", "remedy"), CASES, ids=lambda v: v if isinstance(v, str) else None
)
def test_what_does_not_go_together_is_refused_with_a_remedy(write_recipe, overrides, where, rule, remedy):
    found = broken(write_recipe(), *overrides)
    assert rule in found[where], found
    assert remedy in found[where], found
    assert len(found) == 1, found


def test_all_of_them_come_at_once(write_recipe):
    found = broken(
        write_recipe(),
        "algorithm.dual_clip=0.5",
        "algorithm.returns.estimator=gae",
        "algorithm.kl_in=reward",
        "verifiers.weight=0",
        "batch.num_samples_per_prompt=1",
    )
    assert len(found) == 5


@pytest.mark.parametrize("name", algorithm_names())
def test_named_algorithms_break_no_rule(write_recipe, name):
    overrides = [f"algorithm.name={name}", "train.num_steps=100"]
    config = load_run_config(pairs_recipe(write_recipe) if name == "dpo" else write_recipe(), overrides)
    assert config_violations(config) == []
    assert config_warnings(config) == []


def test_one_sample_per_prompt_is_enough_where_nothing_is_made_of_the_group(write_recipe):
    one = ["batch.num_samples_per_prompt=1", "train.num_steps=100"]
    for name in ("ppo", "vapo", "reinforce", "reinforce_pp", "remax"):
        load_run_config(write_recipe(), [f"algorithm.name={name}", *one])


def test_reinforce_on_samples_of_an_older_policy_is_warned_of(write_recipe):
    config = load_run_config(write_recipe(), ["algorithm.name=rloo", "batch.num_epochs_per_step=2"])
    (warning,) = [w for w in config_warnings(config) if w.where == "algorithm.policy_loss"]
    assert "after the first of the 2 updates" in warning.rule


def test_a_shared_trunk_needs_a_plain_head(write_recipe, model_files):
    model_files["config.json"]["final_logit_softcapping"] = 30.0
    found = broken(write_recipe(), *SHARED)
    assert "final_logit_softcapping" in found["algorithm.critic.kind"]


def test_reward_models_are_looked_at_before_anything_starts(write_recipe, tmp_path):
    recipe = write_recipe(batch="num_prompts_per_step = 4\nnum_samples_per_prompt = 2\n[[reward_models]]\npath = 'rm'")
    assert 'there is no folder "rm"' in broken(recipe)["reward_models.0.path"]
    folder = tmp_path / "rm"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "A", "1": "B"}}'
    )
    assert "has 2 labels, and a reward is one number" in broken(recipe)["reward_models.0.path"]
    (folder / "config.json").write_text(
        '{"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}'
    )
    assert "control nothing" in broken(recipe, "control.rewards=random")["control.rewards"]
    config = load_run_config(recipe)
    assert config.reward_models[0].path == str(folder)  # relative to the recipe's folder


def test_a_greedy_baseline_under_rewards_of_chance_is_warned_of(write_recipe):
    config = load_run_config(write_recipe(), ["algorithm.name=remax", "control.rewards=random"])
    assert [warning.where for warning in config_warnings(config)] == ["algorithm.baseline"]


PAIRS = "algorithm.name=iterative_dpo"
OFFLINE = "algorithm.name=dpo"
PAIR_CASES = [
    # (overrides of iterative_dpo, where, part of the rule, part of the remedy)
    (["algorithm.kl_coefficient=0.1"], "algorithm.kl_coefficient", "its own tie", "pairwise.beta"),
    (["algorithm.entropy_coefficient=0.1"], "algorithm.entropy_coefficient", "whole answers", "Set it to 0"),
    (["algorithm.reduction=token-mean"], "algorithm.reduction", "changes nothing", 'pairwise_loss to "none"'),
    (["algorithm.clip_high=0.3"], "algorithm.clip_high", "changes nothing", "Take it out"),
    (["algorithm.baseline=value"], "algorithm.baseline", "changes nothing", "Take it out"),
    (["algorithm.eps=1e-3"], "algorithm.eps", "changes nothing", "Take it out"),
    (["algorithm.kl_in=reward"], "algorithm.kl_in", "changes nothing", "Take it out"),
    (["algorithm.returns.estimator=gae"], "algorithm.returns", "changes nothing", "Take it out"),
    (["algorithm.correction.high=3.0"], "algorithm.correction", "changes nothing", "Take it out"),
    (["algorithm.adaptive_kl.target=1.0"], "algorithm.adaptive_kl", "changes nothing", "Take it out"),
    (["algorithm.pairwise.margin=0.5"], "algorithm.pairwise.margin", "changes nothing", '"simpo"'),
    (
        ["algorithm.pairwise_loss=ipo", "algorithm.pairwise.label_smoothing=0.1"],
        "algorithm.pairwise.label_smoothing",
        "changes nothing",
        '"dpo"',
    ),
    (["batch.num_samples_per_prompt=1"], "batch.num_samples_per_prompt", "the best and the worst", "2 or more"),
    (
        ["batch.num_tokens_per_microbatch=1500", "rollout.max_completion_tokens=400"],
        "batch.num_tokens_per_microbatch",
        "the longest pair (2 x",
        "1824 or more",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "where", "rule", "remedy"), PAIR_CASES, ids=lambda v: v if isinstance(v, str) else None
)
def test_what_has_no_place_under_a_loss_of_pairs_is_refused(write_recipe, overrides, where, rule, remedy):
    found = broken(write_recipe(), PAIRS, *overrides)
    assert rule in found[where], found
    assert remedy in found[where], found
    assert len(found) == 1, found


def test_a_critic_under_a_loss_of_pairs_is_refused_with_all_that_comes_with_it(write_recipe):
    found = broken(write_recipe(), PAIRS, "algorithm.critic.kind=independent", "algorithm.kl_coefficient=0.1")
    assert "compares two whole answers" in found["algorithm.critic.kind"]
    assert found.keys() == {"algorithm.critic.kind", "algorithm.kl_coefficient"}


def test_a_file_of_ones_own_cannot_put_a_critic_under_a_loss_of_pairs(write_recipe, tmp_path):
    """What a named file sets is not among what a person wrote, and does not go through for that."""
    path = tmp_path / "mine.toml"
    path.write_text(
        'title = "Mine"\npaper = "none"\nsummary = "Only here."\n[settings]\n'
        'pairwise_loss = { value = "dpo", source = "tried" }\n'
        'critic.kind = { value = "independent", source = "tried" }\n'
    )
    assert "compares two whole answers" in broken(write_recipe(), f"algorithm.name={path}")["algorithm.critic.kind"]


def test_constants_of_pairs_without_a_loss_of_pairs(write_recipe):
    found = broken(write_recipe(), "algorithm.pairwise.beta=0.2", "algorithm.pairwise.origin=rows")
    assert found.keys() == {"algorithm.pairwise.beta", "algorithm.pairwise.origin"}
    assert 'pairwise_loss is "none"' in found["algorithm.pairwise.beta"]


def test_pairs_of_rows_need_rows_of_pairs_and_nothing_that_is_sampled(write_recipe):
    assert "trains on pairs of answers" in broken(write_recipe(), OFFLINE)["tasks.0.source"]
    recipe = pairs_recipe(write_recipe)
    assert 'algorithm.name "grpo" trains on its own samples' in broken(recipe)["tasks.0.source"]
    found = broken(
        recipe,
        OFFLINE,
        "batch.num_samples_per_prompt=4",
        "algorithm.dynamic_sampling.enabled=true",
        "algorithm.filters.overlong=true",
        "control.rewards=random",
    )
    assert "a row of preferences has two answers" in found["batch.num_samples_per_prompt"]
    assert all("nothing is sampled" in found[where] for where in found if where != "batch.num_samples_per_prompt")
    assert found.keys() == {
        "batch.num_samples_per_prompt",
        "algorithm.dynamic_sampling",
        "algorithm.filters",
        "control.rewards",
    }


def test_a_beta_of_dpos_size_is_warned_of_under_simpo(write_recipe):
    config = load_run_config(write_recipe(), [PAIRS, "algorithm.pairwise_loss=simpo"])
    assert [warning.where for warning in config_warnings(config)] == ["algorithm.pairwise.beta"]
    config = load_run_config(write_recipe(), [PAIRS, "algorithm.pairwise_loss=simpo", "algorithm.pairwise.beta=2.0"])
    assert config_warnings(config) == []


@pytest.mark.parametrize("more", [[], ["algorithm.behaviour_cap=2.0"]])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_decoupled_ppo_has_its_correction_in_it_with_or_without_a_cap(write_recipe, kind, more):
    found = broken(write_recipe(), "algorithm.policy_loss=decoupled_ppo", f"algorithm.correction.kind={kind}", *more)
    assert "applied twice" in found["algorithm.correction.kind"]
    assert "algorithm.behaviour_cap bounds the weight" in found["algorithm.correction.kind"]
    assert len(found) == 1
