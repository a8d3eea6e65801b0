"""Every named algorithm, through the real stages: it solves a task of one token."""

import pytest

from plait.algorithms.named import algorithm_names

OFF_POLICY = {"num_sequences_per_minibatch": 32}
"""Two updates per step, so that ratios leave 1; what has no ratio takes one."""


def mean_reward(state):
    """Of a step's samples, greedy ones left out."""
    rewards = [sample.score for group in state.sampled for sample in group.samples]
    return sum(rewards) / len(rewards)


FROM_ROWS = ("dpo",)


@pytest.mark.parametrize("name", [name for name in algorithm_names() if name not in FROM_ROWS])
def test_each_named_algorithm_solves_the_bandit(bandit, name):
    algorithm = {"name": name}
    if name == "vapo":
        algorithm["critic"] = {"pretraining_steps": 2}
    has_ratio = name not in ("reinforce", "rloo", "remax", "opo")
    made = bandit(algorithm=algorithm, batch=OFF_POLICY if has_ratio else {})
    first, last = mean_reward(made.states[0]), sum(mean_reward(state) for state in made.states[-3:]) / 3
    assert 0.35 < first < 0.65
    assert last > 0.9


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo"])
@pytest.mark.parametrize("name", ["dpo", "iterative_dpo"])
def test_each_loss_on_pairs_solves_the_bandit(bandit, name, loss):
    """dpo never samples: what it has learnt is measured by sampling when it has ended."""
    pairwise = {"beta": 2.0, "margin": 1.0} if loss == "simpo" else {}
    groups = {"num_samples_per_prompt": 2, "num_prompts_per_step": 32} if name == "dpo" else {}
    made = bandit(
        algorithm={"name": name, "pairwise_loss": loss, "pairwise": pairwise},
        batch=groups | {"num_sequences_per_minibatch": 32},
        rules=name != "dpo",  # the recipe of the bandit names a task that gives no answers
    )
    assert 0.35 < made.sampled_reward(made.start) < 0.65
    assert made.sampled_reward(made.roles.policy.model) > 0.9
    assert all(state.tally.num_applied == 2 for state in made.states[:3])
    assert all(bool(state.sampled) == (name != "dpo") for state in made.states)


def test_groups_without_difference_give_no_pair(bandit):
    made = bandit(algorithm={"name": "iterative_dpo"}, train={"num_steps": 1}, reward=lambda sample: 1.0)
    (state,) = made.states
    assert (len(state.sampled), state.groups, state.tally.num_applied) == (8, [], 0)
    made = bandit(algorithm={"name": "iterative_dpo"}, train={"num_steps": 1})
    (state,) = made.states
    with_difference = [group for group in state.sampled if group.has_signal]
    assert [group.prompt for group in state.groups] == [group.prompt for group in with_difference]
    assert all([s.reward for s in group.samples] == [1.0, 0.0] for group in state.groups)
