"""Collectives that a sharded model really issues in one update, against the cost model's; what backward runs again."""

import sys
from collections import Counter
from pathlib import Path

import equality
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models import TEMPERATURE, make_sequences
from plait.cost.traffic.data import fsdp_terms, gathers_per_step, gradient_norm_terms, hsdp_terms, scatters_per_step
from plait.cost.traffic.tensor import sp_layer_terms, tp_embedding_terms, tp_head_terms, tp_layer_terms
from plait.models.attention import SHAPE_MULTIPLE

sys.path.append(str(Path(__file__).parents[1] / "cost" / "issued"))
from record import Recorder

LAYERS, WIDTH = 4, 64


def issued(rank, world_size, text, settings):
    """Calls of one update with several microbatches; tokens and scored rows of each; parameters of each unit."""
    sharded = equality.make_sharded("qwen3", equality.make_layout(text, **settings))
    microbatches = sharded.split(make_sequences((140,) * 8), equality.MAX_TOKENS)
    with Recorder() as recorder:
        sharded.train_pass(microbatches, lambda microbatch, scores: scores.logprobs_R.sum(), TEMPERATURE)
    training = recorder.calls
    with Recorder() as recorder:
        sharded.apply(equality.RATE)
    sizes = Counter()
    for name, master in sharded.masters.items():
        sizes[name.split(".")[2] if ".layers." in name else "root"] += master.numel()
    rows = [-(-len(m.predict_R) // SHAPE_MULTIPLE) * SHAPE_MULTIPLE for m in microbatches]
    return training, recorder.calls, [m.ids_1T.shape[1] for m in microbatches], rows, dict(sizes)


def _counted(terms):
    counted = Counter()
    for term in terms:
        if term.num_calls and term.num_ranks > 1:
            counted[term.collective, int(term.num_ranks), int(term.payload_bytes)] += int(term.num_calls)
    return counted


@pytest.mark.parametrize("sp", [False, True])
def test_tensor_parallelism(ranks2, sp):
    """2 + 2 all-reduces per layer, or under sp as many pairs of gathers and scatters; no logits are gathered."""
    for training, update, tokens, rows, _ in ranks2.run(issued, "tp2", {"sp": sp}):
        expected = Counter()
        for num_tokens, num_rows in zip(tokens, rows, strict=True):
            hidden = 4 * num_tokens * WIDTH
            layers = sp_layer_terms if sp else tp_layer_terms
            expected += _counted(layers(hidden, 2, num_layers=LAYERS, m=1, is_training=True))
            expected += _counted(tp_embedding_terms(hidden, 2, m=1, is_training=True, sp=sp))
            # The largest logit, then three sums in one call: one more than the loss needs, for the entropy.
            expected += Counter({("all_reduce", 2, 4 * num_rows): 1, ("all_reduce", 2, 3 * 4 * num_rows): 1})
            # The gradient of the head's input, of the scored rows alone; under sp the sequence is gathered before.
            expected += _counted(tp_head_terms(4 * num_rows * WIDTH, 0, 2, m=1, is_training=True, sp=False)[1:])
            expected += Counter({("all_gather", 2, hidden): 1} if sp else {})
        assert Counter(tuple(call) for call in training) == expected
        # Whole tensors' gradients in one call: q and k norms of each layer; under sp the other norms too.
        numbers = LAYERS * 2 * 16 + (LAYERS * 2 * WIDTH + WIDTH if sp else 0)
        assert Counter(map(tuple, update)) == Counter(
            {("all_reduce", 2, 4 * numbers): 1, **_counted(gradient_norm_terms("tp", 2))}
        )


@pytest.mark.parametrize(("text", "zero"), [("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 3), ("dp2fsdp2", 3), ("dp2fsdp2", 1)])
def test_data_parallelism(groups, text, zero):
    layout = equality.make_layout(text, zero=zero)
    for training, update, tokens, _, sizes in groups[layout.world_size].run(issued, text, {"zero": zero}):
        m, r, expected = len(tokens), layout.dp_replicate, Counter()
        assert m > 1
        for unit, size in sizes.items():
            gathers = gathers_per_step(zero, m, is_root=unit == "root", is_kept_gathered=False)
            scatters = scatters_per_step(zero, m)
            expected += _counted(
                fsdp_terms(4 * size, 4 * size, 2, num_units=1, num_gathers=gathers, num_scatters=scatters)
            )
            expected += _counted(hsdp_terms(4 * size, 2, r, num_units=1))
        assert Counter(map(tuple, training)) == expected
        assert Counter(map(tuple, update)) == _counted(gradient_norm_terms("dp_shard", 2, 2))


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, torch.distributed.tensor.DTensor) for t in types):
            return NotImplemented
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def operators(rank, world_size, recompute):
    """Matrix products and activations of one microbatch, forward and backward."""
    sharded = equality.make_sharded("llama", equality.make_layout("fsdp2", recompute=recompute))
    (microbatch,) = sharded.split(make_sequences((40, 40)), equality.MAX_TOKENS)
    with _Operators() as counted:
        sharded.train_pass([microbatch], lambda microbatch, scores: scores.logprobs_R.sum(), TEMPERATURE)
    return counted.calls["mm"], counted.calls["silu"]


def test_recompute_runs_forward_again(ranks2):
    """7 products and 1 activation per layer; full runs them twice, but for the last product, which backward can do
    without; selective keeps products."""
    kept, selective, full = (ranks2.run(operators, kind)[0] for kind in ("none", "selective", "full"))
    products = 3 * 7 * LAYERS + 3  # the head too
    assert kept == (products, LAYERS)
    assert selective == (products, 2 * LAYERS)
    assert full == (products + 6 * LAYERS, 2 * LAYERS)
