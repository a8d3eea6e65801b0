"""Traffic of one device under a Layout: a training step, an inference pass, a decode step, term by term. Torch-free.

Recompute: `full` runs a layer's forward again in backward, with its collectives, up to the last tensor that backward
needs (torch stops there); `selective` keeps what collectives bring, like the other things it keeps. What `offload`
moves between host and device is no network traffic and not counted here.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from plait.cost.arithmetic import Number
from plait.cost.parameter_tensors import LayerGroup, ParameterTensor, TransformerShape
from plait.cost.traffic.context import ring_terms, ulysses_terms
from plait.cost.traffic.data import (
    ddp_terms,
    fsdp_terms,
    gathers_per_step,
    gradient_norm_terms,
    hsdp_terms,
    scatters_per_step,
)
from plait.cost.traffic.experts import ep_terms, ep_tp_terms
from plait.cost.traffic.pipeline import pp_terms, pp_tied_embedding_terms, pp_token_terms
from plait.cost.traffic.tensor import (
    replicated_gradient_terms,
    sp_layer_terms,
    tp_embedding_terms,
    tp_head_terms,
    tp_layer_terms,
    tp_logits_terms,
)
from plait.cost.traffic.term import Term, present
from plait.parallel.degrees import Layout, layer_ranges
from plait.parallel.pipeline_orders import stages_of_rank


@dataclass(frozen=True, slots=True)
class Work:
    """What one data-parallel rank passes through the model, and the bytes per number that travel.

    num_tokens: of one microbatch, all sequences, before cp cuts it. parameter, gradient, activation: compute dtype,
    dtype of the gradient reduction, dtype of hidden states.
    """

    num_microbatches: float
    num_tokens: float
    activation_bytes: float = 2
    parameter_bytes: float = 2
    gradient_bytes: float = 4


@dataclass(frozen=True, slots=True)
class _Part:
    """What the device at one pipeline rank holds. groups: (layers of a kind, how many of them are here)."""

    groups: tuple[tuple[LayerGroup, int], ...]
    has_embedding: bool
    has_head: bool

    @property
    def num_layers(self) -> int:
        return sum(count for _, count in self.groups)

    @property
    def num_sparse_layers(self) -> int:
        return sum(count for group, count in self.groups if group.is_sparse)


def _part(shape: TransformerShape, layout: Layout, pp_rank: int) -> _Part:
    assert 0 <= pp_rank < layout.pp, f"there is no pipeline rank {pp_rank} in {layout}"
    if layout.pp == 1:
        return _Part(tuple((group, len(group.layers)) for group in shape.layer_groups), True, True)
    ranges = layer_ranges(shape.num_layers, layout.num_stages)
    stages = stages_of_rank(layout.pp_schedule, pp_rank, layout.pp, layout.stages_per_rank)
    here = {layer for s in stages for layer in ranges[s]}
    groups = tuple((group, len(here & group.layers)) for group in shape.layer_groups)
    return _Part(groups, 0 in stages, layout.num_stages - 1 in stages)


def training_traffic(shape: TransformerShape, layout: Layout, work: Work, pp_rank: int = 0) -> tuple[Term, ...]:
    """All collectives of one optimiser step (forward, backward, gradient reduction) of a device at a pipeline rank."""
    part = _part(shape, layout, pp_rank)
    return present(
        *_passes(shape, layout, work, part, pp_rank, is_training=True),
        *_gradients(shape, layout, work, part, pp_rank),
        *_gradient_norm(shape, layout, part),
    )


def inference_traffic(shape: TransformerShape, layout: Layout, work: Work, pp_rank: int = 0) -> tuple[Term, ...]:
    """One forward pass with log-probabilities over all microbatches; ZeRO-3 gathers each unit once per microbatch."""
    part = _part(shape, layout, pp_rank)
    gathers = 0 if layout.zero < 3 else (1 if layout.pp > 1 else work.num_microbatches)
    return present(
        *_passes(shape, layout, work, part, pp_rank, is_training=False),
        *_sharded_units(shape, layout, work, part, num_gathers=(gathers, gathers), num_scatters=0),
    )


def decode_traffic(
    shape: TransformerShape,
    layout: Layout,
    num_sequences: float,
    *,
    activation_bytes: float = 2,
    logit_bytes: int = 4,
    pp_rank: int = 0,
) -> tuple[Term, ...]:
    """One token for each of a = num_sequences of one replica: 2 L all-reduces of a D b (tp), p - 1 hops (pp).

    Weights stay where the layout's tp, pp and ep put them: they are gathered over dp_shard before generation starts
    (see `plait.cost.reshard`). cp is a layout of training only.
    """
    assert layout.cp == 1, "generation has no context parallelism"
    part = _part(shape, layout, pp_rank)
    work = Work(1, num_sequences, activation_bytes)
    terms = _passes(shape, layout, work, part, pp_rank, is_training=False)
    terms = tuple(term for term in terms if term.name not in ("tp_loss_all_reduce",))
    if part.has_head:
        terms += tp_logits_terms(num_sequences, shape.vocab_size, logit_bytes, layout.tp)
    return present(*terms, *pp_token_terms(num_sequences, p=layout.pp, rank=pp_rank))


def _passes(
    shape: TransformerShape, layout: Layout, work: Work, part: _Part, pp_rank: int, *, is_training: bool
) -> tuple[Term, ...]:
    """Collectives on activations: tp, cp, ep, pp."""
    m = work.num_microbatches
    whole = work.num_tokens / layout.cp * shape.hidden_size * work.activation_bytes
    boundary = whole / layout.tp if layout.sp else whole
    terms = _tensor(shape, layout, work, part, whole, is_training)
    terms += _context(shape, layout, work, part, is_training)
    if layout.ep > 1 and part.num_sparse_layers:
        terms += ep_terms(
            work.num_tokens / layout.cp / layout.tp,
            layout.ep,
            num_experts=shape.num_experts,
            num_experts_per_token=shape.num_experts_per_token,
            hidden_size=shape.hidden_size,
            bytes_per_number=work.activation_bytes,
            num_layers=part.num_sparse_layers,
            m=m,
            is_training=is_training,
            num_recomputed=int(layout.recompute == "full"),
        )
        if not layout.sp:
            terms += ep_tp_terms(whole, layout.tp, num_layers=part.num_sparse_layers, m=m, is_training=is_training)
    if layout.pp > 1:
        terms += pp_terms(
            boundary,
            schedule=layout.pp_schedule,
            p=layout.pp,
            v=layout.stages_per_rank,
            m=m,
            rank=pp_rank,
            is_training=is_training,
        )
    return terms


def _tensor(
    shape: TransformerShape, layout: Layout, work: Work, part: _Part, whole: float, is_training: bool
) -> tuple[Term, ...]:
    t, m, sp = layout.tp, work.num_microbatches, layout.sp
    is_full = layout.recompute == "full"
    terms: tuple[Term, ...] = ()
    for group, num_layers in part.groups:
        # Whole experts leave attention as the one region that tp splits; a shared expert is whole beside them.
        is_apart = layout.ep > 1 and group.is_sparse
        regions = 1 if is_apart else 2
        if sp:
            terms += sp_layer_terms(
                whole,
                t,
                num_layers=num_layers,
                m=m,
                is_training=is_training,
                num_regions=regions,
                is_recomputed=is_full,
                recomputes_last=is_apart,
            )
        else:
            terms += tp_layer_terms(
                whole,
                t,
                num_layers=num_layers,
                m=m,
                is_training=is_training,
                num_regions=regions,
                num_recomputed=(regions - int(not is_apart)) * int(is_full),
            )
    if part.has_embedding:
        terms += tp_embedding_terms(whole, t, m=m, is_training=is_training, sp=sp)
    if part.has_head:
        terms += tp_head_terms(whole, work.num_tokens / layout.cp, t, m=m, is_training=is_training, sp=sp)
    return terms


def _replicated_gradients(shape: TransformerShape, layout: Layout, work: Work, part: _Part) -> tuple[Term, ...]:
    t, b = layout.tp, work.parameter_bytes
    scatters = _scatters(layout, work) if _is_sharded(layout) else 1
    terms: tuple[Term, ...] = ()
    if shape.has_qk_norm:
        terms += replicated_gradient_terms(shape.head_size * b, 2 * part.num_layers, t, num_reduces=scatters)
    if layout.sp:
        count = 2 * part.num_layers + int(part.has_head)
        terms += replicated_gradient_terms(shape.hidden_size * b, count, t, num_reduces=scatters)
    if shape.num_experts and (layout.sp or layout.ep > 1):
        router = shape.num_experts * shape.hidden_size * b
        terms += replicated_gradient_terms(router, part.num_sparse_layers, t, num_reduces=scatters)
    if layout.ep > 1:
        for group, num_layers in part.groups:
            for tensor in (each for each in group.tensors if each.is_shared_expert):
                terms += replicated_gradient_terms(tensor.num_elements * b, num_layers, t, num_reduces=scatters)
    return terms


def _context(shape: TransformerShape, layout: Layout, work: Work, part: _Part, is_training: bool) -> tuple[Term, ...]:
    recomputed = int(layout.recompute == "full")
    kv_heads = -(-shape.num_kv_heads // layout.tp)
    if layout.cp_kind == "ring":
        return ring_terms(
            work.num_tokens,
            layout.cp,
            num_kv_heads=kv_heads,
            head_size=shape.head_size,
            bytes_per_number=work.activation_bytes,
            num_layers=part.num_layers,
            m=work.num_microbatches,
            is_training=is_training,
            num_recomputed=recomputed,
            bytes_per_gradient=4,
        )
    return ulysses_terms(
        work.num_tokens,
        layout.cp,
        num_heads=shape.num_heads / layout.tp,
        num_kv_heads=kv_heads,
        head_size=shape.head_size,
        bytes_per_number=work.activation_bytes,
        num_layers=part.num_layers,
        m=work.num_microbatches,
        is_training=is_training,
        num_recomputed=recomputed,
    )


class _Unit(NamedTuple):
    """Numbers of one unit on one device, how many of such units it holds, and what they are."""

    numbers: int
    num_units: int
    is_expert: bool
    is_root: bool


def _units(shape: TransformerShape, layout: Layout, part: _Part, *, is_padded: bool = True) -> list[_Unit]:
    """Each layer without its experts, each layer's experts where ep spreads them, and the root."""

    def size(tensors: Iterable[ParameterTensor]) -> int:
        """Replicated data parallelism pads nothing: one shard rank."""
        sums = 0
        for tensor in tensors:
            z = layout.expert_shard_ranks if tensor.is_expert else layout.shard_ranks
            sums += tensor.padded_elements(layout.tp, layout.ep, z if is_padded else 1)
        return sums

    units = []
    for group, count in part.groups:
        apart = [tensor for tensor in group.tensors if tensor.is_expert and layout.ep > 1]
        rest = [tensor for tensor in group.tensors if tensor not in apart]
        units += [_Unit(size(rest), count, False, False), _Unit(size(apart), count, True, False)]
    units.append(_Unit(size(_outer_held(shape, part)), 1, False, True))
    return [unit for unit in units if unit.numbers * unit.num_units > 0]


def _sharded_units(
    shape: TransformerShape,
    layout: Layout,
    work: Work,
    part: _Part,
    *,
    num_gathers: tuple[Number, Number],
    num_scatters: Number,
) -> tuple[Term, ...]:
    """Gathers (of a layer, of the root) and scatters of everything a device holds, and the all-reduce over replicas."""
    terms: tuple[Term, ...] = ()
    for unit in _units(shape, layout, part):
        gradient, name = unit.numbers * work.gradient_bytes, "_expert" if unit.is_expert else ""
        z = layout.expert_shard_ranks if unit.is_expert else layout.shard_ranks
        terms += fsdp_terms(
            unit.numbers * work.parameter_bytes,
            gradient,
            z,
            num_units=unit.num_units,
            num_gathers=num_gathers[int(unit.is_root)],
            num_scatters=num_scatters,
            prefix=f"fsdp{name}",
        )
        if num_scatters:
            terms += hsdp_terms(gradient, z, layout.dp_replicate, num_units=unit.num_units, prefix=f"hsdp{name}")
    return terms


def _is_sharded(layout: Layout) -> bool:
    return layout.zero > 0 and layout.shard_ranks > 1


def _scatters(layout: Layout, work: Work) -> Number:
    return scatters_per_step(layout.zero, work.num_microbatches, is_once=layout.pp > 1)


def _gradient_norm(shape: TransformerShape, layout: Layout, part: _Part) -> tuple[Term, ...]:
    """Over each axis that splits gradients: as torch does it where FSDP alone shards, else one number per axis.

    torch's clip_grad_norm_ refuses parameters on different meshes (norms on dp, matrices on dp x tp).
    """
    count = 1
    if layout.tp == 1:
        count = sum(num_layers * len(group.tensors) for group, num_layers in part.groups)
        count += len(_outer_held(shape, part))
    shards = layout.shard_ranks if _is_sharded(layout) else 1
    return (
        *gradient_norm_terms("dp_shard", shards, count),
        *gradient_norm_terms("tp", layout.tp),
        *gradient_norm_terms("pp", layout.pp),
    )


def _outer_held(shape: TransformerShape, part: _Part) -> list[ParameterTensor]:
    has_table = part.has_embedding or (shape.is_tied and part.has_head)
    held = {"embedding": has_table, "norm": part.has_head, "head": part.has_head}
    return [tensor for tensor in shape.outer if held[tensor.part]]


def _gradients(shape: TransformerShape, layout: Layout, work: Work, part: _Part, pp_rank: int) -> tuple[Term, ...]:
    """Collectives on weights and gradients in a training step."""
    m, has_pipeline = work.num_microbatches, layout.pp > 1
    terms = _replicated_gradients(shape, layout, work, part)
    if _is_sharded(layout):
        gathers = tuple(
            gathers_per_step(layout.zero, m, is_root=is_root, is_kept_gathered=has_pipeline)
            for is_root in (False, True)
        )
        scatters = _scatters(layout, work)
        terms += _sharded_units(shape, layout, work, part, num_gathers=(gathers[0], gathers[1]), num_scatters=scatters)
    else:
        units = _units(shape, layout, part, is_padded=False)
        numbers = [sum(unit.numbers * unit.num_units for unit in units if unit.is_expert == apart) for apart in (0, 1)]
        dense, experts = (count * work.gradient_bytes for count in numbers)
        terms += ddp_terms(dense, layout.dp_replicate * layout.cp)
        copies = layout.dp_replicate * layout.expert_shard_ranks
        terms += tuple(
            Term("ddp_expert_all_reduce", term.axis, term.collective, copies, int(experts > 0), experts, True)
            for term in ddp_terms(experts, copies)
        )
    if shape.is_tied and has_pipeline:
        table = -(-shape.vocab_size // layout.tp) * shape.hidden_size * work.gradient_bytes
        shards = layout.shard_ranks if _is_sharded(layout) else 1
        terms += pp_tied_embedding_terms(table / shards, schedule=layout.pp_schedule, p=layout.pp, rank=pp_rank)
    return terms
