"""Which stages each algorithm has, and in which pieces they hand on."""

import json

import pytest

from plait.algorithms.named import algorithm_names
from plait.algorithms.settings import step_graph
from plait.config import RunConfig

CRITIC_FREE = ["generate", "score_verifier", "advantage", "update_policy", "sync_weights"]
EXPECTED = {
    "cispo": (CRITIC_FREE, "group"),
    "dapo": (CRITIC_FREE, "group"),
    "dr_grpo": (CRITIC_FREE, "group"),
    "gmpo": (CRITIC_FREE, "group"),
    "grpo": (CRITIC_FREE, "group"),
    "gspo": (CRITIC_FREE, "group"),
    "opo": (CRITIC_FREE, "group"),
    "reinforce": (CRITIC_FREE, "sample"),
    "remax": (CRITIC_FREE, "sample"),
    "rloo": ([*CRITIC_FREE, "ref_logprob", "old_logprob"], "group"),
    "reinforce_pp": ([*CRITIC_FREE, "ref_logprob", "old_logprob"], "step"),
    "ppo": ([*CRITIC_FREE, "value", "update_critic"], "step"),
    "dpo": (["ref_logprob", "update_policy"], None),
    "iterative_dpo": (["generate", "score_verifier", "pair", "ref_logprob", "update_policy", "sync_weights"], None),
    "vapo": ([*CRITIC_FREE, "value", "update_critic"], "sample"),
}


def graph(algorithm, **sections):
    data = {
        "name": "x",
        "tasks": [{"source": "reasoning_gym", "task": "chain_sum"}],
        "batch": {"num_prompts_per_step": 4, "num_samples_per_prompt": 4, **sections.pop("batch", {})},
        "train": {"num_steps": 3},
        "algorithm": algorithm,
        **sections,
    }
    return step_graph(RunConfig.model_validate_json(json.dumps(data)))


@pytest.mark.parametrize("name", algorithm_names())
def test_stages_and_granularity_of_each_algorithm(name):
    stages, piece = EXPECTED[name]
    made = graph({"name": name})
    assert sorted(stage.name for stage in made.stages) == sorted(stages)
    if piece is None:
        assert "advantage" not in made
        return
    assert made["advantage"].granularity == piece
    assert made["advantage"].why


def test_a_critic_of_its_own_is_a_parallel_sibling_of_the_policy():
    made = graph({"name": "ppo"}, batch={"num_epochs_per_step": 2})
    assert made.predecessors["advantage"] == {"generate", "score_verifier", "value"}
    assert made.predecessors["update_policy"] == {"generate", "advantage", "old_logprob"}
    assert made.predecessors["update_critic"] == {"generate", "advantage", "value"}
    assert made.predecessors["sync_weights"] == {"update_policy"}
    levels = [{stage.name for stage in level} for level in made.levels()]
    assert levels == [
        {"generate"},
        {"score_verifier", "old_logprob", "value"},
        {"advantage"},
        {"update_policy", "update_critic"},
        {"sync_weights"},
    ]
    assert made["update_critic"].repeat == made["update_policy"].repeat == 2
    assert made.outputs == {"policy_weights@v+1", "engine_weights@v+1", "critic_weights@v+1"}


def test_a_shared_trunk_is_one_stage_of_two_roles():
    made = graph({"name": "ppo", "critic": {"kind": "shared_trunk"}}, batch={"num_epochs_per_step": 2})
    names = {stage.name for stage in made.stages}
    assert names == {*CRITIC_FREE, "value"}
    assert made["value"].roles == made["update_policy"].roles == ("policy", "critic")
    assert made["value"].writes == {"values", "old_logprobs"}
    assert {"values", "returns", "old_logprobs"} <= made["update_policy"].reads


def test_the_greedy_completion_is_a_second_round():
    made = graph({"name": "remax"})
    assert made["generate"].repeat == made["score_verifier"].repeat == 2
    assert "greedy" in made["generate"].why


def test_where_the_kl_is_decides_who_reads_the_reference():
    in_loss = graph({"kl_coefficient": 0.1})
    assert "ref_logprobs" in in_loss["update_policy"].reads
    assert "ref_logprobs" not in in_loss["advantage"].reads
    in_reward = graph({"name": "rloo"})
    assert "ref_logprobs" not in in_reward["update_policy"].reads
    assert {"ref_logprobs", "old_logprobs"} <= in_reward["advantage"].reads
    # In float32 the engine's log-probabilities are the trainer's, and the pass is saved.
    assert "old_logprob" not in graph({"name": "rloo"}, model={"compute_dtype": "float32"})


@pytest.mark.parametrize("algorithm", [{"correction": {"kind": "truncate"}}, {"policy_loss": "decoupled_ppo"}])
def test_what_compares_engine_and_trainer_needs_the_trainers_numbers(algorithm):
    fp32 = {"model": {"compute_dtype": "float32"}, "batch": {"num_epochs_per_step": 2}}
    assert "old_logprob" in graph(algorithm, **json.loads(json.dumps(fp32)))
    assert "old_logprob" not in graph({}, **json.loads(json.dumps(fp32)))


def test_reward_models_score_beside_the_verifier():
    made = graph({}, reward_models=[{"path": "x"}])
    assert made["score_reward"].roles == ("reward",)
    assert made.predecessors["score_reward"] == {"generate"}
    assert made.predecessors["advantage"] == {"generate", "score_verifier", "score_reward"}


@pytest.mark.parametrize(
    ("algorithm", "piece"),
    [
        ({"whitening": True}, "step"),
        ({"scale": "batch_std"}, "step"),
        ({"baseline": "batch_mean", "scale": "none"}, "step"),
        ({"baseline": "none", "scale": "leave_one_out_std"}, "group"),
        ({"baseline": "none", "scale": "none", "shaping": {"length_weight": 1.0}}, "group"),
        ({"baseline": "none", "scale": "none"}, "sample"),
    ],
)
def test_batch_statistics_make_advantages_wait(algorithm, piece):
    assert graph(algorithm)["advantage"].granularity == piece


def test_pairs_of_rows_are_there_before_the_step_and_nothing_samples_after_it():
    made = graph({"name": "dpo"}, batch={"num_samples_per_prompt": 2})
    assert "pairs" in made.inputs
    assert made.outputs == {"policy_weights@v+1"}
    assert made.predecessors["update_policy"] == {"ref_logprob"}
    assert made["update_policy"].reads == {"pairs", "ref_logprobs", "policy_weights@v"}
    assert [stage.name for stage in graph({"name": "dpo", "pairwise_loss": "simpo"}).stages] == ["update_policy"]


def test_pairs_of_samples_wait_for_their_group_and_join_the_loop():
    made = graph({"name": "iterative_dpo"}, batch={"num_sequences_per_minibatch": 8}, reward_models=[{"path": "x"}])
    assert made.predecessors["pair"] == {"generate", "score_verifier", "score_reward"}
    assert (made["pair"].kind, made["pair"].granularity) == ("host", "group")
    assert made.predecessors["ref_logprob"] == {"pair"}
    assert made.predecessors["update_policy"] == {"pair", "ref_logprob"}
    assert made.predecessors["sync_weights"] == {"update_policy"}
    assert made["update_policy"].repeat == 2
    assert "groups" in made["update_policy"].axes
    assert "samples" not in made["update_policy"].axes  # a pair is not split between ranks
    assert "old_logprob" not in made
