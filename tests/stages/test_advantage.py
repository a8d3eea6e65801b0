"""The stage that makes advantages: from siblings, from a greedy completion, from values; with a KL in the reward."""

import json

import numpy as np
import pytest
import torch

from plait.batch import Group, Prompt, Sample, Verdict
from plait.config import AlgorithmConfig
from plait.stages.advantage import Values, step_advantages
from plait.stages.reward import combine, shape


def sample(key, reward, length, *, finish="stop", text=""):
    return Sample(
        id=key,
        prompt=Prompt(key[:2], "task", (), None, "answer"),
        prompt_ids=(3,),
        response_ids_R=np.full(length, 4, dtype=np.int32),
        rollout_logprobs_R=np.zeros(length, dtype=np.float32),
        versions_R=np.zeros(length, dtype=np.int32),
        response_mask_R=np.ones(length, dtype=bool),
        finish=finish,
        seed=0,
        text=text,
        verdict=Verdict("scored", reward),
    )


def group(number, rewards, lengths, greedy=None):
    samples = [sample(f"p{number}#{k}", reward, n) for k, (reward, n) in enumerate(zip(rewards, lengths, strict=True))]
    return Group(samples[0].prompt, samples, None if greedy is None else sample(f"p{number}#g", greedy, 3))


def algorithm(**settings):
    return AlgorithmConfig.model_validate_json(json.dumps(settings))


def lists(made):
    return {key: [round(value, 5) for value in part.tolist()] for key, part in made.items()}


def test_constant_per_sample_without_a_critic():
    made = step_advantages([group(0, [1.0, 0.0], [2, 3])], algorithm(scale="none"))
    assert lists(made.advantages) == {"p0#0": [0.5, 0.5], "p0#1": [-0.5, -0.5, -0.5]}
    assert made.returns == {}
    assert made.kl_per_sample is None


def test_length_weighted_baseline():
    """(2 x 1 + 6 x 0) / 8 = 0.25."""
    made = step_advantages([group(0, [1.0, 0.0], [2, 6])], algorithm(name="opo"))
    assert made.advantages["p0#0"].tolist() == [0.75, 0.75]
    assert made.advantages["p0#1"].tolist() == [-0.25] * 6


def test_greedy_baseline():
    groups = [group(0, [1.0, 0.0], [1, 1], greedy=1.0), group(1, [1.0, 1.0], [1, 1], greedy=0.0)]
    made = step_advantages(groups, algorithm(name="remax"))
    assert lists(made.advantages) == {"p0#0": [0.0], "p0#1": [-1.0], "p1#0": [1.0], "p1#1": [1.0]}


OLD = {"p0#0": torch.tensor([-1.0, -2.0]), "p0#1": torch.tensor([-1.0])}
REF = {"p0#0": torch.tensor([-1.5, -1.0]), "p0#1": torch.tensor([-3.0])}
"""k1 per token: +0.5 and -1; +2."""


def test_kl_in_the_reward_of_whole_completions():
    """Rewards 1 - 0.1 (0.5 - 1) = 1.05 and 0 - 0.1 x 2 = -0.2; leave-one-out: the difference, 1.25."""
    made = step_advantages(
        [group(0, [1.0, 0.0], [2, 1])], algorithm(name="rloo"), old_logprobs=OLD, ref_logprobs=REF, kl_coefficient=0.1
    )
    assert lists(made.advantages) == {"p0#0": [1.25, 1.25], "p0#1": [-1.25]}
    assert made.kl_per_sample == pytest.approx((0.5 - 1.0 + 2.0) / 2)


def test_kl_in_the_reward_token_by_token():
    """From each token on: 1 - 0.1 (0.5 - 1) = 1.05, then 1 - 0.1 (-1) = 1.1; the other 0 - 0.2."""
    settings = algorithm(name="reinforce_pp", whitening=False)
    made = step_advantages(
        [group(0, [1.0, 0.0], [2, 1])], settings, old_logprobs=OLD, ref_logprobs=REF, kl_coefficient=0.1
    )
    assert lists(made.advantages) == {"p0#0": [1.05, 1.1], "p0#1": [-0.2]}


def test_whitening_is_over_all_tokens_of_the_step():
    """Tokens 1, 1, 0: mean 2/3, deviation (n - 1) sqrt(1/3)."""
    made = step_advantages([group(0, [1.0, 0.0], [2, 1])], algorithm(name="reinforce_pp"))
    high, low = (1 / 3) / (1 / 3) ** 0.5, (-2 / 3) / (1 / 3) ** 0.5
    assert lists(made.advantages) == {"p0#0": [round(high, 5)] * 2, "p0#1": [round(low, 5)]}


VALUES = Values(
    {"p0#0": torch.tensor([0.2, 0.4]), "p0#1": torch.tensor([0.5])},
    {"p0#0": 0.9, "p0#1": 0.8},
)


def test_gae_by_hand():
    """gamma 1, lambda 0.5. p0#0: delta 0.4 - 0.2, then 1 - 0.4; A = 0.2 + 0.5 x 0.6, 0.6. p0#1: 0 - 0.5."""
    returns = {"estimator": "gae", "lambda_policy": 0.5, "lambda_critic": 1.0}
    settings = algorithm(baseline="value", scale="none", returns=returns, critic={"kind": "independent"})
    made = step_advantages([group(0, [1.0, 0.0], [2, 1])], settings, values=VALUES)
    assert lists(made.advantages) == {"p0#0": [0.5, 0.6], "p0#1": [-0.5]}
    # lambda_critic 1: the Monte Carlo return.
    assert lists(made.returns) == {"p0#0": [1.0, 1.0], "p0#1": [0.0]}


def test_a_cut_completion_may_be_continued_by_its_value():
    returns = {"estimator": "monte_carlo", "gamma": 0.5, "bootstrap_truncated": True}
    settings = algorithm(baseline="value", scale="none", returns=returns, critic={"kind": "independent"})
    groups = [group(0, [1.0, 0.0], [2, 1])]
    groups[0].samples[0].finish = "length"
    made = step_advantages(groups, settings, values=VALUES)
    # p0#0: 1 + 0.5 x 0.9 at its last token, half of that before; p0#1 ended by itself.
    assert lists(made.returns) == {"p0#0": [0.725, 1.45], "p0#1": [0.0]}
    unbootstrapped = algorithm(baseline="value", scale="none", returns={"gamma": 0.5}, critic={"kind": "independent"})
    assert lists(step_advantages(groups, unbootstrapped, values=VALUES).returns)["p0#0"] == [0.5, 1.0]


def test_n_step_returns():
    returns = {"estimator": "n_step", "num_steps": 1, "gamma": 1.0}
    settings = algorithm(baseline="value", scale="none", returns=returns, critic={"kind": "independent"})
    made = step_advantages([group(0, [1.0, 0.0], [2, 1])], settings, values=VALUES)
    assert lists(made.returns) == {"p0#0": [0.4, 1.0], "p0#1": [0.0]}
    assert lists(made.advantages) == {"p0#0": [0.2, 0.6], "p0#1": [-0.5]}


def test_lambda_may_depend_on_the_length():
    """alpha 1: lambda = 1 - 1 / l, so 1/2 for two tokens and 0 for one."""
    returns = {"estimator": "gae", "length_adaptive_alpha": 1.0}
    settings = algorithm(baseline="value", scale="none", returns=returns, critic={"kind": "independent"})
    made = step_advantages([group(0, [1.0, 0.0], [2, 1])], settings, values=VALUES)
    assert lists(made.advantages) == {"p0#0": [0.5, 0.6], "p0#1": [-0.5]}


def test_uncounted_samples_have_zeros_and_change_nothing():
    groups = [group(0, [1.0, 0.0, 9.0], [2, 1, 3])]
    groups[0].samples[2].verdict = Verdict("failed", 0.0, "raised")
    made = step_advantages(groups, algorithm(scale="none")).advantages
    assert lists(made) == {"p0#0": [0.5, 0.5], "p0#1": [-0.5], "p0#2": [0.0, 0.0, 0.0]}


def test_rewards_are_weighted_and_shaped_part_by_part():
    one, other = sample("p0#0", 1.0, 8), sample("p0#1", 0.0, 10)
    one.reward_scores, other.reward_scores = {"a": 0.5, "b": 2.0}, {"a": -1.0, "b": float("inf")}
    combine([one, other], {"a": 2.0, "b": -0.25}, 3.0)
    assert one.unshaped_reward == 3.0 + 1.0 - 0.5
    assert (other.verdict.kind, other.verdict.reason) == ("failed", 'reward model "b" gave inf')
    shaping = algorithm(shaping={"overlong_buffer_share": 0.4, "overlong_penalty": 2.0}).shaping
    shape([Group(one.prompt, [one, other])], shaping, max_completion_tokens=10)
    # Buffer of 4 tokens from 6 to 10: 8 is half-way.
    assert one.shaping == {"overlong": -1.0}
    assert one.reward == 2.5
    assert (other.reward, other.score) == (0.0, 0.0)


def test_signal_is_that_of_rewards_before_shaping():
    made = group(0, [0.0, 0.0], [8, 10])
    shape([made], algorithm(shaping={"overlong_buffer_share": 0.4}).shaping, max_completion_tokens=10)
    assert made.samples[0].reward != made.samples[1].reward
    assert not made.has_signal
