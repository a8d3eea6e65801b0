"""A model spec as the tensors that move: what `plait.cost.traffic` and `plait.cost.reshard` read. Torch-free.

Every matrix, bias, norm and expert of the spec, layer by layer, so that dense and sparse layers, biases and low ranks
are counted as they are: the tensors add up to the spec's parameters exactly.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from plait.cost.model_spec import Experts, GroupedAttention, LatentAttention, Matrix, ModelSpec
from plait.cost.parameter_tensors import LayerGroup, ParameterTensor

_SPLIT = {"column": 0, "row": 1, "none": None}


@dataclass(frozen=True)
class SpecShape:
    """A `TransformerShape` of a spec whose sizes are numbers.

    Latent attention counts as one key/value head per query head, of the mean size of a key and a value: what passes
    between ranks in training are keys and values of all heads, after the low rank.
    """

    spec: ModelSpec

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.spec.vocab_size)

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(self.spec.hidden_size)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.spec.num_layers)

    @property
    def num_heads(self) -> int:
        """N."""
        return int(self.spec.attention.num_heads)

    @property
    def num_kv_heads(self) -> int:
        """M; N for latent attention."""
        attention = self.spec.attention
        return int(attention.num_kv_heads if isinstance(attention, GroupedAttention) else attention.num_heads)

    @property
    def head_size(self) -> int:
        """H; 2 M H numbers of a token are keys and values."""
        attention = self.spec.attention
        return int(attention.score_size + attention.value_size) // 2

    @property
    def intermediate_size(self) -> int:
        """F, of the dense layers."""
        return int(self.spec.feed_forward.width)

    @property
    def is_tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.spec.is_tied and self.spec.num_outputs is None

    @property
    def has_qk_norm(self) -> bool:
        """Norms of query and key heads, which tensor parallelism gives to each rank for some heads."""
        return isinstance(self.spec.attention, GroupedAttention) and self.spec.attention.has_qk_norm

    @property
    def num_experts(self) -> int:
        """E; 0 for a dense model."""
        return 0 if self.spec.experts is None else int(self.spec.experts.num_experts)

    @property
    def num_experts_per_token(self) -> int:
        """K."""
        return 0 if self.spec.experts is None else int(self.spec.experts.num_experts_per_token)

    @property
    def expert_intermediate_size(self) -> int:
        """Width of one routed expert."""
        return 0 if self.spec.experts is None else int(self.spec.experts.expert.width)

    @property
    def shared_expert_intermediate_size(self) -> int:
        """Width of the shared one, 0 without."""
        experts = self.spec.experts
        return 0 if experts is None or experts.shared is None else int(experts.shared.width)

    @cached_property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Dense layers, sparse layers."""
        kinds: dict[bool, set[int]] = {}
        first = 0
        for run in self.spec.layers:
            kinds.setdefault(run.is_sparse, set()).update(range(first, first + int(run.count)))
            first += int(run.count)
        return tuple(
            LayerGroup(frozenset(layers), tuple(_layer(self.spec, is_sparse))) for is_sparse, layers in kinds.items()
        )

    @cached_property
    def outer(self) -> tuple[ParameterTensor, ...]:
        """Embedding, learned positions, last norm, head."""
        spec = self.spec
        table = (int(spec.vocab_size), int(spec.hidden_size))
        tensors = [ParameterTensor("embed_tokens", "embedding", table, 0)]
        if spec.num_learned_positions:
            positions = (spec.num_learned_positions, int(spec.hidden_size))
            tensors.append(ParameterTensor("embed_positions", "embedding", positions))
        tensors += _norm(spec, "norm", int(spec.hidden_size), "norm")
        if spec.num_outputs is not None:
            tensors.append(ParameterTensor("score_head", "head", (int(spec.num_outputs), int(spec.hidden_size))))
        elif not spec.is_tied:
            tensors.append(ParameterTensor("lm_head", "head", table, 0))
        return tuple(tensors)


def _norm(spec: ModelSpec, name: str, width: int, part: str = "layer") -> list[ParameterTensor]:
    names = (name, f"{name}_bias") if spec.norm_has_bias else (name,)
    return [ParameterTensor(each, "norm" if part == "norm" else "layer", (width,)) for each in names]


def _layer(spec: ModelSpec, is_sparse: bool) -> Iterator[ParameterTensor]:
    width, attention = int(spec.hidden_size), spec.attention
    yield from _norm(spec, "input_norm", width)
    yield from _norm(spec, "post_attention_norm", width)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    unit = int(attention.score_size)
    if isinstance(attention, LatentAttention):
        query = ("q_proj",) if attention.query_rank is None else ("q_down", "q_up")
        names = (*query, "kv_down", "kv_up", "o_proj")
    for name, matrix in zip(names, attention.matrices(spec.hidden_size), strict=True):
        heads = int(attention.nope_size + attention.value_size) if name == "kv_up" else unit  # type: ignore[union-attr]
        yield from _matrix(name, matrix, heads if matrix.split == "column" else 1)
    for index, (size, _) in enumerate(attention.norm_widths):
        yield ParameterTensor(f"attention_norm_{index}", "layer", (int(size),))
    if attention.num_sinks:
        yield ParameterTensor("sinks", "layer", (int(attention.num_sinks),), 0)
    if is_sparse and spec.experts is not None:
        yield from _experts(spec.experts, width)
        return
    for index, matrix in enumerate(spec.feed_forward.matrices(width)):
        yield from _matrix(f"feed_forward_{index}", matrix)


def _matrix(name: str, matrix: Matrix, unit: int = 1) -> Iterator[ParameterTensor]:
    dim = _SPLIT[matrix.split]
    yield ParameterTensor(name, "layer", (int(matrix.num_outputs), int(matrix.num_inputs)), dim, unit)
    if matrix.has_bias:
        yield ParameterTensor(f"{name}_bias", "layer", (int(matrix.num_outputs),), 0 if dim == 0 else None, unit)


def _experts(experts: Experts, width: int) -> Iterator[ParameterTensor]:
    for index, matrix in enumerate(experts.router(width)):
        yield from _matrix(f"router_{index}", matrix)
    count = int(experts.num_experts)
    for index, matrix in enumerate(experts.expert.matrices(width)):
        outputs, inputs, dim = int(matrix.num_outputs), int(matrix.num_inputs), _SPLIT[matrix.split]
        split = None if dim is None else dim + 1
        yield ParameterTensor(f"expert_{index}", "layer", (count, outputs, inputs), split, is_expert=True)
        if matrix.has_bias:
            bias_dim = 1 if dim == 0 else None
            yield ParameterTensor(f"expert_{index}_bias", "layer", (count, outputs), bias_dim, is_expert=True)
    if experts.shared is not None:
        for index, matrix in enumerate(experts.shared.matrices(width)):
            yield from (replace(tensor, is_shared_expert=True) for tensor in _matrix(f"shared_{index}", matrix))
