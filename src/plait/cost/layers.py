"""Cost of one decoder layer on one device, forward and backward, from its matrices and operators. Torch-free.

Work, products and bytes are those of one rank of a division; depth is that of the whole layer, because what tensor
parallelism takes from a local reduction its all-reduce adds again (communication rounds are counted elsewhere).
"""

from dataclasses import dataclass, replace

from plait.cost import operators as op
from plait.cost.arithmetic import Number, maximum
from plait.cost.model_spec import Experts, FeedForward, GroupedAttention, LatentAttention, LayerRun, Matrix, ModelSpec
from plait.cost.operators import AttentionShape, Cost, Implementation
from plait.cost.tokens import TokenCounts
from plait.parallel.degrees import Layout, Recompute


@dataclass(frozen=True, slots=True)
class Division:
    """How one layer is divided. tp: matrices. sp: norms and residuals too, by tokens, between them. cp: tokens.

    ep: experts, a multiple of tp; each of its ranks then holds whole experts. Degrees may be arrays or symbols.
    """

    tp: Number = 1
    sp: bool = False
    cp: Number = 1
    ep: Number = 1

    @classmethod
    def of(cls, layout: Layout) -> "Division":
        """The degrees of a plan's layout that divide a layer."""
        return cls(tp=layout.tp, sp=layout.sp, cp=layout.cp, ep=layout.ep)

    @property
    def between(self) -> Number:
        """Into how many parts the tokens between tensor-parallel regions are divided."""
        return self.cp * (self.tp if self.sp else 1)

    @property
    def experts(self) -> Number:
        """Into how many parts the experts are divided."""
        return maximum(self.ep, self.tp)


WHOLE = Division()


@dataclass(frozen=True, slots=True)
class _Pass:
    """Everything that the parts of a layer need: whole tokens, and those of one rank."""

    spec: ModelSpec
    tokens: TokenCounts
    b: Number
    division: Division
    implementation: Implementation

    @property
    def n(self) -> Number:
        return self.tokens.num_tokens / self.division.cp

    @property
    def n_between(self) -> Number:
        return self.tokens.num_tokens / self.division.between


def layer_forward(
    spec: ModelSpec,
    layer: LayerRun,
    tokens: TokenCounts,
    b: Number,
    division: Division = WHOLE,
    implementation: Implementation = "fused",
) -> Cost:
    """One layer: norm, attention, residual, norm, feed-forward part or experts, residual.

    Depth of a dense layer with N H = D: 6 log D + log F + 3 log x - log N and 30 steps more (arXiv 2608.27046, which
    leaves norms and softmax out: 4 log D + log F + log x - log N).
    """
    run = _Pass(spec, tokens, b, division, implementation)
    return _first_part(run, layer) + _second_part(run, layer) + op.residual(run.n_between, spec.hidden_size, b)


def layer_backward(
    spec: ModelSpec,
    layer: LayerRun,
    tokens: TokenCounts,
    b: Number,
    division: Division = WHOLE,
    implementation: Implementation = "fused",
) -> Cost:
    """One layer's backward pass: twice the products of its forward pass (and a half more of fused attention's).

    Weight gradients are off the path: the next layer's gradient does not wait for them.
    """
    run = _Pass(spec, tokens, b, division, implementation)
    joins = op.residual(run.n_between, spec.hidden_size, b) * 2
    return _second_part_backward(run, layer) + _attention_backward(run, layer) + _norm_backward(run) * 2 + joins


def layer_recompute(
    spec: ModelSpec,
    layer: LayerRun,
    tokens: TokenCounts,
    b: Number,
    recompute: Recompute,
    division: Division = WHOLE,
    implementation: Implementation = "fused",
) -> Cost:
    """What the backward pass computes again.

    full: the layer, but for a dense one's last product, whose result no gradient needs (torch stops there). selective:
    norms, rotations, activations; eager attention also its scores, which the fused one makes again in any case.
    """
    if recompute == "none":
        return Cost()
    run = _Pass(spec, tokens, b, division, implementation)
    if recompute == "full":
        if layer.is_sparse:
            return layer_forward(spec, layer, tokens, b, division, implementation)
        return _first_part(run, layer) + _dense(run, *_feed_forward_parts(run, layer)[0], with_last=False)
    again = _norm(run) * 2 + _attention_elementwise(run) + _activation(run, layer)
    if implementation == "eager":
        shape = _attention_shape(run, layer)
        scores = op.attention_core(replace(shape, value_size=0), b, implementation)
        # Without the weighted sum: its product over the keys.
        again += replace(scores, depth=scores.depth - 1 - op.tree_depth(shape.longest))
    return again


def _first_part(run: _Pass, layer: LayerRun) -> Cost:
    """Up to the second norm."""
    joined = op.residual(run.n_between, run.spec.hidden_size, run.b)
    return _norm(run) + _attention(run, layer) + joined + _norm(run)


def _norm(run: _Pass) -> Cost:
    norm = op.layer_norm if run.spec.norm_has_bias else op.rms_norm
    return norm(run.n_between, run.spec.hidden_size, run.b)


def _norm_backward(run: _Pass) -> Cost:
    norm = op.layer_norm_backward if run.spec.norm_has_bias else op.rms_norm_backward
    return norm(run.n_between, run.spec.hidden_size, run.b)


def _product(run: _Pass, matrix: Matrix, n: Number | None = None, tp: Number | None = None) -> Cost:
    """A linear layer: the rank's share of the work, the whole one's depth."""
    part = matrix.share(run.division.tp if tp is None else tp)
    rows = run.n if n is None else n
    cost = op.linear(rows, part.num_inputs, part.num_outputs, run.b, has_bias=matrix.has_bias)
    return replace(cost, depth=op.linear(rows, matrix.num_inputs, 1, run.b, has_bias=matrix.has_bias).depth)


def _product_backward(run: _Pass, matrix: Matrix, n: Number | None = None, tp: Number | None = None) -> Cost:
    """Both gradients; only the input's is on the path."""
    part = matrix.share(run.division.tp if tp is None else tp)
    rows = run.n if n is None else n
    inputs = op.linear_input_gradient(rows, part.num_inputs, part.num_outputs, run.b)
    weights = op.linear_weight_gradient(rows, part.num_inputs, part.num_outputs, run.b, has_bias=matrix.has_bias)
    depth = op.linear_input_gradient(rows, 1, matrix.num_outputs, run.b).depth
    return replace(inputs, depth=depth) + weights.off_path()


def _attention_shape(run: _Pass, layer: LayerRun) -> AttentionShape:
    attention, division, tokens = run.spec.attention, run.division, run.tokens
    shape = AttentionShape(
        pairs=tokens.pairs[layer.window] / division.cp,
        num_queries=run.n,
        # Under context parallelism every rank's queries meet the keys of all.
        num_keys=tokens.num_keys(layer.window),
        longest=tokens.longest_within(layer.window),
        num_heads=attention.num_heads / division.tp,
        score_size=attention.score_size,
        value_size=attention.value_size,
        key_width=attention.cache_share(division.tp),
    )
    if not isinstance(attention, LatentAttention):
        return shape
    if tokens.is_decode:
        # Decoding works on the cached low rank itself: the matrices around it are absorbed into queries and outputs.
        low = attention.kv_rank
        return replace(shape, score_size=low + attention.rope_size, value_size=low)
    heads = attention.num_heads / division.tp
    return replace(shape, key_width=heads * (attention.score_size + attention.value_size))


def _attention_elementwise(run: _Pass) -> Cost:
    """Norms inside attention, beside each other, then rotations of queries and keys."""
    attention, tp = run.spec.attention, run.division.tp
    norms = [op.rms_norm(run.n * _norm_rows(rows, tp), width, run.b) for width, rows in attention.norm_widths]
    rotations = op.rope(run.n, _rotated_heads(run) * attention.rope_size, run.b)
    if attention.rope_size == 0:
        rotations = Cost()
    return op.beside(*norms) + rotations


def _norm_rows(rows: Number, tp: Number) -> Number:
    return maximum(rows / tp, 1)


def _rotated_heads(run: _Pass) -> Number:
    attention, tp = run.spec.attention, run.division.tp
    keys = 1 if isinstance(attention, LatentAttention) else maximum(attention.num_kv_heads / tp, 1)
    return attention.num_heads / tp + keys


def _attention(run: _Pass, layer: LayerRun) -> Cost:
    matrices = run.spec.attention.matrices(run.spec.hidden_size)
    core = op.attention_core(_attention_shape(run, layer), run.b, run.implementation)
    products = [_product(run, matrix) for matrix in matrices[:-1]]
    inputs = _low_rank_chain(products) if isinstance(run.spec.attention, LatentAttention) else op.beside(*products)
    return inputs + _attention_elementwise(run) + core + _product(run, matrices[-1])


def _low_rank_chain(products: list[Cost]) -> Cost:
    """Down then up, for queries and for keys with values, the two chains beside each other."""
    *query, down, up = products
    chain = Cost()
    for product in query:
        chain += product
    return op.beside(chain, down + up)


def _attention_backward(run: _Pass, layer: LayerRun) -> Cost:
    attention, tp = run.spec.attention, run.division.tp
    matrices = attention.matrices(run.spec.hidden_size)
    core = op.attention_core_backward(_attention_shape(run, layer), run.b, run.implementation)
    norms = [op.rms_norm_backward(run.n * _norm_rows(rows, tp), width, run.b) for width, rows in attention.norm_widths]
    rotations = op.rope_backward(run.n, _rotated_heads(run) * attention.rope_size, run.b)
    if attention.rope_size == 0:
        rotations = Cost()
    products = [_product_backward(run, matrix) for matrix in matrices[:-1]]
    inputs = _low_rank_chain(products) if isinstance(attention, LatentAttention) else op.beside(*products)
    # The gradients of queries, keys and values are added where they meet.
    meeting = op.elementwise(run.n_between * run.spec.hidden_size, 2, 2, run.b, num_inputs=3)
    # Query heads that share keys and values add up their gradients.
    heads = attention.num_heads / tp if isinstance(attention, GroupedAttention) else 0
    if isinstance(attention, GroupedAttention) and attention.num_heads != attention.num_kv_heads:
        width = heads * 2 * attention.head_size
        depth = op.tree_depth(attention.num_heads / attention.num_kv_heads)
        core += op.elementwise(run.n * width, 1, depth, run.b)
    return _product_backward(run, matrices[-1]) + core + rotations + op.beside(*norms) + inputs + meeting


def _activation(run: _Pass, layer: LayerRun) -> Cost:
    cost = Cost()
    for part, n, tp in _feed_forward_parts(run, layer):
        act = op.gated_activation if part.is_gated else op.activation
        cost += act(n, part.width / tp, run.b)
    return cost


def _feed_forward_parts(run: _Pass, layer: LayerRun) -> list[tuple[FeedForward, Number, Number]]:
    """(part, rows, tensor-parallel degree) of what a layer's tokens pass after attention."""
    experts = run.spec.experts
    if not layer.is_sparse or experts is None:
        return [(run.spec.feed_forward, run.n, run.division.tp)]
    # Of the K n rows each rank computes 1 / tp, by whole experts or by their width: the work is the same.
    parts = [(experts.expert, run.n * experts.num_experts_per_token, run.division.tp)]
    return parts + ([(experts.shared, run.n, run.division.tp)] if experts.shared is not None else [])


def _dense(run: _Pass, part: FeedForward, n: Number, tp: Number, *, with_last: bool = True) -> Cost:
    *first, last = part.matrices(run.spec.hidden_size)
    act = op.gated_activation if part.is_gated else op.activation
    into = op.beside(*(_product(run, matrix, n) for matrix in first))
    out = _product(run, last, n) if with_last else Cost()
    return into + act(n, part.width / tp, run.b) + out


def _dense_backward(run: _Pass, part: FeedForward, n: Number, tp: Number) -> Cost:
    *first, last = part.matrices(run.spec.hidden_size)
    act = op.gated_activation_backward if part.is_gated else op.activation_backward
    into = op.beside(*(_product_backward(run, matrix, n) for matrix in first))
    both = op.residual(n, run.spec.hidden_size, run.b) if part.is_gated else Cost()
    return _product_backward(run, last, n) + act(n, part.width / tp, run.b) + into + both


def _second_part(run: _Pass, layer: LayerRun) -> Cost:
    experts, parts = run.spec.experts, _feed_forward_parts(run, layer)
    if not layer.is_sparse or experts is None:
        return _dense(run, *parts[0])
    width = run.spec.hidden_size
    router = op.beside(*(_product(run, matrix) for matrix in experts.router(width)))
    routing = op.routing(run.n, experts.num_experts, experts.num_experts_per_token, run.b)
    chosen = _with_expert_weights(run, experts, _dense(run, *parts[0]), passes=1)
    combined = op.expert_combination(run.n / run.division.tp, width, experts.num_experts_per_token, run.b)
    routed = router + routing + chosen + combined
    if experts.shared is None:
        return routed
    return op.beside(routed, _dense(run, *parts[1])) + op.residual(run.n_between, width, run.b)


def _second_part_backward(run: _Pass, layer: LayerRun) -> Cost:
    experts, parts = run.spec.experts, _feed_forward_parts(run, layer)
    if not layer.is_sparse or experts is None:
        return _dense_backward(run, *parts[0])
    width, n = run.spec.hidden_size, run.n
    chosen = _with_expert_weights(run, experts, _dense_backward(run, *parts[0]), passes=2)
    # The router's gradient comes from the products of each expert's output with the gradient, beside the experts.
    scores = Cost(2 * n * experts.num_experts_per_token * width, 1 + op.tree_depth(width))
    routing = scores + op.softmax_backward(n, experts.num_experts, run.b)
    router = op.beside(*(_product_backward(run, matrix) for matrix in experts.router(width)))
    combined = op.expert_combination(n / run.division.tp, width, experts.num_experts_per_token, run.b)
    paths = [chosen, routing + router]
    if experts.shared is not None:
        paths.append(_dense_backward(run, *parts[1]))
    return combined + op.beside(*paths) + op.residual(run.n_between, width, run.b)


def _with_expert_weights(run: _Pass, experts: Experts, cost: Cost, passes: int) -> Cost:
    """Replaces the one expert whose weights `_dense` reads by the experts that this rank's tokens choose.

    The group of ranks that shares the experts chooses among all of them together.
    """
    part = experts.expert
    one = sum((m.share(run.division.tp).num_inputs * m.share(run.division.tp).num_outputs
               for m in part.matrices(run.spec.hidden_size)), start=0)  # fmt: skip
    whole = sum((m.num_inputs * m.num_outputs for m in part.matrices(run.spec.hidden_size)), start=0)
    division = run.division
    group_tokens = run.n * division.experts / division.tp
    chosen = op.expected_experts(group_tokens, experts.num_experts, experts.num_experts_per_token)
    read = chosen * whole / division.experts - one
    # Backward reads the weights once and writes a gradient of every expert's.
    written = (experts.num_experts * whole / division.experts - one) if passes == 2 else 0
    return replace(
        cost,
        read_bytes=cost.read_bytes + run.b * read,
        write_bytes=cost.write_bytes + run.b * written,
        product_bytes=cost.product_bytes + run.b * (read + written),
    )
