"""Cost of one forward or backward pass of a whole decoder, or of a pipeline stage's part of it. Torch-free.

The part of a stage is `ModelSpec.pipeline_stage`; everything here then holds for that part.
"""

from dataclasses import replace

from plait.cost import operators as op
from plait.cost.arithmetic import Number
from plait.cost.layers import WHOLE, Division, layer_backward, layer_forward, layer_recompute
from plait.cost.model_spec import ModelSpec
from plait.cost.operators import Cost, Implementation
from plait.cost.tokens import TokenCounts
from plait.parallel.degrees import Recompute


def forward(
    spec: ModelSpec,
    tokens: TokenCounts,
    b: Number,
    division: Division = WHOLE,
    implementation: Implementation = "fused",
    *,
    with_logprobs: bool = False,
) -> Cost:
    """Embedding, layers, last norm, and the head for num_head_tokens positions; with_logprobs: and their log-softmax.

    Products: L (2 x matrices + 4 N H pairs) + 2 D V per head token. Source: arXiv 2608.27046 with GQA and SwiGLU
    constants; compared with torch's FLOP counter.
    """
    cost = Cost()
    n = tokens.num_tokens / division.between
    if spec.has_embedding:
        cost += op.embedding(n, spec.hidden_size, b)
        if spec.num_learned_positions:
            cost += op.residual(n, spec.hidden_size, b)
    for layer in spec.layer_kinds:
        cost += layer_forward(spec, layer, tokens, b, division, implementation) * layer.count
    if not spec.has_head:
        return cost
    norm = op.layer_norm if spec.norm_has_bias else op.rms_norm
    cost += norm(n, spec.hidden_size, b) + head_forward(spec, tokens, b, division)
    if with_logprobs:
        rows = tokens.num_head_tokens / division.cp
        part = op.log_softmax(rows, spec.vocab_size / division.tp, b)
        cost += replace(part, depth=op.log_softmax(rows, spec.vocab_size, b).depth)
    return cost


def head_forward(spec: ModelSpec, tokens: TokenCounts, b: Number, division: Division = WHOLE) -> Cost:
    """Logits: 2 D V per head token, the vocabulary divided over tp; 2 D for a head of one output."""
    rows = tokens.num_head_tokens / division.cp
    return op.linear(rows, spec.hidden_size, spec.output_share(division.tp), b)


def backward(
    spec: ModelSpec,
    tokens: TokenCounts,
    b: Number,
    division: Division = WHOLE,
    implementation: Implementation = "fused",
    *,
    recompute: Recompute = "none",
    with_logprobs: bool = False,
) -> Cost:
    """Gradients of all parameters, with what is computed again.

    Depth: the layers' chains in reverse, and log n once: the first layer's weight gradients add over tokens last.
    """
    n = tokens.num_tokens / division.between
    width, cost = spec.hidden_size, Cost()
    if spec.has_head:
        rows = tokens.num_head_tokens / division.cp
        if with_logprobs:
            cost += op.log_softmax_backward(rows, spec.vocab_size / division.tp, b)
        inputs = op.linear_input_gradient(rows, width, spec.output_share(division.tp), b)
        depth = op.linear_input_gradient(rows, width, spec.output_share(1), b).depth
        weights = op.linear_weight_gradient(rows, width, spec.output_share(division.tp), b)
        norm = op.layer_norm_backward if spec.norm_has_bias else op.rms_norm_backward
        cost += replace(inputs, depth=depth) + weights.off_path() + norm(n, width, b)
    for layer in spec.layer_kinds:
        again = layer_recompute(spec, layer, tokens, b, recompute, division, implementation)
        cost += (again + layer_backward(spec, layer, tokens, b, division, implementation)) * layer.count
    if spec.has_embedding:
        cost += op.embedding_backward(n, width, b).off_path()
    return cost + Cost(depth=op.tree_depth(tokens.num_tokens))


def train(
    spec: ModelSpec,
    tokens: TokenCounts,
    b: Number,
    division: Division = WHOLE,
    implementation: Implementation = "fused",
    *,
    recompute: Recompute = "none",
) -> Cost:
    """Forward with log-probabilities, and backward."""
    return forward(spec, tokens, b, division, implementation, with_logprobs=True) + backward(
        spec, tokens, b, division, implementation, recompute=recompute, with_logprobs=True
    )
