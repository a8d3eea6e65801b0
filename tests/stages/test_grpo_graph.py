"""Which stages GRPO has under which settings."""

import json

import pytest

from plait.algorithms.settings import step_graph
from plait.config import RunConfig

BASE = {
    "name": "x",
    "tasks": [{"source": "reasoning_gym", "task": "chain_sum"}],
    "batch": {"num_prompts_per_step": 4, "num_samples_per_prompt": 4},
    "train": {"num_steps": 3},
}


def graph(**sections):
    data = json.loads(json.dumps(BASE))
    for name, values in sections.items():
        data[name] = {**data[name], **values} if name in data else values
    return step_graph(RunConfig.model_validate_json(json.dumps(data)))


@pytest.mark.parametrize(
    ("sections", "extra"),
    [
        ({}, []),
        ({"batch": {"num_sequences_per_minibatch": 8}}, ["old_logprob"]),
        ({"batch": {"num_epochs_per_step": 2}}, ["old_logprob"]),
        ({"batch": {"num_epochs_per_step": 2}, "model": {"compute_dtype": "bfloat16"}}, ["old_logprob"]),
        # In float32 the engine's log-probabilities are the trainer's.
        ({"batch": {"num_epochs_per_step": 2}, "model": {"compute_dtype": "float32"}}, []),
        ({"algorithm": {"kl_coefficient": 0.1}}, ["ref_logprob"]),
    ],
)
def test_only_the_passes_that_are_needed(sections, extra):
    names = [stage.name for stage in graph(**sections).stages]
    assert sorted(names) == sorted(["generate", "score_verifier", "advantage", "update_policy", "sync_weights", *extra])
    assert names[0] == "generate"
    assert names[-2:] == ["update_policy", "sync_weights"]


def test_scale_over_the_batch_makes_advantage_wait_for_the_step():
    assert graph()["advantage"].granularity == "group"
    assert graph(algorithm={"scale": "batch_std"})["advantage"].granularity == "step"


def test_repeats_are_updates_and_refill_rounds():
    made = graph(
        batch={"num_sequences_per_minibatch": 8, "num_epochs_per_step": 3},
        algorithm={"dynamic_sampling": {"enabled": True, "max_rounds": 5}},
    )
    assert made["update_policy"].repeat == 6
    assert made["generate"].repeat == made["score_verifier"].repeat == 5


def test_every_pass_that_needs_old_weights_comes_before_the_update():
    made = graph(batch={"num_epochs_per_step": 2}, algorithm={"kl_coefficient": 0.1})
    assert made.predecessors["update_policy"] == {"generate", "advantage", "old_logprob", "ref_logprob"}
    assert made.predecessors["sync_weights"] == {"update_policy"}
