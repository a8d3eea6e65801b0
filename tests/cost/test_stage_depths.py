"""Depth of every stage: the longest path of what torch runs for it; and its work, the sum.

The formulas take the causal pairs of a fused pass; here they take every pair, as eager attention computes them.
"""

import pytest
import torch
from small_models import build, small_config
from torch import nn
from traced_graph import Trace, tree

from plait.cost import generation, model_costs
from plait.cost import operators as op
from plait.cost.lengths import constant_length
from plait.cost.model_config import model_spec
from plait.cost.stage_costs import StepBatch, log_probabilities, update
from plait.cost.tokens import uniform_tokens

KINDS = ("llama", "mistral", "qwen3")


def _model(kind, num_layers=3):
    torch.manual_seed(1)
    config = small_config(kind, num_hidden_layers=num_layers)
    return build(config).eval(), model_spec(config.to_dict())


def _logprobs(model, ids):
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "length"), [(2, 25), (1, 65)])
def test_log_probabilities(kind, batch, length):
    """old_logprob, ref_logprob: the forward pass and the log-softmax of its logits."""
    model, spec = _model(kind)
    ids = torch.randint(0, 96, (batch, length))
    with torch.no_grad(), Trace() as trace:
        _logprobs(model, ids)
    tokens = uniform_tokens(batch, length - 1, spec.windows, mode="square")
    predicted = model_costs.forward(spec, tokens, 4, implementation="eager", with_logprobs=True)
    assert predicted.depth == trace.depth
    assert predicted.flop == trace.flop
    assert predicted.work - predicted.flop == pytest.approx(trace.work - trace.flop, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_last_only", [False, True])
def test_scalar_heads(kind, is_last_only):
    """value: one number per token; score_reward: one per sequence, of its last token."""
    model, spec = _model(kind)
    head = nn.Linear(64, 1, bias=False)
    ids = torch.randint(0, 96, (2, 40))
    with torch.no_grad(), Trace() as trace:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        head(hidden[:, -1] if is_last_only else hidden)
    tokens = uniform_tokens(2, 40, spec.windows, num_head_tokens=1 if is_last_only else None, mode="square")
    predicted = model_costs.forward(spec.with_scalar_head(), tokens, 4, implementation="eager")
    assert predicted.depth == trace.depth
    assert predicted.flop == trace.flop


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_layers", [2, 4])
def test_an_update(kind, num_layers):
    """update_policy: forward, clipped loss, backward, clipping, AdamW; one after the other; twice."""
    model, spec = _model(kind, num_layers)
    ids = torch.randint(0, 96, (2, 33))
    old, advantage = torch.randn(2, 32), torch.randn(2, 32)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
    with Trace() as trace:
        depths = []
        for _ in range(2):
            ratio = (_logprobs(model, ids) - old).exp()
            clipped = ratio.clamp(0.8, 1.2) * advantage
            loss = -torch.minimum(ratio * advantage, clipped).sum()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
            optimizer.step()
            optimizer.zero_grad()
            depths.append(trace.depth)
    tokens = uniform_tokens(2, 32, spec.windows, mode="square")
    predicted = (
        model_costs.forward(spec, tokens, 4, implementation="eager", with_logprobs=True)
        + op.policy_loss(64)
        + model_costs.backward(spec, tokens, 4, implementation="eager", with_logprobs=True)
        + op.clip(spec.num_parameters)
        + op.adam(spec.num_parameters)
    )
    # torch's log-softmax backward adds up V gradients of which one is not 0; the loss's own backward is 4 steps.
    constant = tree(96) + 4
    for updates, depth in enumerate(depths, start=1):
        assert abs(depth - constant * updates - updates * predicted.depth) <= updates * (4 * num_layers + 8)
    assert 2 * predicted.flop == trace.flop
    assert 2 * (predicted.work - predicted.flop) == pytest.approx(trace.work - trace.flop, rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_generation_with_a_cache(kind):
    """generate: prefill, a draw, then a decode step and a draw per token, each waiting for the one before it."""
    model, spec = _model(kind)
    prompt, response = 9, 7
    ids, random = torch.randint(0, 96, (1, prompt)), torch.rand(response, 1, 1)
    with torch.no_grad(), Trace() as trace:
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        for step in range(response):
            weights = (out.logits[:, -1] / 0.7).softmax(-1)
            # The draw: a running sum, and the first place where it passes a random number.
            token = (weights.cumsum(-1) < random[step]).sum(-1, keepdim=True).clamp(max=95)
            if step < response - 1:
                out = model(input_ids=token, cache=out.cache, use_cache=True)
    predicted = generation.prefill(spec, 1, prompt, 4).depth + generation.decode(spec, prompt, response, 4).depth
    # One step more per token, which keeps ids inside the vocabulary; the last search gives no floating-point number.
    assert trace.depth == predicted + (response - 1) - tree(96)


def test_group_statistics():
    """advantage, per group: both means wait for each other."""
    rewards = torch.rand(8, 16)
    with Trace() as trace:
        centred = rewards - rewards.mean(-1, keepdim=True)
        centred / ((centred * centred).mean(-1, keepdim=True).sqrt() + 1e-6)
    predicted = op.group_statistics(8, 16)
    assert predicted.depth == trace.depth
    assert abs(predicted.work - trace.work) <= 2 * 8


@pytest.mark.parametrize("length", [1, 2, 13, 64])
def test_gae_as_a_scan(length):
    """advantage with values: A_t = delta_t + d A_(t+1), maps combined pairwise, against the recurrence one by one."""
    rewards, values, discount = torch.rand(3, length), torch.rand(3, length + 1), 0.95
    with Trace() as trace:
        delta = rewards + 0.9 * values[:, 1:] - values[:, :-1]
        slope, offset = torch.full_like(delta, discount), delta
        reach = 1
        while reach < length:
            # Position t takes what the maps up to reach further on give.
            ahead = torch.cat([offset[:, reach:], torch.zeros(3, reach)], 1)
            steep = torch.cat([slope[:, reach:], torch.ones(3, reach)], 1)
            slope, offset = slope * steep, offset + slope * ahead
            reach *= 2
    expected, after = [], torch.zeros(3)
    for t in reversed(range(length)):
        after = delta[:, t] + discount * after
        expected.insert(0, after)
    assert torch.allclose(offset, torch.stack(expected, 1), atol=1e-6)
    # Doubling is 2 steps in lg T levels; the work-efficient scan, which the formula counts, goes down and up: 4.
    assert trace.depth == 3 + 2 * tree(length)
    assert trace.depth <= op.gae(3, length).depth <= 3 + 2 * (trace.depth - 3)


def test_moving_weights_is_no_arithmetic():
    """sync_weights: copies only."""
    model, _ = _model("llama")
    with torch.no_grad(), Trace() as trace:
        {name: torch.empty_like(value).copy_(value) for name, value in model.state_dict().items()}
    assert (trace.depth, trace.work) == (0, 0)


def test_stages_put_these_together():
    """What the stages' own functions say, with causal pairs, is the sum of the same parts."""
    _, spec = _model("llama")
    batch = StepBatch(2, 2, 10, constant_length(22), num_tokens_per_microbatch=64, num_sequences_per_minibatch=2)
    tokens = batch.tokens(spec)
    forward = model_costs.forward(spec, tokens, 2, with_logprobs=True)
    assert log_probabilities("old_logprob", spec, batch).depth == forward.depth
    half = tokens * 0.5
    one = model_costs.forward(spec, half, 4, with_logprobs=True) + op.policy_loss(half.num_head_tokens)
    one += model_costs.backward(spec, half, 4, with_logprobs=True)
    one += op.clip(spec.num_parameters) + op.adam(spec.num_parameters)
    found = update("update_policy", spec, batch)
    assert found.depth == 2 * one.depth
    assert found.work == pytest.approx(2 * one.work)
