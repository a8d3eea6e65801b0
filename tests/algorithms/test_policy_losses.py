"""Expected values: field cases N26, N29, hand calculation, and the published objectives in numpy (references.py)."""

import dataclasses
import math

import numpy as np
import pytest
import references
import torch

from plait.algorithms.importance import importance_weights
from plait.algorithms.losses import POLICY_LOSSES, ClipSettings, TokenBatch, gspo, ppo_clip
from plait.algorithms.ratios import MAX_LOG_RATIO, bounded_exp, sequence_means, sequence_sums
from plait.algorithms.reduce import sequence_weights

REDUCTIONS = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
MAX_TOKENS = 12


def random_sequences(seed, lengths=(1, 2, 5, 9, 4), spread=0.4):
    """Lists of arrays per sequence: log-probabilities now, old, of the engine; one advantage per sequence."""
    random = np.random.default_rng(seed)
    old = [-random.exponential(1.0, n) - 0.1 for n in lengths]
    now = [o + random.normal(0, spread, len(o)) for o in old]
    rollout = [o + random.normal(0, 0.2, len(o)) for o in old]
    return now, old, rollout, random.normal(0, 1, len(lengths))


def token_batch(now, old, rollout, advantages, dtype=torch.float64):
    lengths = [len(x) for x in now]

    def join(parts):
        return torch.tensor(np.concatenate(parts), dtype=dtype)

    return TokenBatch(
        logprobs_R=join(now).requires_grad_(),
        old_logprobs_R=join(old),
        rollout_logprobs_R=join(rollout),
        advantages_R=join([np.full(n, a) for n, a in zip(lengths, advantages, strict=True)]),
        sequence_R=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
    )


def update_loss(name, tokens, clip, reduction):
    """What an update makes of a policy loss: the sum over tokens of their sequence's weight times their loss."""
    counts_B = torch.bincount(tokens.sequence_R)
    weights_B = sequence_weights(counts_B, reduction, max_tokens=MAX_TOKENS)
    return (weights_B[tokens.sequence_R] * POLICY_LOSSES[name](tokens, clip).loss_R).sum()


def value_and_gradient(name, tokens, clip, reduction="token-mean"):
    loss = update_loss(name, tokens, clip, reduction)
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs_R)
    return loss.item(), gradient.numpy()


CLIPS = {
    "reinforce": ClipSettings(0.2, 0.2),
    "ppo_clip": ClipSettings(0.2, 0.28),
    "decoupled_ppo": ClipSettings(0.2, 0.28),
    "gspo": ClipSettings(0.05, 0.08),
    "gmpo": ClipSettings(0.3, 0.4),
    "cispo": ClipSettings(0.3, 0.5),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize(("dual_clip", "cap"), [(None, None), (1.5, 1.1)])
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_are_those_of_the_published_objective(name, reduction, dual_clip, cap, seed):
    now, old, rollout, advantages = random_sequences(seed)
    clip = dataclasses.replace(CLIPS[name], dual_clip=dual_clip, behaviour_cap=cap)
    loss, gradient = value_and_gradient(name, token_batch(now, old, rollout, advantages), clip, reduction)
    cuts = np.cumsum([len(x) for x in now])[:-1]
    settings = {"low": clip.clip_low, "high": clip.clip_high, "dual": dual_clip, "cap": cap}

    def objective(flat):
        return references.policy_objective(
            name, np.split(flat, cuts), now, old, rollout, advantages, settings, reduction, MAX_TOKENS
        )

    point = np.concatenate(now)
    assert loss == pytest.approx(objective(point), abs=1e-9)
    assert np.abs(gradient - references.numeric_gradient(objective, point)).max() < 1e-7
    assert np.abs(gradient).max() > 1e-3


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_float32_agrees_with_float64(name):
    batch = random_sequences(7)
    wide, wide_gradient = value_and_gradient(name, token_batch(*batch), CLIPS[name])
    narrow, narrow_gradient = value_and_gradient(name, token_batch(*batch, dtype=torch.float32), CLIPS[name])
    assert narrow == pytest.approx(wide, abs=1e-5)
    assert narrow_gradient == pytest.approx(wide_gradient, abs=1e-5)
    assert POLICY_LOSSES[name](token_batch(*batch, dtype=torch.float32), CLIPS[name]).loss_R.dtype == torch.float32


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_microbatches_of_whole_sequences_change_nothing(name, reduction):
    now, old, rollout, advantages = random_sequences(3)
    tokens = token_batch(now, old, rollout, advantages)
    whole, gradient = value_and_gradient(name, tokens, CLIPS[name], reduction)
    weights_B = sequence_weights(torch.bincount(tokens.sequence_R), reduction, max_tokens=MAX_TOKENS)
    parts, gradients = [], []
    for members in ([3], [0, 4], [1, 2]):  # Not in order, and one sequence number per token is kept as it is.
        part = token_batch(*([column[i] for i in members] for column in (now, old, rollout, advantages)))
        part = dataclasses.replace(part, sequence_R=torch.tensor(members)[part.sequence_R])
        loss = (weights_B[part.sequence_R] * POLICY_LOSSES[name](part, CLIPS[name]).loss_R).sum()
        gradients.append((part.sequence_R, torch.autograd.grad(loss, part.logprobs_R)[0]))
        parts.append(loss.item())
    assert sum(parts) == pytest.approx(whole, abs=1e-12)
    for sequence_R, part_gradient in gradients:
        for index in sequence_R.unique():
            expected = gradient[(tokens.sequence_R == index).numpy()]
            assert part_gradient[sequence_R == index].numpy() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_on_policy_every_gradient_is_reinforce(name):
    now, _, _, advantages = random_sequences(1)
    tokens = token_batch(now, now, now, advantages)
    _, gradient = value_and_gradient(name, tokens, CLIPS[name], "token-mean")
    expected = -tokens.advantages_R.numpy() / len(gradient)
    assert gradient == pytest.approx(expected, abs=1e-12)
    assert not POLICY_LOSSES[name](tokens, CLIPS[name]).outside_R.any()


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_nothing_flows_into_old_and_rollout_logprobs_and_nothing_is_lost_on_empty_input(name):
    tokens = token_batch(*random_sequences(1))
    tokens.rollout_logprobs_R.requires_grad_()
    loss = POLICY_LOSSES[name](tokens, CLIPS[name]).loss_R.sum()
    (through_engine,) = torch.autograd.grad(loss, tokens.rollout_logprobs_R, allow_unused=True)
    assert through_engine is None
    empty = TokenBatch(*(torch.zeros(0, dtype=torch.float64) for _ in range(4)), torch.zeros(0, dtype=torch.int64))
    assert POLICY_LOSSES[name](empty, CLIPS[name]).loss_R.shape == (0,)


def test_gspo_on_answers_of_one_token_is_ppo():
    batch = random_sequences(5, lengths=(1,) * 12)
    clip = ClipSettings(0.2, 0.28)
    tokens = token_batch(*batch)
    gspo_loss, ppo_loss = POLICY_LOSSES["gspo"](tokens, clip), POLICY_LOSSES["ppo_clip"](tokens, clip)
    assert ppo_loss.binds_R.any()
    assert torch.allclose(gspo_loss.loss_R, ppo_loss.loss_R, atol=1e-12)
    assert torch.equal(gspo_loss.binds_R, ppo_loss.binds_R)
    assert value_and_gradient("gspo", tokens, clip)[1] == pytest.approx(
        value_and_gradient("ppo_clip", tokens, clip)[1], abs=1e-12
    )


def test_decoupled_ppo_without_staleness_is_ppo():
    now, old, _, advantages = random_sequences(2)
    tokens = token_batch(now, old, old, advantages)
    clip = ClipSettings(0.2, 0.28, dual_clip=3.0)
    for decoupled, plain in zip(POLICY_LOSSES["decoupled_ppo"](tokens, clip), ppo(tokens, clip), strict=True):
        assert torch.equal(decoupled, plain)


def ppo(tokens, clip):
    return POLICY_LOSSES["ppo_clip"](tokens, clip)


def test_decoupled_ppo_with_a_cap_is_ppo_under_truncated_token_weights():
    tokens = token_batch(*random_sequences(2))
    weights = importance_weights(
        tokens.old_logprobs_R,
        tokens.rollout_logprobs_R,
        tokens.sequence_R,
        level="token",
        correction="truncate",
        high=1.1,
    )
    clip = ClipSettings(0.2, 0.28, behaviour_cap=1.1)
    expected = weights.weights_R * ppo(tokens, clip).loss_R
    assert (weights.weights_R == 1.1).any()
    assert torch.allclose(POLICY_LOSSES["decoupled_ppo"](tokens, clip).loss_R, expected, atol=1e-15)


def test_dapo_with_equal_bounds_and_one_length_is_grpo():
    # DAPO: token-mean and two bounds. GRPO as published: mean over sequences of their token means and one bound.
    tokens = token_batch(*random_sequences(4, lengths=(6, 6, 6)))
    dapo = value_and_gradient("ppo_clip", tokens, ClipSettings(0.2, 0.2), "token-mean")
    grpo = value_and_gradient("ppo_clip", tokens, ClipSettings(0.2, 0.2), "seq-mean-token-mean")
    assert dapo[0] == pytest.approx(grpo[0], abs=1e-12)
    assert dapo[1] == pytest.approx(grpo[1], abs=1e-12)


def test_n29_gspo():
    # The case's fourth position is padding (log ratio 5.0); here only real tokens exist. A second sequence with that
    # ratio stands behind, and must not enter either.
    log_ratio = torch.tensor([0.3, -0.1, 0.1, 5.0], dtype=torch.float64)
    sequence = torch.tensor([0, 0, 0, 1])
    result = gspo(
        log_ratio, torch.zeros(4).double(), torch.ones(4).double(), sequence, clip_low=0.0003, clip_high=0.0004
    )
    ratio = sequence_means(log_ratio, sequence).exp()
    assert ratio[:3].tolist() == pytest.approx([1.10517092] * 3, abs=1e-6)
    for known_wrong in (3.76218535, 1.34985881):  # Padding included; product instead of geometric mean.
        assert abs(ratio[0].item() - known_wrong) > 0.1
    assert result.loss_R[:3].tolist() == pytest.approx([-1.0004] * 3, abs=1e-6)
    assert result.binds_R[:3].tolist() == [True] * 3


def test_gspo_token_form_takes_an_advantage_per_token():
    # sg(s) pi / sg(pi): the gradient at a token is -A_t s. s = exp(mean(0.3, -0.1)) = e^0.1.
    logprobs = torch.tensor([0.3, -0.1], dtype=torch.float64, requires_grad=True)
    result = gspo(
        logprobs,
        torch.zeros(2).double(),
        torch.tensor([1.0, -2.0]).double(),
        torch.tensor([0, 0]),
        clip_low=0.5,
        clip_high=0.5,
    )
    result.loss_R.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-math.exp(0.1), 2 * math.exp(0.1)], abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "flows", "binds"),
    [
        (2.0, -1.0, 2.0, True, False),  # Below c: PPO's own loss, unbounded above for negative advantages.
        (5.0, -1.0, 3.0, False, True),  # Above c = 3: at most c |A|.
        (5.0, -2.0, 6.0, False, True),
        (5.0, 1.0, -1.28, False, True),  # Positive advantages know only PPO's clip.
        (0.5, -1.0, 0.8, False, True),
        (0.5, 1.0, -0.5, True, False),
        (5.0, 0.0, 0.0, False, False),
    ],
)
def test_dual_clip_by_hand(ratio, advantage, loss, flows, binds):
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    result = ppo_clip(
        logprobs,
        torch.zeros(1).double(),
        torch.tensor([advantage]).double(),
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=3.0,
    )
    result.loss_R.sum().backward()
    assert result.loss_R.item() == pytest.approx(loss, abs=1e-9)
    assert (logprobs.grad.item() != 0) == flows
    assert result.binds_R.item() == binds


def test_dual_clip_must_be_above_one():
    one = torch.ones(1)
    with pytest.raises(AssertionError, match="not above 1"):
        ppo_clip(one, one, one, clip_low=0.2, clip_high=0.2, dual_clip=1.0)


def test_gmpo_clips_tokens_only_on_the_side_on_which_the_advantage_pulls():
    # Log ratios 0.5 and -0.5, bounds 0.4. A > 0: mean(0.4, -0.5) = -0.05. A < 0: mean(0.5, -0.4) = 0.05.
    for advantage, mean, free in ((1.0, -0.05, 1), (-1.0, 0.05, 0)):
        logprobs = torch.tensor([0.5, -0.5], dtype=torch.float64, requires_grad=True)
        tokens = TokenBatch(
            logprobs,
            torch.zeros(2).double(),
            torch.zeros(2).double(),
            torch.full((2,), advantage).double(),
            torch.tensor([0, 0]),
        )
        result = POLICY_LOSSES["gmpo"](tokens, ClipSettings(0.4, 0.4))
        assert result.loss_R.tolist() == pytest.approx([-advantage * math.exp(mean)] * 2, abs=1e-12)
        assert result.outside_R.tolist() == [True, True]
        assert result.binds_R.tolist() == [free == 1, free == 0]
        result.loss_R.sum().backward()
        # Two copies of the sequence's loss, each with gradient -A s / 2 at the token that is not clipped.
        assert logprobs.grad[free].item() == pytest.approx(-advantage * math.exp(mean), abs=1e-12)
        assert logprobs.grad[1 - free].item() == 0


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    # Ratio 3 counts as 1.5, ratio 0.1 as 0.7; the gradient is -weight A, never 0.
    logprobs = torch.tensor([0.0, 0.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-math.log(3), math.log(10)], dtype=torch.float64)
    tokens = TokenBatch(logprobs, old, old, torch.ones(2).double(), torch.tensor([0, 0]))
    result = POLICY_LOSSES["cispo"](tokens, ClipSettings(0.3, 0.5))
    result.loss_R.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.5, -0.7], abs=1e-12)
    assert result.outside_R.tolist() == [True, True]
    assert result.binds_R.tolist() == [False, False]
    # clip_low 1 sets no lower bound.
    free = POLICY_LOSSES["cispo"](dataclasses.replace(tokens, logprobs_R=logprobs - 1), ClipSettings(1.0, 4.0))
    assert free.loss_R[1].item() == pytest.approx(math.exp(-1) / 10, abs=1e-12)


@pytest.mark.parametrize("name", ["ppo_clip", "decoupled_ppo", "gspo", "gmpo", "cispo"])
@pytest.mark.parametrize("log_ratio", [100.0, -200.0])
def test_an_exploded_ratio_never_gives_nan_and_keeps_its_direction(name, log_ratio):
    """fp32: e^100 is infinite, and the backward pass of a clipped infinity is 0 times infinity."""
    for advantage in (1.0, -1.0):
        logprobs = torch.tensor([-1.0], requires_grad=True)
        old = torch.tensor([-1.0 - log_ratio])
        tokens = TokenBatch(logprobs, old, old, torch.tensor([advantage]), torch.tensor([0]))
        result = POLICY_LOSSES[name](tokens, ClipSettings(0.2, 0.2))
        result.loss_R.sum().backward()
        assert result.loss_R.isfinite().all()
        assert logprobs.grad.isfinite().all()
        assert logprobs.grad.item() * advantage <= 0
        if name in ("ppo_clip", "gspo", "gmpo") and log_ratio > 0 and advantage < 0:
            assert logprobs.grad.item() == pytest.approx(math.exp(20), rel=1e-5)


def test_bounded_exp_is_exp_below_its_bound_and_passes_the_gradient_above():
    x = torch.tensor([-3.0, 0.0, 2.5, MAX_LOG_RATIO, 50.0], dtype=torch.float64, requires_grad=True)
    result = bounded_exp(x)
    expected = [math.exp(-3), 1.0, math.exp(2.5), math.exp(20), math.exp(20)]
    assert result.tolist() == pytest.approx(expected, rel=1e-14)
    result.sum().backward()
    assert x.grad.tolist() == pytest.approx(expected, rel=1e-14)


def test_sequence_sums_and_means_with_gaps_and_in_any_order():
    values, sequence = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([4, 1, 4, 1])
    assert sequence_sums(values, sequence).tolist() == [4.0, 12.0, 4.0, 12.0]
    assert sequence_means(values, sequence).tolist() == [2.0, 6.0, 2.0, 6.0]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_weights_that_are_all_zero_give_loss_zero(name):
    tokens = token_batch(*random_sequences(1))
    weights_B = sequence_weights(torch.zeros(5, dtype=torch.int64), "token-mean", max_tokens=4)
    loss = (weights_B[tokens.sequence_R] * POLICY_LOSSES[name](tokens, CLIPS[name]).loss_R).sum()
    (gradient,) = torch.autograd.grad(loss, tokens.logprobs_R)
    assert loss.item() == 0
    assert not gradient.any()


def test_tokens_of_another_number_are_refused():
    with pytest.raises(AssertionError, match="one entry per token"):
        ppo_clip(torch.zeros(3), torch.zeros(2), torch.zeros(3), clip_low=0.2, clip_high=0.2)
