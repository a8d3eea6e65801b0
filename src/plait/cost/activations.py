"""Bytes that a forward pass keeps for its backward pass: per layer, per microbatch, per rank. Torch-free.

`fused` is the published form: fused norms and FlashAttention, each tensor once (Korthikanti et al., arXiv 2205.05198,
with GQA and SwiGLU, without dropout). `eager` is what transformers' own modules keep: norms and softmax in fp32, the
copies between them, keys and values repeated for every query head. Tests compare eager with the bytes autograd holds;
gpt-oss is left out there (its clamped gate and its sinks keep more than the formula knows).
"""

from dataclasses import dataclass

from plait.cost.arithmetic import Number, maximum, minimum
from plait.cost.layers import WHOLE, Division
from plait.cost.model_spec import FeedForward, GroupedAttention, LatentAttention, LayerRun, ModelSpec
from plait.cost.operators import Implementation
from plait.cost.tokens import TokenCounts
from plait.parallel.degrees import Recompute

FP32 = 4


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer keeps, by part. norms: their inputs and outputs (the next products' inputs)."""

    norms: Number
    attention: Number
    scores: Number
    feed_forward: Number

    @property
    def total(self) -> Number:
        """All parts."""
        return self.norms + self.attention + self.scores + self.feed_forward


def layer_bytes(
    spec: ModelSpec,
    layer: LayerRun,
    tokens: TokenCounts,
    b: Number,
    *,
    division: Division = WHOLE,
    implementation: Implementation = "fused",
    recompute: Recompute = "none",
) -> LayerBytes:
    """One layer on one rank.

    fused, none: n [b (4 D + 2 N H + 2 M H + 3 F) + 4 N]; with tp, all but 4 D is divided; with sp that too.
    selective: the layer's input, results of its products and of attention. full: the layer's input, b D.
    Tokens are divided over cp.
    """
    n, n_between = tokens.num_tokens / division.cp, tokens.num_tokens / division.between
    width = spec.hidden_size
    if recompute == "full":
        return LayerBytes(b * n_between * width, 0, 0, 0)
    if recompute == "selective":
        # The input, and the results of the row-wise products, which are whole between tensor-parallel regions; the
        # experts' own are counted with their rows.
        num_wide = 3 if not layer.is_sparse or (spec.experts and spec.experts.shared) else 2
        between = num_wide * b * n_between * width
        kept = _products(spec.attention, division.tp) + _heads(spec, division.tp) * spec.attention.value_size
        return LayerBytes(
            between,
            b * n * kept,
            _log_sum_exp(spec, n, division, implementation),
            _chosen_products(spec, layer, n, b, division),
        )
    per_norm = 2 * b * width if implementation == "fused" else _eager_norm(spec, b, width, with_output=True)
    norms = 2 * n_between * per_norm
    if implementation == "fused":
        attention = (
            b * n * (_products(spec.attention, division.tp) + _heads(spec, division.tp) * spec.attention.value_size)
        )
        attention += b * n * _inner_norms(spec, division.tp)
        scores = _log_sum_exp(spec, n, division, implementation)
    else:
        attention = n * _eager_attention(spec, b, division.tp)
        # Weights of every pair in fp32, and their copy in a smaller dtype.
        scores = _heads(spec, division.tp) * tokens.pairs[layer.window] / division.cp * (FP32 + (b if b < FP32 else 0))
    return LayerBytes(norms, attention, scores, _feed_forward(spec, layer, n, b, division, implementation))


def _heads(spec: ModelSpec, tp: Number) -> Number:
    return spec.attention.num_heads / tp


def _log_sum_exp(spec: ModelSpec, n: Number, division: Division, implementation: Implementation) -> Number:
    return FP32 * n * _heads(spec, division.tp) if implementation == "fused" else 0


def _products(attention: GroupedAttention | LatentAttention, tp: Number) -> Number:
    """Numbers per token that the products before attention give: queries, keys, values, and the low ranks."""
    if isinstance(attention, GroupedAttention):
        return attention.num_heads * attention.head_size / tp + attention.cache_share(tp)
    low = attention.kv_rank + attention.rope_size + (attention.query_rank or 0)
    heads = attention.num_heads / tp
    return low + heads * (attention.score_size + attention.nope_size + attention.value_size)


def _inner_norms(spec: ModelSpec, tp: Number) -> Number:
    """Inputs of fused norms inside attention, beside their outputs."""
    return sum((width * maximum(rows / tp, 1) for width, rows in spec.attention.norm_widths), start=0)


def _eager_norm(spec: ModelSpec, b: Number, width: Number, *, with_output: bool) -> Number:
    """One row. RMSNorm: the input in fp32 (the input itself where b is 4), its root, the normalised input, the output.

    LayerNorm is one operator: input, mean, root, output.
    """
    out = b * width if with_output else 0
    if spec.norm_has_bias:
        return b * width + 2 * FP32 + out
    return (FP32 + b) * width + FP32 + out


def _eager_attention(spec: ModelSpec, b: Number, tp: Number) -> Number:
    """Per token: queries, keys and values once per query head, the output; and what the norms inside keep."""
    attention, heads = spec.attention, _heads(spec, tp)
    if isinstance(attention, GroupedAttention):
        kept = 4 * b * heads * attention.head_size
        rows = ((width, maximum(count / tp, 1)) for width, count in attention.norm_widths)
        return kept + sum((count * _eager_norm(spec, b, width, with_output=False) for width, count in rows), start=0)
    # Values are a part of the product that also gave the keys' first part, and hold it.
    kept = heads * (2 * attention.score_size + attention.nope_size + 2 * attention.value_size)
    norms = sum((_eager_norm(spec, b, width, with_output=True) for width, _ in attention.norm_widths), start=0)
    # The rotated part of the key shares its storage with the low rank that is normalised; below fp32 that is a copy.
    rest = b * attention.rope_size if b == FP32 else 0
    return b * kept + norms + rest


def _feed_forward(
    spec: ModelSpec, layer: LayerRun, n: Number, b: Number, division: Division, implementation: Implementation
) -> Number:
    """gate, up, product (and, eager, the activation beside the product); per chosen expert, and its input as well."""
    experts, tp = spec.experts, division.tp

    def part(feed_forward: FeedForward) -> Number:
        times = (3 if implementation == "fused" else 4) if feed_forward.is_gated else 2
        return times * b * feed_forward.width / tp

    if not layer.is_sparse or experts is None:
        return n * part(spec.feed_forward)
    shared = 0 if experts.shared is None else part(experts.shared)
    chosen = experts.num_experts_per_token
    # Of the K n rows each rank of tp holds a part: whole rows, or all rows of a part of the width.
    rows = chosen * (b * spec.hidden_size / _row_ways(division) + part(experts.expert))
    router = FP32 * experts.num_experts
    if implementation == "eager":
        # The expert's output before and after the weight multiplies it; the weight; the pair of indices of a row.
        rows += chosen * (2 * b * spec.hidden_size + b + 16)
        router += 12 * chosen + FP32
        # The shared part's result and its gate, which multiply each other; DeepSeek routes on an fp32 copy.
        router += b * (spec.hidden_size + 2) if experts.has_shared_gate else 0
        router += FP32 * spec.hidden_size if experts.has_routing_bias and b < FP32 else 0
    return n * (rows + shared + router)


def _row_ways(division: Division) -> Number:
    """Whole experts: each tp rank holds its part of the rows. Experts cut by width: all rows."""
    return minimum(division.tp, maximum(division.ep, 1))


def _chosen_products(spec: ModelSpec, layer: LayerRun, n: Number, b: Number, division: Division) -> Number:
    """Results of the products of the feed-forward part or of the chosen experts, but for the layer's last."""
    experts, tp = spec.experts, division.tp
    if not layer.is_sparse or experts is None:
        return n * b * (2 if spec.feed_forward.is_gated else 1) * spec.feed_forward.width / tp
    rows = experts.num_experts_per_token * (2 * experts.expert.width / tp + spec.hidden_size / _row_ways(division))
    shared = 0 if experts.shared is None else 2 * experts.shared.width / tp
    return n * b * (rows + shared + experts.num_experts)


@dataclass(frozen=True, slots=True)
class ActivationBytes:
    """One microbatch on one rank of one pipeline stage.

    layers: kept by all layers. outside: last norm, head's input, cosines and sines. working: of one layer, which exists
    whole for a moment when it is computed again. logits: and what their log-probabilities need.
    """

    layers: Number
    outside: Number
    working: Number
    logits: Number

    @property
    def kept(self) -> Number:
        """Between forward and backward, logits included."""
        return self.layers + self.outside + self.logits

    @property
    def peak(self) -> Number:
        """Either the logits are there, at the end of the forward pass, or a layer is being computed again."""
        return self.layers + self.outside + maximum(self.logits, self.working)


def activation_bytes(
    spec: ModelSpec,
    tokens: TokenCounts,
    b: Number,
    *,
    division: Division = WHOLE,
    implementation: Implementation = "fused",
    recompute: Recompute = "none",
    logits_chunk: Number | None = None,
) -> ActivationBytes:
    """All that one microbatch keeps; `spec` may be a pipeline stage's part. logits_chunk: head tokens at a time, all if
    None.
    """

    def of(layer: LayerRun, how: Recompute) -> Number:
        return layer_bytes(
            spec, layer, tokens, b, division=division, implementation=implementation, recompute=how
        ).total

    layers: Number = 0
    working: Number = 0
    for layer in spec.layer_kinds:
        kept = of(layer, recompute)
        layers += layer.count * kept
        if recompute != "none":
            working = maximum(working, of(layer, "none") - kept)
    n, n_between = tokens.num_tokens / division.cp, tokens.num_tokens / division.between
    outside: Number = 0
    if spec.has_head:
        norm = 2 * b * spec.hidden_size
        if implementation == "eager":
            norm = _eager_norm(spec, b, spec.hidden_size, with_output=True)
        outside += n_between * norm
    outside += 2 * b * n * spec.attention.rope_size
    if implementation == "eager" and recompute != "none":
        # The masks of one sequence, one for each window, are arguments of every layer that is run again.
        outside += b * n * tokens.longest * len(spec.windows)
    logits = logits_bytes(spec, tokens.num_head_tokens, b, division, chunk=logits_chunk) if spec.has_head else 0
    return ActivationBytes(layers, outside, working, logits)


def logits_tensor_bytes(
    spec: ModelSpec, num_head_tokens: Number, b: Number, division: Division = WHOLE, *, chunk: Number | None = None
) -> Number:
    """One tensor of logits: of all head tokens, or of one chunk at a time: V / tp b per row."""
    rows = num_head_tokens / division.cp
    if chunk is not None:
        rows = minimum(rows, chunk)
    return rows * spec.output_share(division.tp) * b


def logits_bytes(
    spec: ModelSpec, num_head_tokens: Number, b: Number, division: Division = WHOLE, *, chunk: Number | None = None
) -> Number:
    """Logits and what their log-probabilities need: V / tp (b + 8) per row.

    The model's logits, their fp32 log-softmax, and its fp32 gradient: the first is freed as the last is made where
    b is 4, so this is up to a half more than is held at once.
    """
    return logits_tensor_bytes(spec, num_head_tokens, b + 2 * FP32, division, chunk=chunk)


def korthikanti_layer_bytes(
    s: Number,
    b: Number,
    h: Number,
    a: Number,
    *,
    t: Number = 1,
    sp: bool = False,
    recompute: Recompute = "none",
) -> Number:
    """The published bytes of one layer: 16 bits, MHA, two-matrix GELU, dropout, unfused attention (table 2).

    Their letters: s sequence, b microbatch, h hidden, a heads, t tensor-parallel. Their selective recomputes attention
    only: it is what fused attention keeps. Source: arXiv 2205.05198.
    """
    if recompute == "full":
        return 2 * s * b * h
    scores = 0 if recompute == "selective" else 5 * a * s / h
    if sp:
        return s * b * h / t * (34 + scores)
    return s * b * h * (10 + 24 / t + scores / t)
