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
from plait.parallel.degrees import Layout
from plait.parallel.pipeline_orders import stages_of_rank

WIDTH, ROWS, NUM_MICROBATCHES = 6, 5, 8
PIPELINES = {
    "gpipe": (ScheduleGPipe, 4, 1),
    "1f1b": (Schedule1F1B, 4, 1),
    "interleaved_1f1b": (ScheduleInterleaved1F1B, 2, 2),
    "zero_bubble_v": (ScheduleZBVZeroBubble, 2, 2),
    "dual_pipe_v": (ScheduleDualPipeV, 2, 2),
}
"""Name -> torch's class, ranks, stages per rank."""
ATTENTION = SimpleNamespace(num_heads=4, head_size=3, tokens=12)
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


class Ring(torch.autograd.Function):
    """Full (not causal) attention over a ring of ranks; q, k, v: [tokens/c, heads, head size], same number of heads.

    Blocks of keys and values go round; results are merged by their log-sum-exps. In backward the gradients of a block
    travel with it and come home in the last hop.
    """

    @staticmethod
    def forward(ctx, q, k, v, group):
        c, block = dist.get_world_size(group), torch.stack([k, v])
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        for hop in range(c):
            scores = torch.einsum("qnh,knh->qnk", q, block[0])
            new = torch.logaddexp(lse, scores.logsumexp(-1))
            part = torch.einsum("qnk,knh->qnh", (scores - new[..., None]).exp(), block[1])
            out, lse = out * (lse - new).exp()[..., None] + part, new
            if hop < c - 1:
                block = pass_on(block, group)
        ctx.group = group
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        c, block = dist.get_world_size(ctx.group), torch.stack([k, v])
        d_q, d_block, delta = torch.zeros_like(q), torch.zeros_like(block), (d_out * out).sum(-1, keepdim=True)
        for hop in range(c):
            weights = (torch.einsum("qnh,knh->qnk", q, block[0]) - lse[..., None]).exp()
            d_scores = weights * (torch.einsum("qnh,knh->qnk", d_out, block[1]) - delta)
            d_q += torch.einsum("qnk,knh->qnh", d_scores, block[0])
            d_keys = torch.einsum("qnk,qnh->knh", d_scores, q)
            d_block = d_block + torch.stack([d_keys, torch.einsum("qnk,qnh->knh", weights, d_out)])
            if hop < c - 1:
                block = pass_on(block, ctx.group)
            d_block = pass_on(d_block, ctx.group)
        return d_q, d_block[0], d_block[1], None


def pass_on(tensor, group):
    """To the next rank of the ring, from the one before."""
    rank, size, got = dist.get_rank(group), dist.get_world_size(group), torch.empty_like(tensor)
    after, before = ((rank + step) % size for step in (1, -1))
    operations = [
        dist.P2POp(dist.isend, tensor.contiguous(), group=group, group_peer=after),
        dist.P2POp(dist.irecv, got, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got


def whole_attention(q, k, v):
    weights = torch.einsum("qnh,knh->nqk", q, k).softmax(-1)
    return torch.einsum("nqk,knh->qnh", weights, v)


def _qkv():
    a, generator = ATTENTION, torch.Generator().manual_seed(1)
    return [torch.randn(a.tokens, a.num_heads, a.head_size, generator=generator) for _ in range(3)]


def _check_against_whole(run, group, q, k, v):
    """Runs attention on this rank's tokens forward and backward; asserts output and gradients of the whole sequence."""
    c, rank = dist.get_world_size(group), dist.get_rank(group)
    mine = slice(rank * ATTENTION.tokens // c, (rank + 1) * ATTENTION.tokens // c)
    local = [y[mine].clone().requires_grad_() for y in (q, k, v)]
    whole = [y.clone().requires_grad_() for y in (q, k, v)]
    expected = whole_attention(*whole)
    expected.square().sum().backward()

    def both():
        out = run(*local)
        torch.testing.assert_close(out, expected[mine])
        out.square().sum().backward()

    calls = recorded(both)
    for part, full in zip(local, whole, strict=True):
        torch.testing.assert_close(part.grad, full.grad[mine])
    return calls


def ring(world):
    group = groups_of(world, world)
    q, k, v = _qkv()
    return _check_against_whole(lambda *qkv: Ring.apply(*qkv, group), group, q, k, v)


class AllToAll(torch.autograd.Function):
    """Rows to other ranks; backward sends their gradients back."""

    @staticmethod
    def forward(ctx, x, output_rows, input_rows, group):
        ctx.rows, ctx.group = (output_rows, input_rows), group
        out = x.new_empty(sum(output_rows), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), output_rows, input_rows, group=group)
        return out

    @staticmethod
    def backward(ctx, d_out):
        output_rows, input_rows = ctx.rows
        return AllToAll.apply(d_out, input_rows, output_rows, ctx.group), None, None, None


def ulysses(world):
    """Sequence parts with all heads -> all of the sequence with some heads -> attention -> back."""
    group = groups_of(world, world)
    c = world

    def heads_apart(x):  # [tokens/c, heads, H] -> [tokens, heads/c, H]
        parts = torch.cat(x.chunk(c, dim=1))
        return AllToAll.apply(parts, [x.shape[0]] * c, [x.shape[0]] * c, group)

    def tokens_apart(x):  # and back
        rows = [x.shape[0] // c] * c
        return torch.cat(AllToAll.apply(x, rows, rows, group).chunk(c), dim=1)

    def run(q, k, v):
        return tokens_apart(whole_attention(heads_apart(q), heads_apart(k), heads_apart(v)))

    q, k, v = _qkv()
    return _check_against_whole(run, group, q, k, v)


def experts(world):
    """Dispatch to whole experts on their ranks, combine back; tokens choose experts in turn, so evenly."""
    e, group = EXPERTS, groups_of(world, world)
    x = torch.ones(e.tokens, e.width, requires_grad=True)
    chosen = torch.arange(e.tokens * e.per_token) % e.num_experts
    order = chosen.argsort(stable=True)

    def run():
        counts = torch.bincount(chosen, minlength=e.num_experts)
        incoming = torch.empty_like(counts)
        dist.all_to_all_single(incoming, counts, group=group)
        sends, receives = (c.view(world, -1).sum(1).tolist() for c in (counts, incoming))
        rows = x.repeat_interleave(e.per_token, dim=0)[order]
        done = AllToAll.apply(rows, receives, sends, group) * 2
        back = AllToAll.apply(done, sends, receives, group)
        torch.zeros_like(back).index_copy(0, order, back).view(e.tokens, e.per_token, -1).sum(1).sum().backward()

    calls = recorded(run)
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


ALL = (ring, ulysses, experts, redistribute)
NAMED = {f"pp {name}": _pipeline(name) for name in PIPELINES} | {
    f"reshard {text}": _reshard(text, is_nested) for text, is_nested in RESHARDS.items()
}
