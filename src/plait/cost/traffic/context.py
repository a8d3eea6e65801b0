"""Traffic of context parallelism: ring attention and Ulysses. Torch-free, plain arithmetic.

c ranks; num_tokens: n of one microbatch before it is cut, so n/c on a rank; b bytes per number. Head counts are those
of one rank's tp part. Sources: ring 2310.01889, Ulysses 2309.14509; counts in tests/cost.
"""

from plait.cost import arithmetic as am
from plait.cost.arithmetic import Number
from plait.cost.traffic.term import Term


def ring_terms(
    num_tokens: Number,
    c: Number,
    *,
    num_kv_heads: Number,
    head_size: Number,
    bytes_per_number: Number,
    num_layers: Number,
    m: Number,
    is_training: bool,
    num_recomputed: Number = 0,
    bytes_per_gradient: Number | None = None,
) -> tuple[Term, ...]:
    """`cp_ring_send`: keys and values of n/c tokens, 2 M H b n/c bytes, to the next rank, c - 1 times per forward pass.

    Backward sends keys and values round again (c - 1), and with them `cp_ring_gradient_send`: their gradients, which
    start where the first block is done and must come home, c times. Published accounts write c - 1 for both.
    bytes_per_gradient: 4 where gradients are added up in fp32, as `plait.parallel.ring` does. Keys and values travel in
    one message.
    """
    block = 2 * num_tokens / c * num_kv_heads * head_size
    calls = num_layers * m
    passes = 1 + (1 + num_recomputed if is_training else 0)
    gradient = bytes_per_number if bytes_per_gradient is None else bytes_per_gradient
    home = am.where(c > 1, c, 0)
    return (
        Term("cp_ring_send", "cp", "send", c, calls * passes * (c - 1), block * bytes_per_number, True),
        Term("cp_ring_gradient_send", "cp", "send", c, calls * home if is_training else 0, block * gradient, True),
    )


def ulysses_terms(
    num_tokens: Number,
    c: Number,
    *,
    num_heads: Number,
    num_kv_heads: Number,
    head_size: Number,
    bytes_per_number: Number,
    num_layers: Number,
    m: Number,
    is_training: bool,
    num_recomputed: Number = 0,
) -> tuple[Term, ...]:
    """`cp_query_all_to_all` (queries in, output back: 2 per layer) and `cp_kv_all_to_all` (keys, values: 2 per layer).

    From sequence parts with all heads to all of the sequence with some heads. Fewer key/value heads than ranks are
    copied up to c of them first. Backward runs each once more, the other way.
    """
    tokens = num_tokens / c
    query = tokens * num_heads * head_size * bytes_per_number
    keys = tokens * am.maximum(num_kv_heads, c) * head_size * bytes_per_number
    calls = num_layers * m * (1 + (1 + num_recomputed if is_training else 0)) * 2
    return (
        Term("cp_query_all_to_all", "cp", "all_to_all", c, calls, query),
        Term("cp_kv_all_to_all", "cp", "all_to_all", c, calls, keys),
    )
