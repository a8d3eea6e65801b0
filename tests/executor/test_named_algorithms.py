"""Every named algorithm, through the real stages: it solves a task of one token."""

import pytest

from plait.algorithms.named import algorithm_names

OFF_POLICY = {"num_sequences_per_minibatch": 32}
"""Two updates per step, so that ratios leave 1; what has no ratio takes one."""


def mean_reward(state):
    """Of a step's samples, greedy ones left out."""
    rewards = [sample.score for group in state.sampled for sample in group.samples]
    return sum(rewards) / len(rewards)


@pytest.mark.parametrize("name", algorithm_names())
def test_each_named_algorithm_solves_the_bandit(bandit, name):
    algorithm = {"name": name}
    if name == "vapo":
        algorithm["critic"] = {"pretraining_steps": 2}
    has_ratio = name not in ("reinforce", "rloo", "remax", "opo")
    made = bandit(algorithm=algorithm, batch=OFF_POLICY if has_ratio else {})
    first, last = mean_reward(made.states[0]), sum(mean_reward(state) for state in made.states[-3:]) / 3
    assert 0.35 < first < 0.65
    assert last > 0.9
