"""Traffic of expert parallelism. Torch-free, plain arithmetic.

ep ranks hold E/ep whole experts each; k experts per token, chosen evenly. Source: 2412.19437 (DeepSeek-V3); counts in
tests/cost.
"""

from plait.cost import arithmetic as am
from plait.cost.arithmetic import Number
from plait.cost.traffic.term import Term


def ep_terms(
    num_tokens: Number,
    ep: Number,
    *,
    num_experts: Number,
    num_experts_per_token: Number,
    hidden_size: Number,
    bytes_per_number: Number,
    num_layers: Number,
    m: Number,
    is_training: bool,
    num_recomputed: Number = 0,
    dispatch_bytes_per_number: Number | None = None,
) -> tuple[Term, ...]:
    """`ep_dispatch` and `ep_combine`: n k D b bytes each, of which 1/ep stays; once per forward, once per backward.

    num_tokens: n on this rank. `ep_counts`: how many tokens go to each expert, E 8-byte numbers before each forward
    dispatch; backward knows them. num_recomputed: forwards run again in backward. torch stops a recomputation after the
    last tensor it needs, which the combine's output is not (the weighted sum needs it where weights are applied after):
    count it as whoever runs it does. dispatch_bytes_per_number: 1 where tokens are dispatched as FP8.
    """
    rows = num_tokens * num_experts_per_token * hidden_size
    calls = num_layers * m
    passes = 1 + (1 + num_recomputed if is_training else 0)
    forwards = 1 + (num_recomputed if is_training else 0)
    dispatched = bytes_per_number if dispatch_bytes_per_number is None else dispatch_bytes_per_number
    return (
        Term("ep_counts", "ep", "all_to_all", ep, calls * forwards, 8 * num_experts),
        Term("ep_dispatch", "ep", "all_to_all", ep, calls * passes, rows * dispatched),
        Term("ep_combine", "ep", "all_to_all", ep, calls * passes, rows * bytes_per_number),
    )


def ep_tp_terms(
    activation_bytes: Number,
    t: Number,
    *,
    num_layers: Number,
    m: Number,
    is_training: bool,
) -> tuple[Term, ...]:
    """`ep_tp_all_gather`: experts inside a tp group without sp. Each tp rank routes 1/t of the tokens, so their outputs
    are gathered in forward and their input gradients in backward. Under sp the parts stay parts: nothing.
    """
    calls = num_layers * m * (2 if is_training else 1)
    return (Term("ep_tp_all_gather", "tp", "all_gather", t, calls, activation_bytes),)


def busiest_share(num_experts_per_token: Number, max_nodes: Number) -> Number:
    """Copies of a token that travel between nodes where routing is limited to max_nodes of them: min(k, max_nodes).

    DeepSeek-V3 has 4; the rest travels inside a node.
    """
    return am.minimum(num_experts_per_token, max_nodes)
