"""The tensors of a decoder, their shapes and the dim that each axis splits: what moves, and in what units. Torch-free.

Shape letters: V vocabulary, D model width, L layers, N query heads, M key/value heads, H head size, F feed-forward
width, E experts. Matrices are written (out, in), as torch stores them.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Literal, Protocol

Part = Literal["embedding", "layer", "norm", "head"]


class TransformerShape(Protocol):
    """The sizes that the traffic formulas read; a model spec has them under these names.

    A dense model has num_experts 0. expert_intermediate_size is the width of one routed expert,
    shared_expert_intermediate_size of the shared one (0 without).
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def is_tied(self) -> bool: ...
    @property
    def has_qk_norm(self) -> bool: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_token(self) -> int: ...
    @property
    def expert_intermediate_size(self) -> int: ...
    @property
    def shared_expert_intermediate_size(self) -> int: ...
    @property
    def layer_groups(self) -> "tuple[LayerGroup, ...]": ...
    @property
    def outer(self) -> "tuple[ParameterTensor, ...]": ...


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A `TransformerShape` of plain numbers: a decoder whose layers are all alike, without biases."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    vocab_size: int
    is_tied: bool = False
    has_qk_norm: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0

    @property
    def layer_groups(self) -> "tuple[LayerGroup, ...]":
        """One group: all layers."""
        return (LayerGroup(frozenset(range(self.num_layers)), layer_tensors(self)),)

    @property
    def outer(self) -> "tuple[ParameterTensor, ...]":
        """See `outer_tensors`."""
        return outer_tensors(self)


@dataclass(frozen=True, slots=True)
class ParameterTensor:
    """One parameter, or one of each layer.

    shape: of the whole tensor. tp_dim: the dim that tensor parallelism splits, or None (replicated). tp_unit: rows of
    that dim that stay together (a head). is_expert: dim 0 counts experts, which ep splits. is_shared_expert: not split
    where there is ep, since each rank then has tokens of its own.
    """

    name: str
    part: Part
    shape: tuple[int, ...]
    tp_dim: int | None = None
    tp_unit: int = 1
    is_expert: bool = False
    is_shared_expert: bool = False

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def local_shape(self, tp: int, ep: int = 1) -> tuple[int, ...]:
        """The largest piece that one rank of a tp x ep group holds before data-parallel sharding.

        Split in whole units, rounded up as torch.chunk does; with fewer units than ranks (key/value heads) ranks hold
        copies of one. Experts are whole on a rank where ep > 1, whatever tp is.
        """
        local = list(self.shape)
        if self.is_expert and ep > 1:
            local[0] = -(-local[0] // ep)
        elif self.tp_dim is not None and not (self.is_shared_expert and ep > 1):
            units = local[self.tp_dim] // self.tp_unit
            local[self.tp_dim] = -(-units // tp) * self.tp_unit
        return tuple(local)

    def padded_elements(self, tp: int, ep: int, shard_ranks: int) -> int:
        """What the shards of a local piece add up to: FSDP2 splits dim 0 and pads it to equal parts.

        Experts fewer than the ranks they are sharded over are split along dim 1 instead.
        """
        local = list(self.local_shape(tp, ep))
        dim = 1 if self.is_expert and local[0] < shard_ranks else 0
        local[dim] = -(-local[dim] // shard_ranks) * shard_ranks
        return prod(local)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers, by their numbers, that hold the same tensors."""

    layers: frozenset[int]
    tensors: tuple[ParameterTensor, ...]

    @property
    def is_sparse(self) -> bool:
        """Whether they hold experts."""
        return any(tensor.is_expert for tensor in self.tensors)


def layer_tensors(shape: TransformerShape) -> tuple[ParameterTensor, ...]:
    """One layer: 2 D N H + 2 D M H (attention), 3 D F, or D E + 3 D F_e E + 3 D F_s, and norms 2 D (+ 2 H)."""
    d, e = shape.hidden_size, shape.head_size
    query, keys = shape.num_heads * e, shape.num_kv_heads * e
    tensors = [
        ParameterTensor("q_proj", "layer", (query, d), 0, e),
        ParameterTensor("k_proj", "layer", (keys, d), 0, e),
        ParameterTensor("v_proj", "layer", (keys, d), 0, e),
        ParameterTensor("o_proj", "layer", (d, query), 1, e),
        ParameterTensor("input_norm", "layer", (d,)),
        ParameterTensor("post_attention_norm", "layer", (d,)),
    ]
    if shape.has_qk_norm:
        tensors += [ParameterTensor("q_norm", "layer", (e,)), ParameterTensor("k_norm", "layer", (e,))]
    if not shape.num_experts:
        return (*tensors, *_feed_forward("", d, shape.intermediate_size))
    width, experts = shape.expert_intermediate_size, shape.num_experts
    tensors += [
        ParameterTensor("router", "layer", (experts, d)),
        ParameterTensor("experts_gate", "layer", (experts, width, d), 1, is_expert=True),
        ParameterTensor("experts_up", "layer", (experts, width, d), 1, is_expert=True),
        ParameterTensor("experts_down", "layer", (experts, d, width), 2, is_expert=True),
    ]
    if shape.shared_expert_intermediate_size:
        shared = _feed_forward("shared_", d, shape.shared_expert_intermediate_size)
        tensors += [replace(tensor, is_shared_expert=True) for tensor in shared]
    return tuple(tensors)


def _feed_forward(prefix: str, d: int, f: int) -> tuple[ParameterTensor, ...]:
    return (
        ParameterTensor(f"{prefix}gate_proj", "layer", (f, d), 0),
        ParameterTensor(f"{prefix}up_proj", "layer", (f, d), 0),
        ParameterTensor(f"{prefix}down_proj", "layer", (d, f), 1),
    )


def outer_tensors(shape: TransformerShape) -> tuple[ParameterTensor, ...]:
    """Embedding V D, last norm D, and the head V D where it has weights of its own."""
    table = (shape.vocab_size, shape.hidden_size)
    head = () if shape.is_tied else (ParameterTensor("lm_head", "head", table, 0),)
    return (
        ParameterTensor("embed_tokens", "embedding", table, 0),
        ParameterTensor("norm", "norm", (shape.hidden_size,)),
        *head,
    )


def num_parameters(shape: TransformerShape) -> int:
    """All parameters."""
    layers = sum(len(group.layers) * tensor.num_elements for group in shape.layer_groups for tensor in group.tensors)
    return layers + sum(tensor.num_elements for tensor in shape.outer)
