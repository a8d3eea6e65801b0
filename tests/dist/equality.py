"""One layout against the unsharded model: losses, gradients and updates. Runs on every rank; imported by tests."""

import torch
from ranks import mesh

from models import TEMPERATURE, make_model, make_sequences, make_streams, rl_loss
from plait.config import OptimizerConfig
from plait.models.optimizer import MasterOptimizer
from plait.parallel.degrees import Layout
from plait.parallel.sharded import ShardedModel
from plait.parallel.state import whole
from plait.roles.model import score_tokens, sequence_logprobs
from plait.stages.packing import pack

MAX_TOKENS = 256
LENGTHS = (61, 23, 100, 77, 140, 9, 130, 55, 90, 110, 48, 120)
"""Rows of more than 128 real tokens, so that no part of a row that is cut over ranks is filling alone."""
RATE = 0.01
LOSS_BAR, GRADIENT_BAR = 1e-5, 1e-4


def optimizer(**changes):
    return OptimizerConfig(**{"learning_rate": RATE, "weight_decay": 0.1, "max_grad_norm": 0.5, **changes})


def make_layout(text, **settings):
    return Layout.parse(text, **settings)


def make_sharded(kind, layout, config=None, dtype=torch.float32, **changes):
    return ShardedModel(make_model(kind, **changes), layout, mesh(layout), config or optimizer(), compute_dtype=dtype)


def unsharded(kind, sequences, streams=None, **changes):
    """(loss, gradients by name, log-probabilities, streams) of the whole model on this process alone."""
    model = make_model(kind, **changes)
    base = sequence_logprobs(model, sequences, temperature=TEMPERATURE, max_tokens=MAX_TOKENS)
    streams = streams or make_streams(sequences, base)
    loss_of, total = rl_loss(streams), 0.0
    for microbatch in pack(sequences, MAX_TOKENS, "cpu"):
        loss = loss_of(microbatch, score_tokens(model, microbatch, TEMPERATURE, entropy_needs_grad=True))
        loss.backward()
        total += float(loss.detach())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return total, gradients, base, streams


def one_pass(sharded, sequences, streams):
    """Loss that this rank owns, of one pass over all sequences."""
    losses, loss_of = [], rl_loss(streams)

    def kept(microbatch, scores):
        losses.append(loss_of(microbatch, scores))
        return losses[-1]

    sharded.train_pass(sharded.split(sequences, MAX_TOKENS), kept, TEMPERATURE, entropy_needs_grad=True)
    return sum(float(loss.detach()) for loss in losses)


def whole_gradients(sharded):
    """By name, as `apply` sees them; of this rank's pipeline stages only."""
    sharded.sum_shared()
    return {
        name: whole(p.grad, name in sharded._packed)
        for name, p in sharded.masters.items()
        if p.grad is not None and name not in sharded._copies
    }


def total_loss(sharded, own):
    value = torch.tensor([own], dtype=torch.float64)
    torch.distributed.all_reduce(value, group=sharded.mesh.group("pp", "dp_replicate", "dp_shard", "cp"))
    return float(value)


def relative(got, expected):
    return float((got - expected).norm() / expected.norm().clamp(min=1e-12))


def compare(rank, world_size, kind, text, settings, changes=None, lengths=LENGTHS):
    """{what: relative error} of one layout; asserts the bars."""
    layout, changes = make_layout(text, **settings), changes or {}
    sequences = make_sequences(lengths)
    expected, gradients, base, streams = unsharded(kind, sequences, **changes)
    sharded = make_sharded(kind, layout, **changes)
    scored = sharded.logprobs(sequences, temperature=TEMPERATURE, max_tokens=MAX_TOKENS)
    loss = total_loss(sharded, one_pass(sharded, sequences, streams))
    got = whole_gradients(sharded)
    everywhere = [None] * world_size
    torch.distributed.all_gather_object(everywhere, list(got))
    assert {name for names in everywhere for name in names} == gradients.keys()
    errors = {name: relative(got[name], gradients[name]) for name in got}
    worst = max(errors, key=errors.get)
    logprob_error = max(float((a - b).abs().max()) for a, b in zip(scored, base, strict=True))
    loss_error = abs(loss - expected) / abs(expected)
    assert logprob_error < 1e-4, f"log-probabilities differ by {logprob_error}"
    assert loss_error < LOSS_BAR, f"loss {loss}, unsharded {expected}"
    assert errors[worst] < GRADIENT_BAR, f"gradient of {worst}: relative error {errors[worst]}"
    return {"loss": loss_error, "gradient": errors[worst], "worst": worst, "logprobs": logprob_error}


def accumulate(model, inline, sequences, streams):
    """One pass of the unsharded model; gradients go to its MasterOptimizer."""
    for microbatch in pack(sequences, MAX_TOKENS, "cpu"):
        scores = score_tokens(model, microbatch, TEMPERATURE, entropy_needs_grad=True)
        rl_loss(streams)(microbatch, scores).backward()
        inline.accumulate()


def updates(rank, world_size, kind, text, settings, config, lengths=LENGTHS, changes=None):
    """Three updates against MasterOptimizer's.

    Returns the largest relative difference of a parameter, the smallest relative change of one, and both norms.
    """
    sequences, changes = make_sequences(lengths), changes or {}
    rate = optimizer(**config).learning_rate
    _, _, _, streams = unsharded(kind, sequences, **changes)
    model = make_model(kind, **changes)
    inline, norms = MasterOptimizer(model, optimizer(**config)), []
    for _ in range(3):
        accumulate(model, inline, sequences, streams)
        norms.append(inline.apply(rate).grad_norm)
    sharded, got = make_sharded(kind, make_layout(text, **settings), optimizer(**config), **changes), []
    for _ in range(3):
        one_pass(sharded, sequences, streams)
        got.append(sharded.apply(rate).grad_norm)
    weights, before = sharded.full_state(), make_model(kind, **changes)
    moved = min(relative(p, q) for p, q in zip(before.parameters(), model.parameters(), strict=True))
    worst = max(relative(weights[name], p.detach()) for name, p in model.named_parameters())
    return worst, moved, norms, got
