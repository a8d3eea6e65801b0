"""One update depends on its data only: not on microbatches, not on skipped passes, not on failed siblings."""

import json

import numpy as np
import pytest
import torch

from plait.batch import Group, Prompt, Sample, Verdict
from plait.config import AlgorithmConfig, OptimizerConfig
from plait.errors import NonFiniteError
from plait.plan import BatchCounts
from plait.roles.policy import Policy
from plait.roles.reference import Reference
from plait.stages.advantage import step_advantages
from plait.stages.logprob import group_logprobs
from plait.stages.update import UpdateInputs, UpdateSettings, minibatches, update_policy

SGD = {"name": "sgd", "learning_rate": 0.5, "betas": (0.0, 0.0), "max_grad_norm": 1e9}


def make_groups(rewards, *, seed=0, failed=()):
    """rewards: one list per group; failed: (group, index) of samples whose verifier failed."""
    generator = np.random.default_rng(seed)
    groups = []
    for g, group_rewards in enumerate(rewards):
        prompt = Prompt(f"p{g}", "task", (), None, "answer")
        prompt_ids = tuple(generator.integers(3, 48, generator.integers(2, 9)).tolist())
        samples = []
        for k, reward in enumerate(group_rewards):
            length = int(generator.integers(1, 15))
            verdict = Verdict("failed", 0.0, "raised") if (g, k) in failed else Verdict("scored", reward)
            samples.append(
                Sample(
                    id=f"p{g}#{k}",
                    prompt=prompt,
                    prompt_ids=prompt_ids,
                    response_ids_R=generator.integers(3, 48, length).astype(np.int32),
                    rollout_logprobs_R=-np.ones(length, dtype=np.float32),
                    versions_R=np.zeros(length, dtype=np.int32),
                    response_mask_R=np.ones(length, dtype=bool),
                    finish="stop",
                    seed=0,
                    text="",
                    verdict=verdict,
                )
            )
        groups.append(Group(prompt, samples))
    return groups


def settings(groups, *, max_tokens=1000, minibatch=None, epochs=1, temperature=1.0, **algorithm):
    size = len(groups[0].samples)
    total = sum(len(g.samples) for g in groups)
    minibatch = minibatch or total
    return UpdateSettings(
        algorithm=AlgorithmConfig.model_validate_json(json.dumps(algorithm)),
        counts=BatchCounts(len(groups), size, total, minibatch, total // minibatch * epochs, max_tokens),
        num_epochs=epochs,
        temperature=temperature,
        max_completion_tokens=20,
        num_updates=100,
        seed=1,
    )


def updated(model, groups, config, optimizer=None, **inputs):
    """Weights after the updates of one step, and the tally."""
    policy = Policy(model, OptimizerConfig(**(optimizer or SGD)))
    advantages = step_advantages(groups, config.algorithm).advantages
    made = {"old_logprobs": None, "ref_logprobs": None} | inputs
    tally = update_policy(policy, UpdateInputs(groups, advantages, **made), config, step=1)
    return torch.cat([p.detach().flatten() for p in policy.state()["policy"].values()]), tally


REWARDS = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [0.3, 0.9, 0.1, 0.2], [1.0, 1.0, 1.0, 1.0]]


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_microbatches_change_nothing(make_model, reduction):
    groups = make_groups(REWARDS)
    whole, _ = updated(make_model(), groups, settings(groups, reduction=reduction))
    for max_tokens in (24, 50):
        split, _ = updated(make_model(), groups, settings(groups, max_tokens=max_tokens, reduction=reduction))
        assert (split - whole).abs().max() < 1e-6
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    assert (whole - start).abs().max() > 1e-4


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_skipped_passes_stay_in_the_denominators(make_model, reduction):
    """A tiny KL weight forces a pass for every sample; without it groups of zero advantage are skipped."""
    groups = make_groups(REWARDS)
    skipping, tally = updated(make_model(), groups, settings(groups, reduction=reduction))
    assert tally.num_skipped_samples == 8
    reference = group_logprobs(Reference(make_model()), groups, temperature=1.0, max_tokens=1000)
    config = settings(groups, reduction=reduction, kl_coefficient=1e-12)
    forced, tally = updated(make_model(), groups, config, ref_logprobs=reference)
    assert tally.num_skipped_samples == 0
    assert (forced - skipping).abs().max() < 1e-6


def test_failed_samples_are_as_if_they_had_never_been(make_model):
    with_failed = make_groups([[1.0, 0.0, 0.5, 1.0]], failed={(0, 2)})
    without = make_groups([[1.0, 0.0, 0.5, 1.0]])
    del without[0].samples[2]
    config = settings(with_failed, reduction="seq-mean-token-mean")
    first, _ = updated(make_model(), with_failed, config)
    second, _ = updated(make_model(), without, config)
    assert torch.equal(first, second)


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_a_completion_of_length_zero_is_as_if_it_had_never_been(make_model, reduction):
    with_empty, without = make_groups([[1.0, 0.0, 0.5, 1.0]]), make_groups([[1.0, 0.0, 0.5, 1.0]])
    empty = with_empty[0].samples[2]
    for name in ("response_ids_R", "rollout_logprobs_R", "versions_R", "response_mask_R"):
        setattr(empty, name, getattr(empty, name)[:0])
    del without[0].samples[2]
    config = settings(with_empty, reduction=reduction)
    first, tally = updated(make_model(), with_empty, config)
    second, _ = updated(make_model(), without, config)
    assert torch.equal(first, second)
    assert tally.num_trained_samples == 3


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_weights_that_are_all_zero_give_zero_and_no_nan(make_model, reduction):
    """Every token's ratio of trainer to engine is outside the band, and is dropped; denominators stay."""
    groups = make_groups(REWARDS)
    old = group_logprobs(Reference(make_model()), groups, temperature=1.0, max_tokens=1000)
    for one in (s for group in groups for s in group.samples):
        one.rollout_logprobs_R = old[one.id].numpy() - 3.0
    config = settings(groups, reduction=reduction, correction={"kind": "mask", "high": 2.0})
    weights, tally = updated(make_model(), groups, config, old_logprobs=old)
    assert torch.equal(weights, torch.cat([p.detach().flatten() for p in make_model().parameters()]))
    assert (tally.policy_loss, tally.grad_norms, tally.num_nonfinite) == (0.0, [0.0], 0)
    assert tally.correction_kept_sum == 0


def test_hand_written_gradient_of_one_token(make_model):
    """One-token answers, group mean: the update is -lr * sum(-A_i / B * d log pi)."""
    groups = make_groups([[1.0, 0.0]])
    for sample in groups[0].samples:
        sample.response_ids_R, sample.response_mask_R = sample.response_ids_R[:1], np.ones(1, dtype=bool)
        sample.rollout_logprobs_R = sample.rollout_logprobs_R[:1]
    config = settings(groups, scale="none", temperature=0.5)
    made, _ = updated(make_model(), groups, config)
    model = make_model(torch.float64)
    prompt = torch.tensor([groups[0].samples[0].prompt_ids])
    logprobs = (model(prompt, context=_packed(prompt.shape[1])).logits[0, -1] / 0.5).log_softmax(-1)
    first, second = (int(s.response_ids_R[0]) for s in groups[0].samples)
    (-(0.5 * logprobs[first] - 0.5 * logprobs[second]) / 2).backward()
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    change = -0.5 * torch.cat([p.grad.flatten() for p in model.parameters()])
    # Sampler and trainer each round a log-probability of 4 to 8, by half of 4.8e-7 at least, and the ratio with them.
    assert (made - (before + change)).abs().max() < 2e-6 * change.abs().max()


def _packed(length):
    from plait.models.attention import PackedAttention

    return PackedAttention([length])


def test_old_logprobs_of_the_same_weights_change_nothing(make_model):
    groups = make_groups(REWARDS)
    plain, _ = updated(make_model(), groups, settings(groups))
    old = group_logprobs(Reference(make_model()), groups, temperature=1.0, max_tokens=1000)
    with_old, tally = updated(make_model(), groups, settings(groups), old_logprobs=old)
    assert (plain - with_old).abs().max() < 1e-6
    assert tally.ratio_sum / tally.num_trained_tokens == pytest.approx(1, abs=1e-5)


def test_minibatches_hold_whole_groups_and_epochs_differ_in_order():
    groups = make_groups(REWARDS)
    made = [
        [g.prompt.id for g in part] for part in minibatches(groups, settings(groups, minibatch=8, epochs=2), step=1)
    ]
    assert made[:2] == [["p0", "p1"], ["p2", "p3"]]
    assert sorted(made[2] + made[3]) == ["p0", "p1", "p2", "p3"]


def test_nothing_to_learn_makes_no_update(make_model):
    groups = make_groups([[1.0, 1.0], [0.0, 0.0]])
    start = torch.cat([p.detach().flatten() for p in make_model().parameters()])
    adam = {"learning_rate": 0.1, "weight_decay": 0.5}
    after, tally = updated(make_model(), groups, settings(groups), optimizer=adam)
    assert torch.equal(after, start)
    assert (tally.num_applied, tally.num_without_signal) == (0, 1)


def test_b25_nan_gradient_is_not_applied_is_named_and_ends_the_run_when_it_repeats(make_model):
    groups = make_groups(REWARDS)
    model = make_model()
    policy = Policy(model, OptimizerConfig(**SGD), max_nonfinite_updates=2)
    before = {name: tensor.clone() for name, tensor in policy.state()["policy"].items()}
    poisoned = model.model.layers[1].mlp.up_proj.weight
    handle = poisoned.register_hook(lambda gradient: gradient * float("nan"))
    inputs = UpdateInputs(groups, step_advantages(groups, AlgorithmConfig()).advantages, None, None)
    tally = update_policy(policy, inputs, settings(groups), step=1)
    assert (tally.num_applied, tally.num_nonfinite) == (0, 1)
    assert tally.nonfinite_in == "model.layers.1.mlp.up_proj.weight"
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.state()["policy"].items())
    with pytest.raises(NonFiniteError, match="2 updates in a row"):
        update_policy(policy, inputs, settings(groups), step=2)
    handle.remove()


def test_n42_masters_move_where_bf16_alone_would_not(make_model):
    """N42: a weight of 1 under updates of 1e-6."""
    model = make_model(torch.bfloat16)
    policy = Policy(model, OptimizerConfig(name="sgd", learning_rate=1e-6, betas=(0.0, 0.0), max_grad_norm=1e9))
    norm = model.model.norm.weight
    assert (norm == 1).all()
    for _ in range(200):
        policy.backward(norm.sum())
        policy.apply(1e-6)
    master = policy.state()["policy"]["model.norm.weight"]
    assert master.mean().item() == pytest.approx(1 - 200e-6, abs=5e-6)
    assert (norm == 1).all()  # rounds back to 1: the copy alone would never have moved


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_state_restores_exactly(make_model, dtype, name):
    groups = make_groups(REWARDS)
    config = settings(groups)
    optimizer = OptimizerConfig(name=name, learning_rate=1e-2)
    inputs = UpdateInputs(groups, step_advantages(groups, config.algorithm).advantages, None, None)
    first = Policy(make_model(dtype), optimizer)
    update_policy(first, inputs, config, step=1)
    saved = {kind: {k: v.clone() for k, v in named.items()} for kind, named in first.state().items()}
    update_policy(first, inputs, config, step=2)
    second = Policy(make_model(dtype), optimizer)
    second.load_state(saved)
    update_policy(second, inputs, config, step=2)
    for kind, named in first.state().items():
        assert all(torch.equal(tensor, second.state()[kind][key]) for key, tensor in named.items())
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_recompute_changes_memory_only(make_model):
    groups = make_groups(REWARDS)
    config = settings(groups)
    inputs = UpdateInputs(groups, step_advantages(groups, config.algorithm).advantages, None, None)
    made = []
    for recompute in ("none", "full"):
        policy = Policy(make_model(), OptimizerConfig(**SGD), recompute=recompute)
        update_policy(policy, inputs, config, step=1)
        made.append(torch.cat([p.detach().flatten() for p in policy.state()["policy"].values()]))
    assert (made[0] - made[1]).abs().max() < 1e-6


def test_recompute_keeps_fewer_activations(make_model):
    """Bytes that the backward pass needs, by counting what autograd saves."""
    from plait.stages.packing import TokenSequence, pack

    (microbatch,) = pack([TokenSequence.from_sample(s) for s in make_groups([[1.0] * 8])[0].samples], 1000, "cpu")

    def saved_bytes(recompute):
        seen = {}
        policy = Policy(make_model(), OptimizerConfig(**SGD), recompute=recompute)
        parameters = {p.data_ptr() for p in policy.model.parameters()}

        def keep(tensor):
            if tensor.data_ptr() not in parameters:
                seen[tensor.data_ptr()] = tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            policy.token_scores(microbatch, 1.0)
        return sum(seen.values())

    assert saved_bytes("full") < 0.5 * saved_bytes("none")
