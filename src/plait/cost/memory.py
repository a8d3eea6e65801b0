"""Memory of one process that generates and trains, term by term. Torch-free, plain arithmetic.

Every function takes numbers (floats, numpy arrays, symbols) and gives bytes. b is the size of a number in the compute
dtype (2 for bfloat16, 4 for float32). Shapes: T tokens of a microbatch, R loss tokens, S slots, C tokens per slot;
those of a model are in `plait.cost.model_shape`.
"""

from plait.cost.model_shape import KVSizes, ModelShape

MAX_DENSE_LENGTH = 256
"""As in `plait.models.attention`, which a test compares."""
FP32 = 4
"""Bytes of an fp32 number."""


def parameter_bytes(num_parameters: float, b: float) -> float:
    """The copy that computes: b per parameter."""
    return b * num_parameters


def master_bytes(num_parameters: float, b: float) -> float:
    """fp32 masters: 4 per parameter beside a bfloat16 copy; none beside an fp32 one, which is its own master."""
    return FP32 * num_parameters * (b != FP32)


def gradient_bytes(num_parameters: float) -> float:
    """Gradients are added up in fp32: 4 per parameter."""
    return FP32 * num_parameters


def copy_gradient_bytes(num_parameters: float, b: float) -> float:
    """Gradients of a bfloat16 copy, until they are added to the fp32 ones: b per parameter; none in fp32.

    A backward pass makes them while it frees activations, so they share the place of the larger of the two.
    """
    return b * num_parameters * (b != FP32)


def moment_bytes(optimizer: str, num_hidden_matrix: float, num_other: float, momentum: float) -> float:
    """fp32 moments. adamw: two per parameter (8 bytes). sgd: one (4), none without momentum. muon: one for the hidden
    matrices (4), AdamW's two for the others (8).
    """
    if optimizer == "adamw":
        return 2 * FP32 * (num_hidden_matrix + num_other)
    if optimizer == "muon":
        return FP32 * num_hidden_matrix + 2 * FP32 * num_other
    assert optimizer == "sgd", f"no formula for the moments of {optimizer}"
    return FP32 * (num_hidden_matrix + num_other) * (momentum > 0)


def kv_slot_bytes(shape: ModelShape | KVSizes, num_slots: float, capacity: float, b: float) -> float:
    """Keys and values of all slots: 2 L M H S C b."""
    return 2 * shape.num_layers * shape.kv_width * num_slots * capacity * b


def slot_record_bytes(num_slots: float, capacity: float) -> float:
    """Per place: the uniform number (4), the token (8), its log-probability (4), its policy version (4): 20 S C."""
    return 20 * num_slots * capacity


def sampler_bytes(shape: ModelShape, num_rows: float, b: float) -> float:
    """Logits of num_rows samples and what sampling makes of them: V (b + 16) per row.

    Besides the model's logits, four fp32 numbers per vocabulary entry are alive at once: log-probabilities,
    probabilities, their running sum, and one intermediate result.
    """
    return shape.vocab_size * (b + 4 * FP32) * num_rows


def fused_copy_bytes(shape: ModelShape, b: float) -> float:
    """The engine's fused weights: L D (N H + 2 M H + 2 F) b.

    Queries, keys and values are one matrix of a layer, gate and up another; small biases are left out.
    """
    columns = shape.query_width + 2 * shape.kv_width + 2 * shape.intermediate_size
    return shape.num_layers * shape.hidden_size * columns * b


def layer_activation_bytes_per_token(shape: ModelShape, b: float, padding: float, longest: int) -> float:
    """What one layer keeps for its backward pass, per token, without recompute.

    Two norms: input and scaled output: 4 b D. Norms of queries and keys, if any: their input, b (N H + M H).
    Attention, padded to the longest sequence S (padding = padded / real tokens): up to S = 256 queries, keys, values
    and the S weights of each head, in fp32 and as a copy in another dtype: padding (b (N H + 2 M H) + N S (4 + b'))
    with b' = b below fp32, else 0; beyond, queries, keys, values, output and a log-sum-exp per head:
    padding (2 b (N H + M H) + 4 N). Its output without the padding: b N H.
    Feed-forward part: gate, its activation, up, their product: 4 b F.
    """
    width, query, keys = shape.hidden_size, shape.query_width, shape.kv_width
    norms = 4 * b * width + b * (query + keys) * shape.has_qk_norm
    if longest <= MAX_DENSE_LENGTH:
        copy = b if b < FP32 else 0
        attention = padding * (b * (query + 2 * keys) + shape.num_heads * longest * (FP32 + copy))
    else:
        attention = padding * (2 * b * (query + keys) + FP32 * shape.num_heads)
    return norms + attention + b * query + 4 * b * shape.intermediate_size


def activation_bytes(shape: ModelShape, num_tokens: float, b: float, padding: float, longest: int) -> float:
    """All layers' activations of a packed microbatch of num_tokens: T (L a + 2 b D + 2 b H).

    a is `layer_activation_bytes_per_token`; the last norm's input and output, cosines and sines come once.
    """
    layer = layer_activation_bytes_per_token(shape, b, padding, longest)
    return num_tokens * (shape.num_layers * layer + 2 * b * shape.hidden_size + 2 * b * shape.head_size)


def recomputed_activation_bytes(shape: ModelShape, num_tokens: float, b: float, padding: float, longest: int) -> float:
    """With full recompute: every layer's input, and all activations of the one that is computed again: T (b L D + a).

    The last norm's input and output, cosines and sines come once, as above.
    """
    layer = layer_activation_bytes_per_token(shape, b, padding, longest)
    once = 2 * b * shape.hidden_size + 2 * b * shape.head_size
    return num_tokens * (shape.num_layers * b * shape.hidden_size + layer + once)


def logits_bytes(shape: ModelShape, num_rows: float, b: float) -> float:
    """Logits of one chunk of num_rows loss tokens, forward and backward: V (b + 12) per row.

    The model's logits, and three fp32 numbers per vocabulary entry: log-probabilities with two results of the
    entropy, or with two gradients.
    """
    return shape.vocab_size * (b + 3 * FP32) * num_rows


def layer_working_bytes(shape: ModelShape, num_tokens: float, b: float) -> float:
    """What the backward pass of one feed-forward part makes for a moment: T (4 b F + 8 D).

    Gradients of the product, gate, activation and up; and of the residual stream and a norm's input in fp32.
    """
    return num_tokens * (4 * b * shape.intermediate_size + 2 * FP32 * shape.hidden_size)
