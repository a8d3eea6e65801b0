"""What a decoder consists of: its matrices, and from them its parameters and the size of its KV cache. Torch-free.

Shape letters: V vocabulary, D model width, L layers, N query heads, M key/value heads, H head size, F feed-forward
width, E experts, K experts per token. Sizes may be symbols; `plait.cost.model_config` reads them from a config.json.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Literal

from plait.cost.arithmetic import Number, maximum, minimum


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear map from num_inputs to num_outputs numbers per token.

    split: how tensor parallelism divides it: by its outputs (column), by its inputs (row), or not at all.
    unit: outputs that stay together (a KV head); more ranks than units hold copies.
    """

    num_inputs: Number
    num_outputs: Number
    split: Literal["column", "row", "none"]
    has_bias: bool = False
    unit: Number = 1

    @property
    def num_parameters(self) -> Number:
        """inputs x outputs, and outputs for a bias."""
        return self.num_inputs * self.num_outputs + (self.num_outputs if self.has_bias else 0)

    def share(self, tp: Number) -> "Matrix":
        """The part of one of tp ranks. A row-split bias is whole on every rank (it is added once, after the sum)."""
        if isinstance(tp, int) and tp == 1:
            return self
        if self.split == "column":
            return replace(self, num_outputs=maximum(self.num_outputs / tp, self.unit))
        if self.split == "row":
            return replace(self, num_inputs=self.num_inputs / tp)
        return self


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Grouped-query attention: N query heads over M key/value heads of size H (M = N is multi-head attention).

    rope_size: how many of the H numbers of a head are rotated. has_sinks: one learned logit per head (gpt-oss).
    """

    num_heads: Number
    num_kv_heads: Number
    head_size: Number
    rope_size: Number
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    has_qk_norm: bool = False
    has_sinks: bool = False

    def matrices(self, width: Number) -> tuple[Matrix, ...]:
        """Queries (D, N H), keys and values (D, M H), output (N H, D)."""
        query, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        key = Matrix(width, keys, "column", self.has_qkv_bias, unit=self.head_size)
        return (
            Matrix(width, query, "column", self.has_qkv_bias),
            key,
            key,
            Matrix(query, width, "row", self.has_output_bias),
        )

    @property
    def norm_widths(self) -> tuple[tuple[Number, Number], ...]:
        """(width, rows per token) of the norms inside: of each query head and each key head."""
        head = self.head_size
        return ((head, self.num_heads), (head, self.num_kv_heads)) if self.has_qk_norm else ()

    @property
    def num_sinks(self) -> Number:
        """N where there are sinks, else 0."""
        return self.num_heads if self.has_sinks else 0

    @property
    def score_size(self) -> Number:
        """Numbers of one query head that meet a key: H."""
        return self.head_size

    @property
    def value_size(self) -> Number:
        """Numbers of one head's output: H."""
        return self.head_size

    @property
    def cache_width(self) -> Number:
        """Numbers kept per token and layer: keys and values, 2 M H."""
        return 2 * self.num_kv_heads * self.head_size

    def cache_share(self, tp: Number) -> Number:
        """cache_width of one of tp ranks: whole heads, so more ranks than heads hold copies."""
        return 2 * maximum(self.num_kv_heads / tp, 1) * self.head_size


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): queries, and keys with values, pass through a low rank.

    query_rank: None where queries are one full matrix. nope_size, rope_size: the parts of a head without and with
    rotary positions. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    num_heads: Number
    query_rank: Number | None
    kv_rank: Number
    nope_size: Number
    rope_size: Number
    value_size: Number
    has_bias: bool = False

    def matrices(self, width: Number) -> tuple[Matrix, ...]:
        """Down and up for queries, down and up for keys with values, output."""
        query = self.num_heads * self.score_size
        up: tuple[Matrix, ...] = (Matrix(width, query, "column"),)
        if self.query_rank is not None:
            up = (Matrix(width, self.query_rank, "none", self.has_bias), Matrix(self.query_rank, query, "column"))
        return (
            *up,
            Matrix(width, self.kv_rank + self.rope_size, "none", self.has_bias),
            Matrix(self.kv_rank, self.num_heads * (self.nope_size + self.value_size), "column"),
            Matrix(self.num_heads * self.value_size, width, "row", self.has_bias),
        )

    @property
    def norm_widths(self) -> tuple[tuple[Number, Number], ...]:
        """(width, rows per token) of the norms of the low ranks."""
        ranks = (self.kv_rank,) if self.query_rank is None else (self.query_rank, self.kv_rank)
        return tuple((rank, 1) for rank in ranks)

    @property
    def num_sinks(self) -> Number:
        """None: 0."""
        return 0

    @property
    def score_size(self) -> Number:
        """Numbers of one query head that meet a key."""
        return self.nope_size + self.rope_size

    @property
    def cache_width(self) -> Number:
        """Numbers kept per token and layer: the low rank and the rotated part, one for all heads."""
        return self.kv_rank + self.rope_size

    def cache_share(self, tp: Number) -> Number:
        """Every rank keeps all of it: there is one head."""
        return self.cache_width + 0 * tp


@dataclass(frozen=True, slots=True)
class FeedForward:
    """gate, up, down (SwiGLU and its kin) or, without a gate, two matrices (GELU). width: F."""

    width: Number
    is_gated: bool = True
    has_bias: bool = False

    def matrices(self, width: Number) -> tuple[Matrix, ...]:
        """(D, F) once or twice, then (F, D)."""
        first = Matrix(width, self.width, "column", self.has_bias)
        return (*((first, first) if self.is_gated else (first,)), Matrix(self.width, width, "row", self.has_bias))


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of E experts, K per token, each a gated feed-forward part of the given width.

    shared: one feed-forward part that every token passes besides; has_shared_gate: scaled by a learned number
    (Qwen2-MoE). has_routing_bias: DeepSeek's per-expert correction, a buffer of E numbers, not a parameter.
    """

    num_experts: Number
    num_experts_per_token: Number
    expert: FeedForward
    shared: FeedForward | None = None
    has_router_bias: bool = False
    has_shared_gate: bool = False
    has_routing_bias: bool = False

    def router(self, width: Number) -> tuple[Matrix, ...]:
        """(D, E), and (D, 1) for the shared part's gate."""
        gate = (Matrix(width, 1, "none"),) if self.has_shared_gate else ()
        return (Matrix(width, self.num_experts, "none", self.has_router_bias), *gate)


@dataclass(frozen=True, slots=True)
class LayerRun:
    """count layers in a row of one kind. window: tokens that a query may see at most, None for all before it."""

    count: Number
    window: int | None = None
    is_sparse: bool = False


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Parameters by part. feed_forward: dense layers' and shared experts'. Biases are counted with their matrices."""

    attention: Number
    feed_forward: Number
    experts: Number
    router: Number
    norms: Number
    embedding: Number
    head: Number

    @property
    def total(self) -> Number:
        """All parts."""
        return sum((getattr(self, field.name) for field in fields(self)), start=0)


def count_parameters(matrices: Iterable[Matrix]) -> Number:
    """Parameters of several matrices."""
    return sum((matrix.num_parameters for matrix in matrices), start=0)


@dataclass(frozen=True)
class ModelSpec:
    """A decoder. norm_has_bias: LayerNorm (2 D parameters) instead of RMSNorm (D); two norms per layer, one at the end.

    num_outputs: of its head, None for the vocabulary; 1 for a critic or a reward model, whose head is never tied.
    num_learned_positions: rows of a position embedding (GPT-2), else 0. has_embedding, has_head: false for the parts of
    a pipeline that do not hold them. max_positions: longest sequence.
    """

    name: str
    vocab_size: Number
    hidden_size: Number
    layers: tuple[LayerRun, ...]
    attention: GroupedAttention | LatentAttention
    feed_forward: FeedForward
    experts: Experts | None
    is_tied: bool
    max_positions: Number
    norm_has_bias: bool = False
    num_outputs: Number | None = None
    num_learned_positions: int = 0
    has_embedding: bool = True
    has_head: bool = True

    def with_scalar_head(self) -> "ModelSpec":
        """The same decoder with a head of one output, as a critic or a reward model."""
        return replace(self, num_outputs=1)

    def output_share(self, tp: Number) -> Number:
        """Outputs of the head on one of tp ranks: the vocabulary is divided, one output is not."""
        return self.vocab_size / tp if self.num_outputs is None else self.num_outputs

    @property
    def num_layers(self) -> Number:
        """L."""
        return sum((run.count for run in self.layers), start=0)

    @property
    def num_sparse_layers(self) -> Number:
        """Layers with experts."""
        return sum((run.count for run in self.layers if run.is_sparse), start=0)

    @cached_property
    def layer_kinds(self) -> tuple[LayerRun, ...]:
        """The layers with equal ones added up, whatever their order."""
        kinds: dict[tuple[Any, bool], Number] = {}
        for run in self.layers:
            kinds[run.window, run.is_sparse] = kinds.get((run.window, run.is_sparse), 0) + run.count
        return tuple(LayerRun(count, *kind) for kind, count in kinds.items())

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of its layers."""
        return tuple({run.window: None for run in self.layers})

    @cached_property
    def parameters(self) -> ParameterCounts:
        """Exact counts by part; a tied head counts with the embedding.

        Source: the modules of transformers, which tests compare number by number.
        """
        width, attention = self.hidden_size, self.attention
        norm = width * (2 if self.norm_has_bias else 1)
        inner = sum((size for size, _ in attention.norm_widths), start=0)
        dense, sparse = self.num_layers - self.num_sparse_layers, self.num_sparse_layers
        feed_forward = dense * count_parameters(self.feed_forward.matrices(width))
        experts: Number = 0
        router: Number = 0
        if self.experts is not None:
            each = count_parameters(self.experts.expert.matrices(width))
            experts = sparse * self.experts.num_experts * each
            router = sparse * count_parameters(self.experts.router(width))
            if self.experts.shared is not None:
                feed_forward += sparse * count_parameters(self.experts.shared.matrices(width))
        rows = self.vocab_size + self.num_learned_positions
        is_tied = self.is_tied and self.num_outputs is None
        is_separate = self.has_head and not (is_tied and self.has_embedding)
        return ParameterCounts(
            attention=self.num_layers * (count_parameters(attention.matrices(width)) + attention.num_sinks),
            feed_forward=feed_forward,
            experts=experts,
            router=router,
            norms=self.num_layers * (2 * norm + inner) + (norm if self.has_head else 0),
            embedding=rows * width if self.has_embedding else 0,
            head=(self.num_outputs or self.vocab_size) * width if is_separate else 0,
        )

    @property
    def num_parameters(self) -> Number:
        """N: everything that is trained."""
        return self.parameters.total

    @property
    def num_active_parameters(self) -> Number:
        """N without the experts that a token does not pass. Embedding and head count, as in "A22B" and "37B active"."""
        if self.experts is None:
            return self.num_parameters
        part = self.experts.num_experts_per_token / self.experts.num_experts
        return self.num_parameters - self.parameters.experts * (1 - part)

    @property
    def num_routing_buffers(self) -> Number:
        """Numbers that a checkpoint stores beside the parameters: DeepSeek's corrections, E per sparse layer."""
        if self.experts is None or not self.experts.has_routing_bias:
            return 0
        return self.num_sparse_layers * self.experts.num_experts

    def kv_bytes_per_token(self, b: Number) -> Number:
        """Bytes by which the KV cache grows per token of b bytes a number, while no window is full: L x width x b."""
        return self.num_layers * self.attention.cache_width * b

    def kv_bytes(self, context: Number, b: Number, *, tp: Number = 1) -> Number:
        """KV cache of one sequence of `context` tokens on one of tp ranks; a windowed layer keeps its window."""
        held = sum((run.count * _within(context, run.window) for run in self.layer_kinds), start=0)
        return held * self.attention.cache_share(tp) * b

    def pipeline_stage(self, index: int, num_stages: int) -> "ModelSpec":
        """The part that stage `index` of a pipeline holds: layers in order, the first stages one more where they do
        not divide; the embedding on the first, norm and head on the last. A tied head is a copy there.
        """
        assert 0 <= index < num_stages <= self.num_layers, f"stage {index} of {num_stages}, {self.num_layers} layers"
        each, more = divmod(self.num_layers, num_stages)
        start = index * each + min(index, more)
        return replace(
            self,
            layers=_cut(self.layers, start, start + each + (index < more)),
            has_embedding=self.has_embedding and index == 0,
            has_head=self.has_head and index == num_stages - 1,
        )


def _within(context: Number, window: int | None) -> Number:
    return context if window is None else minimum(context, window)


def _cut(runs: tuple[LayerRun, ...], start: int, stop: int) -> tuple[LayerRun, ...]:
    parts, position = [], 0
    for run in runs:
        count = min(stop, position + run.count) - max(start, position)
        if count > 0:
            parts.append(replace(run, count=count))
        position += run.count
    return tuple(parts)
