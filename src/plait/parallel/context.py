"""Context parallelism: the tokens of a packed row over the ranks of cp, each with its attention and its loss tokens.

ring: every sequence is filled up to a multiple of 2c tokens and cut into 2c pieces; rank r has piece r and 2c-1-r of
each, so that causal work is equal. ulysses: the row is cut into c pieces in order, wherever sequences end.

A loss token belongs to the rank that has the token before it, from which it is predicted.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plait.models.attention import SHAPE_MULTIPLE, PackedAttention, PassContext
from plait.models.routing import Balance
from plait.parallel.degrees import Layout
from plait.parallel.mesh import Mesh
from plait.parallel.ring import RingAttention
from plait.parallel.ulysses import UlyssesAttention
from plait.stages.packing import Microbatch


def sequence_multiple(layout: Layout) -> int:
    """What the length of each sequence is filled up to a multiple of."""
    return 2 * layout.cp if layout.cp > 1 and layout.cp_kind == "ring" else 1


def row_multiple(layout: Layout) -> int:
    """What the tokens of a row, before it is cut, are filled up to a multiple of: few shapes, equal parts."""
    parts = layout.cp * (layout.tp if layout.sp or routes_over_tp(layout) else 1)
    return math.lcm(SHAPE_MULTIPLE, sequence_multiple(layout), parts)


def zigzag(lengths: Sequence[int], c: int, place: int) -> Tensor:
    """Packed positions of the pieces `place` and 2c-1-place of each sequence, in order; lengths: multiples of 2c."""
    pieces, start = [], 0
    for length in lengths:
        assert length % (2 * c) == 0, f"a sequence of {length} tokens cannot be cut into {2 * c} equal pieces"
        size = length // (2 * c)
        for piece in (place, 2 * c - 1 - place):
            pieces.append(torch.arange(size) + start + piece * size)
        start += length
    return torch.cat(pieces)


def cut(microbatch: Microbatch, layout: Layout, mesh: Mesh) -> Microbatch:
    """This rank's part of a row packed with `sequence_multiple` and `row_multiple`.

    `sequences` stays that of the row; `predict_R`, `last_B` and their companions are those of this rank's tokens.
    """
    mine = _cut_over_context(microbatch, layout, mesh) if layout.cp > 1 else microbatch
    if not routes_over_tp(layout):
        return mine
    part = mine.ids_1T.shape[1] // layout.tp
    start = mesh.place("tp") * part
    return replace(mine, routing=mine.routing.of(slice(start, start + part)))


def routes_over_tp(layout: Layout) -> bool:
    """Whether each rank of a tp group routes its part of their tokens: where experts are whole on their ranks."""
    return layout.ep > 1 and layout.tp > 1


def balanced(microbatch: Microbatch, weight: float, layout: Layout, mesh: Mesh) -> Microbatch:
    """With the experts' balance loss in its passes, of this rank's part of a row.

    weight: coefficient / number of sequences of the update.
    """
    axes = [axis for axis, is_cut in (("cp", layout.cp > 1), ("tp", routes_over_tp(layout))) if is_cut]
    balance = Balance(weight, mesh.group(*axes) if axes else None)
    return replace(microbatch, routing=replace(microbatch.routing, balance=balance))


def _cut_over_context(microbatch: Microbatch, layout: Layout, mesh: Mesh) -> Microbatch:
    c, place = layout.cp, mesh.place("cp")
    whole = microbatch.context
    assert isinstance(whole, PackedAttention), "a row is cut once"
    num_tokens = microbatch.ids_1T.shape[1]
    device = microbatch.ids_1T.device
    if layout.cp_kind == "ring":
        own_t = zigzag(whole.lengths, c, place).to(device)
    else:
        assert num_tokens % c == 0, f"a row of {num_tokens} tokens cannot be cut into {c} equal pieces"
        own_t = torch.arange(num_tokens // c, device=device) + place * (num_tokens // c)
    positions_1t = whole.position_ids_1T[:, own_t]
    context: PassContext
    if layout.cp_kind == "ring":
        context = RingAttention([length // c for length in whole.lengths], positions_1t, mesh.group("cp"))
    else:
        context = UlyssesAttention(whole, positions_1t, mesh.group("cp"))
    here_T = torch.full((num_tokens,), -1, device=device)
    here_T[own_t] = torch.arange(len(own_t), device=device)
    predict_R, last_B = here_T[microbatch.predict_R], here_T[microbatch.last_B]
    is_own_R, is_own_B = predict_R >= 0, last_B >= 0
    routing = microbatch.routing.of(own_t)
    return replace(
        microbatch,
        ids_1T=microbatch.ids_1T[:, own_t],
        context=context,
        predict_R=predict_R[is_own_R],
        targets_R=microbatch.targets_R[is_own_R],
        sequence_R=microbatch.sequence_R[is_own_R],
        place_R=microbatch.place_R[is_own_R],
        last_B=last_B[is_own_B],
        ends_B=microbatch.ends_B[is_own_B],
        num_tokens=int((routing.sequence_T >= 0).sum()),
        routing=routing,
    )
