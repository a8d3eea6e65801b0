"""Every named loss: one update depends on its data only, not on how they are packed into microbatches."""

import json

import numpy as np
import pytest
import torch

from plait.algorithms.losses import POLICY_LOSSES
from plait.batch import Group, Prompt, Sample, Verdict
from plait.config import AlgorithmConfig, OptimizerConfig
from plait.models.value_head import ValueHead
from plait.plan import BatchCounts
from plait.roles.critic import Critic
from plait.roles.policy import Policy
from plait.stages.advantage import step_advantages
from plait.stages.critic_update import update_critic
from plait.stages.logprob import group_logprobs
from plait.stages.update import UpdateInputs, UpdateSettings, update_policy
from plait.stages.value import group_values, trunk_values

SGD = OptimizerConfig(name="sgd", learning_rate=0.3, betas=(0.0, 0.0), max_grad_norm=1e9)
REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.3, 0.9, 0.1, 0.2], [1.0, 1.0, 1.0, 1.0]]
VALUE = {"baseline": "value", "scale": "none", "returns": {"estimator": "gae"}}


def make_groups(model=None, *, truncated=()):
    """Groups of REWARDS with answers of 1 to 14 tokens; the engine's log-probabilities are off by up to 0.3."""
    generator = np.random.default_rng(0)
    groups = []
    for g, rewards in enumerate(REWARDS):
        prompt = Prompt(f"p{g}", "task", (), None, "answer")
        prompt_ids = tuple(generator.integers(3, 48, generator.integers(2, 9)).tolist())
        samples = []
        for k, reward in enumerate(rewards):
            length = int(generator.integers(1, 15))
            samples.append(
                Sample(
                    id=f"p{g}#{k}",
                    prompt=prompt,
                    prompt_ids=prompt_ids,
                    response_ids_R=generator.integers(3, 48, length).astype(np.int32),
                    rollout_logprobs_R=np.zeros(length, dtype=np.float32),
                    versions_R=np.zeros(length, dtype=np.int32),
                    response_mask_R=np.ones(length, dtype=bool),
                    finish="length" if (g, k) in truncated else "stop",
                    seed=0,
                    text="",
                    verdict=Verdict("scored", reward),
                )
            )
        groups.append(Group(prompt, samples))
    if model is not None:
        for key, logprobs in group_logprobs(model, groups, temperature=1.0, max_tokens=1000).items():
            sample = groups[int(key[1])].samples[int(key[3])]
            noise = generator.uniform(-0.3, 0.3, len(logprobs))
            sample.rollout_logprobs_R = (logprobs.numpy() + noise).astype(np.float32)
    return groups


def old_logprobs(model, groups):
    """The trainer's own, off by up to 0.3 as if updates had moved the policy since; seeded."""
    generator = torch.Generator().manual_seed(0)
    return {
        key: logprobs + 0.6 * torch.rand(len(logprobs), generator=generator) - 0.3
        for key, logprobs in group_logprobs(model, groups, temperature=1.0, max_tokens=1000).items()
    }


def settings(max_tokens, **algorithm):
    return UpdateSettings(
        algorithm=AlgorithmConfig.model_validate_json(json.dumps(algorithm)),
        counts=BatchCounts(4, 4, 16, 16, 1, max_tokens),
        num_epochs=1,
        temperature=1.0,
        max_completion_tokens=20,
        num_updates=100,
        seed=1,
    )


def weights(role):
    state = role.state()
    parts = [tensor for kind in state if "optimizer" not in kind for tensor in state[kind].values()]
    return torch.cat([tensor.detach().flatten() for tensor in parts])


def policy_after(make_model, max_tokens, algorithm, *, head=False):
    model = make_model()
    groups, config = make_groups(model), settings(max_tokens, **algorithm)
    policy = Policy(model, SGD, value_head=_head() if head else None)
    old, values, made = old_logprobs(model, groups), None, {}
    if head:
        values, _ = trunk_values(policy, groups, temperature=1.0, max_tokens=max_tokens)
        made["values"] = values.at_tokens
    advantages = step_advantages(groups, config.algorithm, values=values)
    inputs = UpdateInputs(groups, advantages.advantages, old, None, returns=advantages.returns, **made)
    tally = update_policy(policy, inputs, config, step=1)
    return weights(policy), tally


def _head():
    head = ValueHead(32, "cpu")
    torch.manual_seed(3)
    torch.nn.init.normal_(head.linear.weight, std=0.2)
    return head


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_packing_changes_no_policy_loss(make_model, name, reduction):
    algorithm = {"policy_loss": name, "reduction": reduction, "clip_low": 0.1, "clip_high": 0.1}
    whole, tally = policy_after(make_model, 1000, algorithm)
    for max_tokens in (24, 50):
        split, other = policy_after(make_model, max_tokens, algorithm)
        assert (split - whole).abs().max() < 1e-6
        assert other.policy_loss == pytest.approx(tally.policy_loss, abs=1e-6)
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    assert (whole - start).abs().max() > 1e-4
    assert (tally.outside_sum > 0) == (name != "reinforce")


@pytest.mark.parametrize(
    "algorithm",
    [
        {"correction": {"kind": "truncate", "high": 1.1}},
        {"correction": {"kind": "mask", "level": "sequence", "low": 0.5, "high": 1.5}},
        {"correction": {"kind": "mask", "level": "geometric_mean", "low": 0.9, "high": 1.1}},
        {"positive_nll_coefficient": 0.1},
        {"filters": {"overlong": True}},
        {"dual_clip": 1.2},
        {"whitening": True},
    ],
    ids=lambda a: next(iter(a)),
)
def test_packing_changes_nothing_of_what_is_added(make_model, algorithm):
    whole, _ = policy_after(make_model, 1000, algorithm)
    plain, _ = policy_after(make_model, 1000, {})
    for max_tokens in (24, 50):
        assert (policy_after(make_model, max_tokens, algorithm)[0] - whole).abs().max() < 1e-6
    if "filters" not in algorithm and "dual_clip" not in algorithm:
        assert (whole - plain).abs().max() > 1e-5


@pytest.mark.parametrize("value_loss", ["plain", "clipped"])
def test_packing_changes_no_value_loss_of_a_critic(make_model, value_loss):
    def after(max_tokens):
        groups = make_groups()
        config = settings(
            max_tokens, **VALUE, critic={"kind": "independent", "value_loss": value_loss, "value_clip": 0.05}
        )
        critic = Critic(make_model(), SGD)
        values = group_values(critic, groups, max_tokens=max_tokens)
        made = step_advantages(groups, config.algorithm, values=values)
        moved = {key: values_R + 0.1 for key, values_R in values.at_tokens.items()}
        inputs = UpdateInputs(groups, made.advantages, None, None, returns=made.returns, values=moved)
        return weights(critic), update_critic(critic, inputs, config, step=1)

    whole, tally = after(1000)
    for max_tokens in (24, 50):
        assert (after(max_tokens)[0] - whole).abs().max() < 1e-6
    assert tally.num_applied == 1
    assert tally.num_tokens == sum(s.num_loss_tokens for g in make_groups() for s in g.samples)


def test_packing_changes_no_shared_trunk(make_model):
    algorithm = VALUE | {"critic": {"kind": "shared_trunk"}}
    whole, tally = policy_after(make_model, 1000, algorithm, head=True)
    for max_tokens in (24, 50):
        assert (policy_after(make_model, max_tokens, algorithm, head=True)[0] - whole).abs().max() < 1e-6
    assert tally.num_skipped_samples == 0
    assert tally.value_loss > 0


def test_value_loss_of_a_critic_by_hand(make_model):
    """A zero head: V = 0, so the loss is the mean of G^2 / 2 over tokens, and the bias moves by lr c mean(G)."""
    groups = make_groups()
    config = settings(
        1000,
        baseline="value",
        scale="none",
        returns={"estimator": "monte_carlo"},
        critic={"kind": "independent", "value_loss": "plain", "coefficient": 0.5},
    )
    critic = Critic(make_model(), SGD)
    values = group_values(critic, groups, max_tokens=1000)
    made = step_advantages(groups, config.algorithm, values=values)
    inputs = UpdateInputs(groups, made.advantages, None, None, returns=made.returns, values=values.at_tokens)
    tally = update_critic(critic, inputs, config, step=1)
    tokens = [(s.reward, s.num_loss_tokens) for group in groups for s in group.samples]
    total = sum(count for _, count in tokens)
    # Without discount each token's return is the reward of its sample.
    assert tally.value_loss == pytest.approx(sum(r**2 / 2 * n for r, n in tokens) / total, rel=1e-5)
    bias = float(critic.state()["critic"]["value_head.linear.bias"])
    assert bias == pytest.approx(0.3 * 0.5 * sum(r * n for r, n in tokens) / total, rel=1e-5)


def test_skipping_stays_right_where_advantages_differ_by_token(make_model):
    """A sample is skipped only if all its tokens have advantage 0; a forced pass (a tiny entropy) changes nothing."""
    model = make_model()
    groups = make_groups(model)

    def after(**more):
        policy, config = Policy(make_model(), SGD), settings(1000, **more)
        advantages = step_advantages(groups, config.algorithm).advantages
        key = groups[1].samples[0].id  # of a group without signal
        advantages[key] = torch.zeros_like(advantages[key])
        advantages[key][-1] = 0.7
        tally = update_policy(policy, UpdateInputs(groups, advantages, None, None), config, step=1)
        return weights(policy), tally

    skipping, tally = after()
    assert tally.num_skipped_samples == 7
    forced, tally = after(entropy_coefficient=1e-12)
    assert tally.num_skipped_samples == 0
    assert (forced - skipping).abs().max() < 1e-6


def test_filtered_samples_are_as_if_they_had_never_been(make_model):
    """Overlong filtering: out of the baseline, the denominators and the loss."""

    def after(groups, **algorithm):
        policy, config = Policy(make_model(), SGD), settings(1000, **algorithm)
        advantages = step_advantages(groups, config.algorithm).advantages
        update_policy(policy, UpdateInputs(groups, advantages, None, None), config, step=1)
        return weights(policy)

    filtered = after(make_groups(truncated={(0, 1), (2, 3)}), filters={"overlong": True})
    without = make_groups()
    del without[0].samples[1], without[2].samples[3]
    assert torch.equal(filtered, after(without))
    assert not torch.equal(filtered, after(make_groups()))


def test_pretraining_leaves_the_policys_schedule_alone(make_model):
    """With two steps of the critic alone, the policy's third step is its first."""
    model = make_model()
    groups = make_groups(model)
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_share=0.5, schedule="linear")
    critic = {"kind": "independent", "pretraining_steps": 2}
    config = settings(1000, **VALUE, critic=critic)
    advantages = {s.id: torch.ones(s.num_loss_tokens) for group in groups for s in group.samples}
    inputs = UpdateInputs(groups, advantages, None, None)
    tally = update_policy(Policy(model, optimizer), inputs, config, step=3)
    assert tally.rate == pytest.approx(1e-2 / 49)  # first of 49 updates of warm-up, half of 100 - 2


def test_recompute_changes_nothing_of_a_critic(make_model):
    made = []
    for recompute in ("none", "full"):
        groups, config = make_groups(), settings(50, **VALUE, critic={"kind": "independent"})
        critic = Critic(make_model(), SGD, recompute=recompute)
        values = group_values(critic, groups, max_tokens=50)
        advantages = step_advantages(groups, config.algorithm, values=values)
        inputs = UpdateInputs(groups, {}, None, None, returns=advantages.returns, values=values.at_tokens)
        for step in (1, 2):  # the first moves the head only: it begins at zero
            update_critic(critic, inputs, config, step=step)
        made.append(weights(critic))
    assert (made[0] - made[1]).abs().max() < 1e-6
    assert (made[0] - weights(Critic(make_model(), SGD))).abs().max() > 1e-4
