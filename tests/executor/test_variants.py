"""Settings beyond the named algorithms, through the real stages on the task of one token."""

import pytest

VALUE = {"baseline": "value", "scale": "none"}
TWO_UPDATES = {"num_sequences_per_minibatch": 32}


def mean_reward(state):
    """Of a step's samples."""
    rewards = [sample.score for group in state.sampled for sample in group.samples]
    return sum(rewards) / len(rewards)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "ppo", "critic": {"kind": "shared_trunk"}},
        VALUE | {"returns": {"estimator": "n_step"}, "critic": {"kind": "independent"}},
        VALUE | {"returns": {"estimator": "monte_carlo"}, "critic": {"kind": "independent", "value_loss": "plain"}},
        {"policy_loss": "decoupled_ppo", "behaviour_cap": 2.0},
        {"correction": {"kind": "truncate"}},
        {"correction": {"kind": "mask", "level": "sequence", "low": 0.5}},
        {"baseline": "batch_mean", "scale": "batch_std"},
        {"scale": "leave_one_out_std", "baseline": "leave_one_out"},
        {"kl_coefficient": 0.01, "kl_estimator": "k3_with_k2_gradient"},
        {"kl_coefficient": 0.01, "kl_estimator": "k1", "kl_in": "reward", "scale": "none"},
        {"positive_nll_coefficient": 0.1, "dual_clip": 3.0, "entropy_coefficient": 0.001},
    ],
    ids=lambda algorithm: ",".join(algorithm),
)
def test_each_factor_solves_the_bandit(bandit, algorithm):
    made = bandit(algorithm=algorithm, batch=TWO_UPDATES)
    assert mean_reward(made.states[0]) < 0.65
    assert sum(mean_reward(state) for state in made.states[-3:]) / 3 > 0.9


def test_the_greedy_completion_is_the_likeliest_and_stays_out_of_the_loss(bandit):
    made = bandit(algorithm={"name": "remax"}, train={"num_steps": 1})
    (state,) = made.states
    assert state.num_rounds == 2
    for group in state.groups:
        assert group.greedy.id == f"{group.prompt.id}#0"
        assert all(s.rollout_logprobs_R[0] <= group.greedy.rollout_logprobs_R[0] + 1e-6 for s in group.samples)
    assert state.tally.num_trained_samples + state.tally.num_skipped_samples == 64


def test_adaptive_kl_follows_its_target(bandit):
    """Far below the target the coefficient falls by 20 % of samples / horizon each step; far above it rises so."""
    for target, factor in ((1e9, 1 - 0.2 * 0.5), (1e-9, 1 + 0.2 * 0.5)):
        algorithm = {"kl_coefficient": 0.5, "adaptive_kl": {"target": target, "horizon": 128}}
        made = bandit(algorithm=algorithm, train={"num_steps": 4}, batch=TWO_UPDATES)
        seen = [state.kl_coefficient for state in made.states]
        # In the first step the KL is measured over two updates, the second of which has moved already.
        assert seen == pytest.approx([0.5 * factor**n for n in range(4)], rel=1e-9)
        assert made.executor.kl_coefficient == pytest.approx(0.5 * factor**4)


def test_nothing_is_learnt_where_every_sample_earns_what_the_greedy_one_does(bandit):
    made = bandit(algorithm={"name": "remax"}, train={"num_steps": 1}, reward=lambda sample: 1.0)
    assert made.states[0].tally.num_without_signal == 1


def test_the_critic_sees_every_sample_also_where_advantages_are_zero(bandit):
    """Equal rewards of 1 and values of 0: the critic has everything to learn."""
    made = bandit(
        algorithm=VALUE | {"returns": {"estimator": "gae"}, "critic": {"kind": "independent", "learning_rate": 0.05}},
        train={"num_steps": 10},
        reward=lambda sample: 1.0,
    )
    values = [sum(float(v.mean()) for v in s.values.at_tokens.values()) / 64 for s in made.states]
    assert values[0] == 0.0
    assert values[-1] > 0.6
    assert all(state.critic_tally.num_tokens == 64 for state in made.states)
