"""Ring attention: each rank keeps its queries while keys and values go round, load-balanced for causal attention.

A sequence is cut into 2c pieces, and rank r of c has piece r and piece 2c-1-r (`plait.parallel.context`). Of another
rank's keys its queries see, with n tokens here per sequence:

- keys of an earlier rank (s < r): all queries see the first half; the second lies behind all of them;
- keys of a later rank (s > r): the second half of the queries sees all; the first lies before all of them.

So each hop costs every rank the same, half of n^2, and no mask is needed but on the own keys.

In forward, keys and values are sent on while the block that is here is worked on (c - 1 hops). In backward they go
round again (c - 1), and their gradients, in fp32, follow one hop behind and come home in the last (c).

Shapes: T this rank's packed tokens, N query heads, M key/value heads, H head size.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from plait.parallel.block_attention import block_attention, block_attention_backward, merge


class RingAttention:
    """Causal attention within each of several sequences, cut over the ranks of `group`."""

    def __init__(self, lengths: Sequence[int], position_ids_1T: Tensor, group: dist.ProcessGroup):
        """lengths: of this rank's parts of the sequences, each two pieces; their positions in the whole sequences."""
        assert all(length % 2 == 0 for length in lengths), "each sequence has two pieces of equal length here"
        self.lengths = list(lengths)
        self.position_ids_1T = position_ids_1T
        self._group = group.group_name

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1, N, T, H], key and value [1, M, T, H] -> [1, T, N, H]."""
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        out, _ = ring_operator(*rows, self.lengths, scaling, self._group)
        return out[None]


def forward(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scaling: float, group_name: str
) -> tuple[Tensor, Tensor]:
    """query [T, N, H], key and value [T, M, H] -> output [T, N, H], log-sum-exp [T, N] in fp32."""
    ring = _Ring(group_name)
    out = torch.zeros(query.shape, device=query.device)
    lse = torch.full(query.shape[:2], -torch.inf, device=query.device)
    block = torch.stack([key, value])
    for source, is_last in ring.hops():
        coming = None if is_last else ring.start(block)
        for run in _runs(lengths):
            queries, keys, is_causal = _parts(ring.place, source, run.length)
            block_out, block_lse = block_attention(
                run.rows(query)[:, :, queries],
                run.rows(block[0])[:, :, keys],
                run.rows(block[1])[:, :, keys],
                is_causal=is_causal,
                scaling=scaling,
            )
            merge(run.rows(out)[:, :, queries], run.rows(lse)[:, :, queries], block_out, block_lse)
        if coming is not None:
            block = coming.wait()
    return out.to(query.dtype), lse


# One operator for dispatch, so that selective recomputation can keep its results instead of sending all again.
ring_operator = torch.library.custom_op("plait::ring_attention", forward, mutates_args=())


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, ctx.lengths, ctx.scaling, ctx.group_name = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse = ctx.saved_tensors
    ring = _Ring(ctx.group_name)
    block, returning = torch.stack([key, value]), None
    d_query = torch.zeros_like(query, dtype=torch.float32)
    for source, is_last in ring.hops():
        coming = None if is_last else ring.start(block)
        d_block = torch.zeros_like(block, dtype=torch.float32)
        for run in _runs(ctx.lengths):
            queries, keys, is_causal = _parts(ring.place, source, run.length)
            d_q, d_k, d_v = block_attention_backward(
                run.rows(d_out)[:, :, queries],
                run.rows(query)[:, :, queries],
                run.rows(block[0])[:, :, keys],
                run.rows(block[1])[:, :, keys],
                run.rows(out)[:, :, queries],
                run.rows(lse)[:, :, queries],
                is_causal=is_causal,
                scaling=ctx.scaling,
            )
            run.rows(d_query)[:, :, queries].add_(d_q)
            run.rows(d_block[0])[:, :, keys].copy_(d_k)
            run.rows(d_block[1])[:, :, keys].copy_(d_v)
        if returning is not None:
            d_block += returning.wait()
        if coming is not None:
            block = coming.wait()
        returning = ring.start(d_block)
    assert returning is not None, "a ring has at least one rank"
    d_key, d_value = returning.wait()
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), None, None, None


ring_operator.register_autograd(_backward, setup_context=_keep)


class _Run:
    """Packed sequences of equal length, one after the other: one batch, without copies."""

    def __init__(self, start: int, number: int, length: int):
        self.length = length
        self._number, self._tokens = number, slice(start, start + number * length)

    def rows(self, x: Tensor) -> Tensor:
        """[T, heads, ...] -> [number, heads, length, ...], a view."""
        return x[self._tokens].unflatten(0, (self._number, self.length)).transpose(1, 2)


def _runs(lengths: Sequence[int]) -> Iterator[_Run]:
    start = 0
    for length, same in groupby(lengths):
        number = len(list(same))
        yield _Run(start, number, length)
        start += number * length


def _parts(place: int, source: int, length: int) -> tuple[slice, slice, bool]:
    """(queries, keys, whether causally) of what the queries of rank `place` see of the keys of rank `source`."""
    everything, first, second = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if source == place:
        return everything, everything, True
    return (everything, first, False) if source < place else (second, everything, False)


class _Coming:
    """A tensor on its way here, and another on its way out."""

    def __init__(self, tensor: Tensor, sent: Tensor, works: list[dist.Work]):
        self._tensor, self._sent, self._works = tensor, sent, works

    def wait(self) -> Tensor:
        """The tensor, once it is here; what was sent may be reused from then on."""
        for work in self._works:
            work.wait()
        return self._tensor


class _Ring:
    def __init__(self, group_name: str):
        self._group: dist.ProcessGroup = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
        self.place, self._size = self._group.rank(), self._group.size()

    def hops(self) -> Iterator[tuple[int, bool]]:
        """(rank whose keys are here, whether it is the last hop)."""
        for hop in range(self._size):
            yield (self.place - hop) % self._size, hop == self._size - 1

    def start(self, tensor: Tensor) -> _Coming:
        """Send to the next rank and receive from the one before, at the same time as what follows."""
        got = torch.empty_like(tensor)
        after, before = (self.place + 1) % self._size, (self.place - 1) % self._size
        operations = [
            dist.P2POp(dist.isend, tensor, group=self._group, group_peer=after),
            dist.P2POp(dist.irecv, got, group=self._group, group_peer=before),
        ]
        return _Coming(got, tensor, dist.batch_isend_irecv(operations))
