"""Weight movement between two layouts, by exact overlap of what each rank holds and needs. Torch-free.

A rank holds a box of every tensor (an interval of each dim) and the layers of its pipeline stages. What it needs and
does not hold it receives from ranks that hold it. Schemes of HybridFlow (2409.19256, table 2) are special cases, which
the tests assert. All counts are numbers x bytes_per_number of what travels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from plait.cost.arithmetic import Number, maximum
from plait.cost.parameter_tensors import ParameterTensor, TransformerShape
from plait.parallel.degrees import Layout, layer_ranges
from plait.parallel.pipeline_orders import stages_of_rank


class Place(NamedTuple):
    """Where a rank stands on each axis of its layout."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


def contiguous_places(layout: Layout) -> list[Place]:
    """Ranks numbered with tp fastest, then cp, dp_shard, dp_replicate, pp: those that talk most are neighbours."""
    sizes = (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp)
    return [Place(*map(int, np.unravel_index(rank, sizes))) for rank in range(layout.world_size)]


def nested_places(source: Layout, target: Layout) -> list[Place]:
    """HybridFlow's strided groups: each rank's part in the target contains the part that it holds in the source.

    target: replicas, tp and pp only, with degrees that divide the source's; as many ranks as the source.
    """
    assert target.world_size == source.world_size
    assert source.tp % target.tp == 0
    assert source.pp % target.pp == 0
    assert target.dp_shard == target.cp == 1, "strided groups hold whole parts"
    taken: dict[tuple[int, int], int] = {}
    places = []
    for place in contiguous_places(source):
        part = (place.pp * target.pp // source.pp, place.tp * target.tp // source.tp)
        places.append(Place(part[0], taken.setdefault(part, 0), 0, 0, part[1]))
        taken[part] += 1
    return places


@dataclass(frozen=True, slots=True)
class Reshard:
    """Bytes of each device; devices of a separate pool follow those of the source.

    held_bytes before, needed_bytes after, kept_bytes of both; what is needed and not kept is received_bytes.
    """

    held_bytes: np.ndarray
    needed_bytes: np.ndarray
    kept_bytes: np.ndarray
    received_bytes: np.ndarray
    sent_bytes: np.ndarray
    peak_bytes: np.ndarray
    """Weights on a device while both layouts are there."""

    @property
    def redundant_bytes(self) -> np.ndarray:
        """What a device holds for the source alone, as long as the target is in use."""
        return self.held_bytes - self.kept_bytes

    @property
    def peak_extra_bytes(self) -> np.ndarray:
        """Beyond what it held before."""
        return self.peak_bytes - self.held_bytes


Pools = Literal["colocated", "disaggregated"]


class _Boxes(NamedTuple):
    """What each rank has of one tensor: its stage [ranks], and where its intervals start and end [ranks, dims]."""

    stage: np.ndarray
    start: np.ndarray
    end: np.ndarray


def _chunk(length: np.ndarray, parts: int, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of equal pieces, rounded up, so that the last may be short or empty (torch.chunk, FSDP2)."""
    size = -(-length // parts)
    return np.minimum(index * size, length), np.minimum((index + 1) * size, length)


def _boxes(tensor: ParameterTensor, layout: Layout, places: list[Place]) -> _Boxes:
    place = np.array(places, dtype=np.int64)
    pp, shard, tp = place[:, 0], place[:, 2] * layout.cp + place[:, 3], place[:, 4]
    start = np.zeros((len(places), len(tensor.shape)), dtype=np.int64)
    end = np.tile(np.array(tensor.shape, dtype=np.int64), (len(places), 1))
    shards, dim = layout.shard_ranks, 0
    if tensor.is_expert and layout.ep > 1:
        flat = shard * layout.tp + tp
        start[:, 0], end[:, 0] = _chunk(end[:, 0], layout.ep, flat % layout.ep)
        shards, shard = layout.expert_shard_ranks, flat // layout.ep
    elif tensor.tp_dim is not None:
        units = tensor.shape[tensor.tp_dim] // tensor.tp_unit
        if units < layout.tp and tensor.tp_unit > 1:  # fewer heads than ranks: copies
            first, last = tp * units // layout.tp, tp * units // layout.tp + 1
        else:
            first, last = _chunk(np.full_like(tp, units), layout.tp, tp)
        start[:, tensor.tp_dim], end[:, tensor.tp_dim] = first * tensor.tp_unit, last * tensor.tp_unit
    if layout.zero == 3 and shards > 1:
        length = end - start
        if tensor.is_expert and length[0, 0] < shards:
            dim = 1
        low, high = _chunk(length[:, dim], shards, shard)
        start[:, dim], end[:, dim] = start[:, dim] + low, start[:, dim] + high
    return _Boxes(pp, start, end)


def _layers_of(layout: Layout, num_layers: int) -> list[set[int]]:
    """Layers of each pipeline rank."""
    if layout.pp == 1:
        return [set(range(num_layers))]
    ranges = layer_ranges(num_layers, layout.num_stages)
    return [
        {layer for s in stages_of_rank(layout.pp_schedule, r, layout.pp, layout.stages_per_rank) for layer in ranges[s]}
        for r in range(layout.pp)
    ]


def _tensors(shape: TransformerShape) -> Iterator[tuple[ParameterTensor, frozenset[int]]]:
    """Every tensor, with the layers that have one of it (0 for a tensor outside them)."""
    for group in shape.layer_groups:
        yield from ((tensor, group.layers) for tensor in group.tensors)
    yield from ((tensor, frozenset({0})) for tensor in shape.outer)


def _copies(tensor: ParameterTensor, layers: frozenset[int], shape: TransformerShape, layout: Layout) -> list[set[int]]:
    """Per pipeline rank, which copies of a tensor it has: its layers, or 0 for a tensor outside them."""
    if tensor.part == "layer":
        return [held & layers for held in _layers_of(layout, shape.num_layers)]
    if layout.pp == 1:
        return [{0}]
    chunks = layout.stages_per_rank
    stages = [stages_of_rank(layout.pp_schedule, rank, layout.pp, chunks) for rank in range(layout.pp)]
    last = layout.num_stages - 1
    holders = {last} if tensor.part != "embedding" else {0, last} if shape.is_tied else {0}
    return [{0} if holders & set(held) else set() for held in stages]


def reshard(
    shape: TransformerShape,
    source: Layout,
    target: Layout,
    *,
    source_places: list[Place] | None = None,
    target_places: list[Place] | None = None,
    pools: Pools = "colocated",
    is_chained: bool = False,
    bytes_per_number: int = 2,
) -> Reshard:
    """Move a model's weights from one layout to another, each rank receiving just what it needs and does not hold.

    colocated: device i is rank i of both; disaggregated: the target's ranks are other devices. Copies of the same part
    share the sending evenly. is_chained (disaggregated): the first replica receives from the source, each of the others
    from the one before it, so the source sends once, whatever the number of replicas; a ring broadcast does the same.
    """
    assert not (is_chained and pools == "colocated"), "a chain is for replicas that hold nothing yet"
    have_places = source_places or contiguous_places(source)
    need_places = target_places or contiguous_places(target)
    offset = len(have_places) if pools == "disaggregated" else 0
    num_devices = max(len(have_places), offset + len(need_places))
    sums = {name: np.zeros(num_devices, dtype=np.int64) for name in ("held", "needed", "kept", "sent")}
    for tensor, layers in _tensors(shape):
        have, need = _boxes(tensor, source, have_places), _boxes(tensor, target, need_places)
        of_source, of_target = _copies(tensor, layers, shape, source), _copies(tensor, layers, shape, target)
        common = np.array([[len(a & b) for b in of_source] for a in of_target])
        sums["held"][: len(have_places)] += _volume(have) * np.array([len(c) for c in of_source])[have.stage]
        sums["needed"][offset : offset + len(need_places)] += (
            _volume(need) * np.array([len(c) for c in of_target])[need.stage]
        )
        if pools == "colocated":
            both = min(len(have_places), len(need_places))
            sums["kept"][:both] += _own_overlap(have, need, both) * common[need.stage[:both], have.stage[:both]]
        _add_sent(sums["sent"], have, need, common, offset, pools == "colocated", is_chained)
    b = bytes_per_number
    held, needed, kept = sums["held"] * b, sums["needed"] * b, sums["kept"] * b
    return Reshard(held, needed, kept, needed - kept, sums["sent"] * b, held + needed - kept)


def _volume(boxes: _Boxes) -> np.ndarray:
    return np.prod(boxes.end - boxes.start, axis=1)


def _own_overlap(have: _Boxes, need: _Boxes, count: int) -> np.ndarray:
    low, high = np.maximum(have.start[:count], need.start[:count]), np.minimum(have.end[:count], need.end[:count])
    return np.prod(np.maximum(high - low, 0), axis=1)


def _groups(boxes: _Boxes) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (stage, box) rows, and the row of each rank: ranks with the same row are copies of each other."""
    rows = np.column_stack([boxes.stage, boxes.start, boxes.end])
    return np.unique(rows, axis=0, return_inverse=True)


def _add_sent(
    sent: np.ndarray,
    have: _Boxes,
    need: _Boxes,
    common: np.ndarray,
    offset: int,
    is_colocated: bool,
    is_chained: bool,
) -> None:
    """Count what each device sends of one tensor: holders of a part take its receivers in turn."""
    cells, cell_of = _groups(have)
    wants, want_of = _groups(need)
    dims = have.start.shape[1]
    low = np.maximum(wants[:, None, 1 : 1 + dims], cells[None, :, 1 : 1 + dims])
    high = np.minimum(wants[:, None, 1 + dims :], cells[None, :, 1 + dims :])
    size_wc = np.prod(np.maximum(high - low, 0), axis=2) * common[wants[:, :1], cells[None, :, 0]]
    receivers_wc = np.repeat(np.bincount(want_of, minlength=len(wants))[:, None], len(cells), axis=1)
    if is_colocated:  # whoever holds a part already does not receive it
        both = min(len(cell_of), len(want_of))
        np.subtract.at(receivers_wc, (want_of[:both], cell_of[:both]), 1)
    if is_chained:
        receivers_wc = np.minimum(receivers_wc, 1)
        last = np.zeros(len(wants), dtype=np.int64)
        np.maximum.at(last, want_of, np.arange(len(want_of)))
        passes_on = last[want_of] != np.arange(len(want_of))
        sent[offset : offset + len(want_of)] += size_wc.sum(axis=1)[want_of] * passes_on
    sent[: len(cell_of)] += _turns(receivers_wc, size_wc, cell_of)


def _turns(receivers_wc: np.ndarray, size_wc: np.ndarray, cell_of: np.ndarray) -> np.ndarray:
    """What each holder sends: n holders of a cell serve every n-th of its receivers, the first ones also the rest."""
    num_cells = size_wc.shape[1]
    holders = np.bincount(cell_of, minlength=num_cells)
    order = np.argsort(cell_of, kind="stable")
    position = np.empty_like(cell_of)
    position[order] = np.arange(len(cell_of)) - (np.cumsum(holders) - holders)[cell_of[order]]
    rounds_wc, rest_wc = np.divmod(receivers_wc, holders)
    width = holders.max() + 1
    by_rest = np.bincount(
        (np.arange(num_cells) * width + rest_wc).ravel(), weights=size_wc.ravel(), minlength=num_cells * width
    ).reshape(num_cells, width)
    # Column k: what is wanted by more than k receivers of the rest.
    beyond = by_rest[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:].astype(np.int64)
    return (rounds_wc * size_wc).sum(axis=0)[cell_of] + beyond[cell_of, position]


def gather_whole(shape: TransformerShape, source: Layout, target: Layout, *, bytes_per_number: int = 2) -> Reshard:
    """Every rank gathers the whole model from the ranks that share a copy, then cuts out its part of the target.

    DeepSpeed-Chat gathers over all ranks (source fsdpN), HybridFlow-V over tp x pp: (n-1)/n M bytes each, peak M.
    """
    exact = reshard(shape, source, target, bytes_per_number=bytes_per_number)
    whole = reshard(shape, source, Layout(dp_replicate=source.world_size), bytes_per_number=bytes_per_number)
    return Reshard(
        exact.held_bytes,
        exact.needed_bytes,
        exact.kept_bytes,
        whole.received_bytes,
        whole.received_bytes,  # an all-gather passes on as much as it takes
        whole.needed_bytes,
    )


class Move(NamedTuple):
    """One piece to send: which box of which tensor (and of which layer; 0 outside the layers), from whom to whom."""

    name: str
    layer: int
    sender: int
    receiver: int
    box: tuple[slice, ...]


def moves(
    shape: TransformerShape,
    source: Layout,
    target: Layout,
    *,
    source_places: list[Place] | None = None,
    target_places: list[Place] | None = None,
) -> Iterator[Move]:
    """The pieces that `reshard` counts between colocated layouts, one by one, for whoever carries them out."""
    have_places = source_places or contiguous_places(source)
    need_places = target_places or contiguous_places(target)
    for tensor, layers in _tensors(shape):
        have, need = _boxes(tensor, source, have_places), _boxes(tensor, target, need_places)
        of_source, of_target = _copies(tensor, layers, shape, source), _copies(tensor, layers, shape, target)
        cells, cell_of = _groups(have)
        _, want_of = _groups(need)
        served: dict[tuple[int, int], int] = {}
        for receiver, want in enumerate(want_of):
            for cell in range(len(cells)):
                holders = np.flatnonzero(cell_of == cell)
                if receiver in holders:
                    continue
                first = holders[0]
                low = np.maximum(have.start[first], need.start[receiver])
                high = np.minimum(have.end[first], need.end[receiver])
                turn = served.get((want, cell), 0)
                served[want, cell] = turn + 1
                if (high <= low).any():
                    continue
                sender = int(holders[turn % len(holders)])
                box = tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))
                for layer in sorted(of_source[have.stage[first]] & of_target[need.stage[receiver]]):
                    yield Move(tensor.name, layer, sender, receiver, box)


def reshard_time_s(
    moved: Reshard,
    *,
    in_bytes_per_s: Number,
    out_bytes_per_s: Number,
    num_buckets: Number = 1,
    alpha_s: Number = 0.0,
) -> Number:
    """No less than the busiest receiver or the busiest sender takes, and a latency per bucket.

    Packing, converting and stopping an engine come on top; measured systems lie well above this bound.
    """
    slowest_in = moved.received_bytes.max() / in_bytes_per_s
    return maximum(slowest_in, moved.sent_bytes.max() / out_bytes_per_s) + num_buckets * alpha_s
