"""Cases that move activations or weights between ranks: pipeline, ring attention, Ulysses, experts, resharding."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from record import recorded
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

from plait.cost.parameter_tensors import DecoderShape, layer_tensors, outer_tensors
from plait.cost.reshard import contiguous_places, moves, nested_places
from plait.models.attention import PackedAttention
from plait.parallel.context import zigzag
from plait.parallel.degrees import Layout
from plait.parallel.experts import dispatch
from plait.parallel.pipeline_orders import stages_of_rank
from plait.parallel.ring import RingAttention
from plait.parallel.ulysses import UlyssesAttention

WIDTH, ROWS, NUM_MICROBATCHES = 6, 5, 8
PIPELINES = {
    "gpipe": (ScheduleGPipe, 4, 1),
    "1f1b": (Schedule1F1B, 4, 1),
    "interleaved_1f1b": (ScheduleInterleaved1F1B, 2, 2),
    "zero_bubble_v": (ScheduleZBVZeroBubble, 2, 2),
    "dual_pipe_v": (ScheduleDualPipeV, 2, 2),
}
"""Name -> torch's class, ranks, stages per rank."""
ATTENTION = SimpleNamespace(num_heads=4, head_size=8, tokens=16)
SCALING = 0.25
EXPERTS = SimpleNamespace(num_experts=8, per_token=2, width=5, tokens=16)


def groups_of(world, size):
    """The group of this rank, when ranks are cut into groups of neighbours."""
    parts = [dist.new_group(list(range(i, i + size))) for i in range(0, world, size)]
    return parts[dist.get_rank() // size]


def _pipeline(name):
    def run(world):
        schedule, p, v = PIPELINES[name]
        group = groups_of(world, p)
        stages = [
            PipelineStage(nn.Linear(WIDTH, WIDTH), stage, p * v, torch.device("cpu"), group=group)
            for stage in stages_of_rank(name, dist.get_rank(group), p, v)
        ]
        runner = schedule(
            stages if v > 1 else stages[0],
            NUM_MICROBATCHES,
            loss_fn=lambda y, target: (y - target).square().sum(),
            scale_grads=False,
        )
        x = torch.ones(NUM_MICROBATCHES * ROWS, WIDTH)

        def step():
            has_first = any(stage.is_first for stage in stages)
            has_last = any(stage.is_last for stage in stages)
            runner.step(*([x] if has_first else []), **({"target": x} if has_last else {}))

        step()  # the first step exchanges shapes as well
        return recorded(step)

    return run


def whole_attention(q, k, v):
    """Causal, [heads, tokens, head size]."""
    scores = SCALING * q @ k.transpose(1, 2)
    return scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf).softmax(-1) @ v


def _qkv():
    a, generator = ATTENTION, torch.Generator().manual_seed(1)
    return [torch.randn(a.num_heads, a.tokens, a.head_size, generator=generator) for _ in range(3)]


def _check_against_whole(context, mine, dtype=torch.float32):
    """Runs attention on this rank's tokens forward and backward; asserts output and gradients of the whole sequence."""
    qkv = _qkv()
    local = [y[None, :, mine].to(dtype).requires_grad_() for y in qkv]
    whole = [y.clone().requires_grad_() for y in qkv]
    expected = whole_attention(*whole)
    expected.square().sum().backward()
    close = {} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.1}

    def both():
        out = context.attend(0, *local, SCALING)[0].transpose(0, 1).float()
        torch.testing.assert_close(out, expected[:, mine], **close)
        out.square().sum().backward()

    calls = recorded(both)
    for part, full in zip(local, whole, strict=True):
        torch.testing.assert_close(part.grad[0].float(), full.grad[:, mine], **close)
    return calls


def ring(world, dtype=torch.float32):
    """`plait.parallel.ring` on a sequence cut in zigzag."""
    group = groups_of(world, world)
    mine = zigzag([ATTENTION.tokens], world, dist.get_rank(group))
    return _check_against_whole(RingAttention([ATTENTION.tokens // world], None, group), mine, dtype)


def ring_bf16(world):
    return ring(world, torch.bfloat16)


def ulysses(world):
    """`plait.parallel.ulysses` on a sequence cut in order."""
    group = groups_of(world, world)
    each = ATTENTION.tokens // world
    mine = torch.arange(each) + dist.get_rank(group) * each
    return _check_against_whole(UlyssesAttention(PackedAttention([ATTENTION.tokens]), None, group), mine)


class TwiceExperts(nn.Module):
    """Experts that all double their tokens, with the arguments of transformers' modules."""

    num_experts = EXPERTS.num_experts

    def forward(self, hidden, chosen, weights):
        assert chosen.max() < self.num_experts, "experts of another rank"
        return 2 * hidden * weights


def experts(world):
    """`plait.parallel.experts` dispatches and combines; tokens choose experts in turn, so evenly."""
    e, group = EXPERTS, groups_of(world, world)
    x = torch.ones(e.tokens, e.width, requires_grad=True)
    chosen = (torch.arange(e.tokens * e.per_token) % e.num_experts).view(e.tokens, e.per_token)
    module = TwiceExperts()
    dispatch(module, group)
    calls = recorded(lambda: module(x, chosen, torch.ones(chosen.shape)).sum().backward())
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0 * e.per_token))
    return calls


RESHARD_SHAPE = DecoderShape(
    num_layers=4,
    hidden_size=10,
    num_heads=8,
    num_kv_heads=4,
    head_size=2,
    intermediate_size=16,
    vocab_size=14,
    has_qk_norm=True,
    num_experts=4,
    num_experts_per_token=2,
    expert_intermediate_size=4,
)
RESHARDS = {
    "fsdp4 dp2tp2": False,
    "tp4 dp2tp2 nested": True,
    "tp2pp2 dp2tp2 nested": True,
    "fsdp2pp2 dp4": False,
    "fsdp4ep4 dp2tp2": False,
    "dp2tp2 fsdp2cp2": False,
}
"""Source and target, and whether the target's ranks are numbered in strided groups."""


def _reshard(text, is_nested):
    def run(world):
        source, target = (Layout.parse(part) for part in text.split()[:2])
        places = nested_places(source, target) if is_nested else contiguous_places(target)
        tensors = (*layer_tensors(RESHARD_SHAPE), *outer_tensors(RESHARD_SHAPE))
        generator = torch.Generator().manual_seed(2)
        whole = {
            (tensor.name, layer): torch.randn(tensor.shape, generator=generator)
            for tensor in tensors
            for layer in range(RESHARD_SHAPE.num_layers if tensor.part == "layer" else 1)
        }
        rank, operations, got = dist.get_rank(), [], []
        for move in moves(RESHARD_SHAPE, source, target, target_places=places):
            piece = whole[move.name, move.layer][move.box]
            if move.sender == rank:
                operations.append(dist.P2POp(dist.isend, piece.contiguous(), move.receiver))
            elif move.receiver == rank:
                got.append((piece, torch.empty_like(piece)))
                operations.append(dist.P2POp(dist.irecv, got[-1][1].contiguous(), move.sender))
                got[-1] = (piece, operations[-1].tensor)
        calls = recorded(lambda: [work.wait() for work in dist.batch_isend_irecv(operations)])
        for expected, arrived in got:
            torch.testing.assert_close(arrived, expected)
        return calls

    return run


def redistribute(world):
    """DTensor: rows -> columns, rows -> whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    tensor = distribute_tensor(torch.ones(8, 12), init_device_mesh("cpu", (world,)), [Shard(0)])
    return {
        "columns": recorded(lambda: tensor.redistribute(placements=[Shard(1)])),
        "whole": recorded(lambda: tensor.redistribute(placements=[Replicate()])),
    }


ALL = (ring, ring_bf16, ulysses, experts, redistribute)
NAMED = {f"pp {name}": _pipeline(name) for name in PIPELINES} | {
    f"reshard {text}": _reshard(text, is_nested) for text, is_nested in RESHARDS.items()
}
