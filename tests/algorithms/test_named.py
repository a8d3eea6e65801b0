"""Named algorithms are data: one file each, whose values are defaults that a recipe overrides."""

import json

import pytest

from plait.algorithm_config import AlgorithmConfig
from plait.algorithms import named
from plait.algorithms.named import algorithm_names, named_algorithm
from plait.errors import ConfigError
from plait.recipe import apply_overrides, load_resolved_config, load_run_config, resolved

NAMES = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce", "reinforce_pp", "remax", "dapo", "gspo", "gmpo", "cispo")

PUBLISHED = {
    "dapo": {"clip_low": 0.2, "clip_high": 0.28, "reduction": "token-mean", "kl_coefficient": 0.0},
    "dr_grpo": {"scale": "none", "reduction": "seq-mean-token-sum-norm"},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "reduction": "seq-mean-token-mean"},
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
    "cispo": {"clip_low": 1.0, "baseline": "group_mean"},
    "rloo": {"baseline": "leave_one_out", "scale": "none", "policy_loss": "reinforce", "kl_in": "reward"},
    "remax": {"baseline": "greedy"},
    "opo": {"baseline": "length_weighted", "scale": "none", "policy_loss": "reinforce"},
    "reinforce_pp": {"baseline": "none", "whitening": True, "kl_in": "reward", "kl_estimator": "k1"},
}
"""From the papers that the files name."""

MINE = """
title = "Mine"
paper = "none"
summary = "Only here."
[settings]
clip_high = { value = 0.5, source = "tried" }
dynamic_sampling.enabled = { value = true, source = "tried" }
"""


def test_all_that_were_promised_are_there():
    assert {*NAMES, "vapo", "opo", "dpo", "iterative_dpo"} <= set(algorithm_names())


@pytest.mark.parametrize("name", algorithm_names())
def test_every_file_says_where_each_value_is_from(name):
    algorithm = named_algorithm(name)
    assert algorithm.title
    assert algorithm.summary.endswith(".")
    assert all(source.strip() for source in algorithm.sources.values())
    AlgorithmConfig(name=name)  # every key is a setting, every value is allowed


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_values_are_the_published_ones(name):
    made = AlgorithmConfig(name=name).model_dump()
    assert {key: made[key] for key in PUBLISHED[name]} == PUBLISHED[name]


def test_vapo_and_ppo_have_their_critics():
    vapo, ppo = AlgorithmConfig(name="vapo"), AlgorithmConfig(name="ppo")
    assert (vapo.returns.lambda_critic, vapo.returns.length_adaptive_alpha) == (1.0, 0.05)
    assert (vapo.critic.pretraining_steps, vapo.positive_nll_coefficient, vapo.clip_high) == (50, 0.1, 0.28)
    assert (ppo.returns.estimator, ppo.returns.lambda_policy, ppo.returns.gamma) == ("gae", 0.95, 1.0)
    assert (ppo.baseline, ppo.critic.kind, ppo.whitening) == ("value", "independent", True)


def test_grpo_is_what_it_was_before_there_were_others():
    """Recipes of the first release must train the same numbers."""
    made = AlgorithmConfig()
    assert made == AlgorithmConfig(name="grpo")
    first_release = {
        "name": "grpo",
        "baseline": "group_mean",
        "scale": "group_std",
        "std_correction": 1,
        "eps": 1e-6,
        "reduction": "token-mean",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl_coefficient": 0.0,
        "kl_estimator": "k3",
        "entropy_coefficient": 0.0,
    }
    assert {key: made.model_dump()[key] for key in first_release} == first_release
    assert (made.policy_loss, made.critic.kind, made.whitening) == ("ppo_clip", "none", False)


def test_what_a_recipe_writes_wins_and_the_resolved_config_shows_everything():
    config = load_run_config("starter", ["algorithm.name=dapo", "algorithm.clip_high=0.2"])
    # The recipe wrote scale, --set wrote clip_high; both are other than DAPO's.
    assert (config.algorithm.scale, config.algorithm.clip_high) == ("none", 0.2)
    assert config.algorithm.dynamic_sampling.enabled
    shown = resolved(config)["algorithm"]
    assert shown["shaping"]["overlong_buffer_share"] == 0.2
    assert shown["critic"]["kind"] == "none"


@pytest.mark.parametrize("name", algorithm_names())
def test_a_resolved_config_means_the_same_when_it_is_read_again(name, tmp_path):
    """clip_high = 0.2 is the general default, and must not become the named one on the way."""
    settings = [f"algorithm.name={name}", "algorithm.scale=null", "train.num_steps=100"]
    if name in ("dpo", "iterative_dpo"):
        settings.append("algorithm.pairwise.beta=0.2")
    elif name not in ("reinforce", "rloo", "remax", "opo"):
        settings.append("algorithm.clip_high=0.2")
    if name == "dpo":
        (tmp_path / "pairs.jsonl").write_text("{}\n")
        (tmp_path / "pairs.toml").write_text(
            'name = "pairs"\n[algorithm]\nname = "dpo"\n[[tasks]]\nsource = "preferences"\npath = "pairs.jsonl"\n'
            "[batch]\nnum_prompts_per_step = 4\nnum_samples_per_prompt = 2\n[train]\nnum_steps = 1\n"
        )
    config = load_run_config(str(tmp_path / "pairs.toml") if name == "dpo" else "starter", settings)
    again = load_resolved_config(json.loads(json.dumps(resolved(config))))
    assert again == config
    assert apply_overrides(again, ["train.num_steps=101"]).algorithm == config.algorithm


def test_taking_a_setting_out_gives_the_named_default_back():
    config = load_run_config("starter", ["algorithm.name=dapo", "algorithm.clip_high=0.3", "algorithm.clip_high=null"])
    assert config.algorithm.clip_high == 0.28


def test_named_values_do_not_count_as_written():
    """Rules on settings without effect speak of what a person wrote."""
    algorithm = AlgorithmConfig.model_validate({"name": "dapo", "dynamic_sampling": {"max_rounds": 3}})
    assert algorithm.model_fields_set == {"name", "dynamic_sampling"}
    assert algorithm.dynamic_sampling.model_fields_set == {"max_rounds"}
    assert algorithm.dynamic_sampling.enabled


def test_one_file_in_the_folder_is_a_new_algorithm(tmp_path, monkeypatch):
    """Nothing else lists names: a file beside the others is found, listed, used."""
    (tmp_path / "mine.toml").write_text(MINE)
    monkeypatch.setattr(named, "files", lambda package: tmp_path)
    assert algorithm_names() == ("mine",)
    config = load_run_config("starter", ["algorithm.name=mine"])
    assert (config.algorithm.clip_high, config.algorithm.dynamic_sampling.enabled) == (0.5, True)


def test_a_file_of_ones_own_is_named_by_its_path(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    config = load_run_config("starter", ["algorithm.name=mine.toml"])
    assert config.algorithm.clip_high == 0.5
    assert config.algorithm.name == str(tmp_path / "mine.toml")


def test_a_file_that_lacks_something_is_answered(tmp_path):
    path = tmp_path / "half.toml"
    path.write_text('title = "x"\npaper = "y"\nsummary = "z"\n[settings]\nclip_high = 0.5\n')
    with pytest.raises(ConfigError, match=r"lacks value and source of clip_high"):
        load_run_config("starter", [f"algorithm.name={path}"])
    path.write_text('title = "x"')
    named_algorithm.cache_clear()
    with pytest.raises(ConfigError, match=r"lacks paper, settings, summary"):
        load_run_config("starter", [f"algorithm.name={path}"])
