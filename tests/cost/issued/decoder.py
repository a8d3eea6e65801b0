"""A small decoder with the tensors of `plait.cost.parameter_tensors`, and the ways to shard it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from plait.cost.parameter_tensors import DecoderShape

SHAPE = DecoderShape(
    num_layers=3,
    hidden_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_size=6,
    intermediate_size=28,
    vocab_size=34,
    has_qk_norm=True,
)
"""Dims that 4 ranks do not divide, so that FSDP2's padding counts."""
BATCH, LENGTH = 2, 8


def linear(a, b):
    return nn.Linear(a, b, bias=False)


class Attention(nn.Module):
    def __init__(self, s):
        super().__init__()
        d, e = s.hidden_size, s.head_size
        self.head_size, self.groups = e, s.num_heads // s.num_kv_heads
        self.q_proj, self.o_proj = linear(d, s.num_heads * e), linear(s.num_heads * e, d)
        self.k_proj, self.v_proj = linear(d, s.num_kv_heads * e), linear(d, s.num_kv_heads * e)
        self.q_norm, self.k_norm = nn.RMSNorm(e, eps=1e-6), nn.RMSNorm(e, eps=1e-6)

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, self.head_size)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = self.q_norm(q), self.k_norm(k)
        k, v = (y.repeat_interleave(self.groups, dim=2) for y in (k, v))
        weights = torch.einsum("bqnh,bknh->bnqk", q, k).softmax(-1)
        return self.o_proj(torch.einsum("bnqk,bknh->bqnh", weights, v).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.gate_proj, self.up_proj = (
            linear(s.hidden_size, s.intermediate_size),
            linear(s.hidden_size, s.intermediate_size),
        )
        self.down_proj = linear(s.intermediate_size, s.hidden_size)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.input_norm, self.post_attention_norm = nn.RMSNorm(s.hidden_size, 1e-6), nn.RMSNorm(s.hidden_size, 1e-6)
        self.attention, self.mlp = Attention(s), FeedForward(s)

    def forward(self, x):
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_attention_norm(x))


class Decoder(nn.Module):
    def __init__(self, s=SHAPE, is_recomputed=False):
        super().__init__()
        torch.manual_seed(0)
        self.is_recomputed = is_recomputed
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.num_layers))
        self.norm, self.lm_head = nn.RMSNorm(s.hidden_size, 1e-6), linear(s.hidden_size, s.vocab_size)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_recomputed else layer(x)
        return self.lm_head(self.norm(x))


def token_ids(seed):
    return torch.randint(0, SHAPE.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def sharded(model, mesh, **options):
    """FSDP2: a unit per layer and the root."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    root = {name: value for name, value in options.items() if name != "reshard_after_forward" or value is False}
    return fully_shard(model, mesh=mesh, **root)


def tensor_parallel(model, mesh, sp=False, is_prepared=True):
    """Attention and feed-forward over tp. is_prepared: a block's input changes its layout once, not per projection."""
    whole = Shard(1) if sp else Replicate()
    entry = {"input_layouts": Replicate() if is_prepared else whole}
    prepare = PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(Replicate(),), use_local_output=False)
    parts = SequenceParallel(sequence_dim=2, use_local_output=True)  # heads are the dim that is split
    plan = {
        **({"attention": prepare, "mlp": prepare} if is_prepared else {}),
        **{f"attention.{name}": ColwiseParallel(**entry) for name in ("q_proj", "k_proj", "v_proj")},
        "attention.q_norm": parts,
        "attention.k_norm": parts,
        "attention.o_proj": RowwiseParallel(output_layouts=whole),
        **{f"mlp.{name}": ColwiseParallel(**entry) for name in ("gate_proj", "up_proj")},
        "mlp.down_proj": RowwiseParallel(output_layouts=whole),
    }
    if sp:
        plan |= {name: SequenceParallel(use_local_output=True) for name in ("input_norm", "post_attention_norm")}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    outer = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=whole),
        "lm_head": ColwiseParallel(input_layouts=whole, output_layouts=Shard(-1), use_local_output=False),
    }
    if sp:
        outer["norm"] = SequenceParallel(use_local_output=True)
    return parallelize_module(model, mesh, outer)
