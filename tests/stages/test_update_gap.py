"""Which tokens the engine/trainer gap is measured on: only those scored by the weights that sampled them."""

import json

import numpy as np
import pytest
import torch

from plait.batch import Group, Prompt, Sample, Verdict
from plait.config import AlgorithmConfig, OptimizerConfig
from plait.plan import BatchCounts
from plait.roles.policy import Policy
from plait.stages.advantage import step_advantages
from plait.stages.logprob import group_logprobs
from plait.stages.update import UpdateInputs, UpdateSettings, update_policy

SIZES = [[3, 5], [2, 6]]
"""Response tokens of the samples of two groups; one group is one update."""


def sampled_by(model):
    """Groups whose rollout log-probabilities are exactly those of the model, so that every true gap is 0."""
    generator = np.random.default_rng(0)
    groups = []
    for g, sizes in enumerate(SIZES):
        prompt = Prompt(f"p{g}", "task", (), None, "answer")
        samples = [
            Sample(
                id=f"p{g}#{k}",
                prompt=prompt,
                prompt_ids=(3, 4, 5),
                response_ids_R=generator.integers(3, 48, size).astype(np.int32),
                rollout_logprobs_R=np.zeros(size, dtype=np.float32),
                versions_R=np.zeros(size, dtype=np.int32),
                response_mask_R=np.ones(size, dtype=bool),
                finish="stop",
                seed=0,
                text="",
                verdict=Verdict("scored", float(k)),
            )
            for k, size in enumerate(sizes)
        ]
        groups.append(Group(prompt, samples))
    scored = group_logprobs(model, groups, temperature=1.0, max_tokens=1000)
    for group in groups:
        for sample in group.samples:
            sample.rollout_logprobs_R = scored[sample.id].numpy().copy()
    return groups, scored


def gaps_of(model, groups, old_logprobs=None, epochs=1):
    settings = UpdateSettings(
        algorithm=AlgorithmConfig.model_validate_json(json.dumps({})),
        counts=BatchCounts(2, 2, 4, 2, 2 * epochs, 1000),
        num_epochs=epochs,
        temperature=1.0,
        max_completion_tokens=20,
        num_updates=10,
        seed=1,
    )
    policy = Policy(model, OptimizerConfig(name="sgd", learning_rate=0.5, betas=(0.0, 0.0)))
    inputs = UpdateInputs(groups, step_advantages(groups, settings.algorithm).advantages, old_logprobs, None)
    return torch.cat(update_policy(policy, inputs, settings, step=1).gaps)


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_first_update_only(make_model, epochs):
    model = make_model()
    groups, _ = sampled_by(model)
    gaps = gaps_of(model, groups, epochs=epochs)
    assert len(gaps) == 3 + 5  # 2 + 6 were scored by weights that had moved
    assert gaps.max() < 1e-5


def test_every_sample_where_the_trainer_scored_them_before_it_updated(make_model):
    model = make_model()
    groups, old = sampled_by(model)
    groups[1].samples[0].rollout_logprobs_R[1] -= 0.25
    gaps = gaps_of(model, groups, old, epochs=2)
    assert len(gaps) == 3 + 5 + 2 + 6
    assert gaps.tolist() == pytest.approx([0.0] * 9 + [0.25] + [0.0] * 6, abs=1e-6)


def test_an_update_that_was_not_applied_leaves_the_next_comparable(make_model):
    model = make_model()
    groups, _ = sampled_by(model)
    calls = []

    def poison_once(gradient):
        calls.append(None)
        return gradient * float("nan") if len(calls) == 1 else gradient

    model.model.norm.weight.register_hook(poison_once)
    gaps = gaps_of(model, groups)
    assert len(gaps) == 3 + 5 + 2 + 6
    assert gaps.max() < 1e-5
