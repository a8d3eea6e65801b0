"""Traffic of tensor parallelism, with and without sequence-parallel activations. Torch-free, plain arithmetic.

t ranks; activation_bytes: n D b, the hidden states of one microbatch of n tokens. A *region* is what lies between two
places where activations are whole: attention, feed-forward. Sources: 2104.04473 and 2205.05198; counts in tests/cost.
"""

from plait.cost.arithmetic import Number
from plait.cost.traffic.term import Term


def tp_layer_terms(
    activation_bytes: Number,
    t: Number,
    *,
    num_layers: Number,
    m: Number,
    is_training: bool,
    num_regions: Number = 2,
    input_all_reduces: Number | None = None,
    num_recomputed: Number = 0,
) -> tuple[Term, ...]:
    """`tp_all_reduce`: after each region in forward, and of each region's input gradient in backward; 2 + 2 per layer.

    input_all_reduces: per layer, in backward. One per region where the input's layout is changed once per block; a plan
    that changes it at each column-split matrix (transformers' own: q, k, v, gate, up) issues 5.
    num_recomputed: per layer, under full recompute. 2 are published (2205.05198); torch stops a recomputation when it
    has what backward needs, which is before the second, so 1.
    """
    backward = num_regions if input_all_reduces is None else input_all_reduces
    per_layer = num_regions + (backward + num_recomputed if is_training else 0)
    return (Term("tp_all_reduce", "tp", "all_reduce", t, num_layers * m * per_layer, activation_bytes),)


def sp_layer_terms(
    activation_bytes: Number,
    t: Number,
    *,
    num_layers: Number,
    m: Number,
    is_training: bool,
    num_regions: Number = 2,
    num_regathered: Number = 0,
    is_recomputed: bool = False,
    recomputes_last: bool = False,
) -> tuple[Term, ...]:
    """`sp_all_gather` before each region and `sp_reduce_scatter` after it, and the reverse in backward: 2 + 2, 2 + 2.

    The bytes of the all-reduces they replace. num_regathered: inputs gathered again in backward per layer, so that only
    their shards are kept (2 in Megatron; 0 in DTensor, which keeps the gathered ones). is_recomputed: full recompute,
    which gathers for both regions and scatters after the first only (after both where recomputes_last).
    """
    gathers = num_regions
    scatters = num_regions
    if is_training:
        gathers += num_regions + num_regathered
        scatters += num_regions
        if is_recomputed:
            gathers += num_regions
            scatters += num_regions - (0 if recomputes_last else 1)
    calls = num_layers * m
    return (
        Term("sp_all_gather", "tp", "all_gather", t, calls * gathers, activation_bytes),
        Term("sp_reduce_scatter", "tp", "reduce_scatter", t, calls * scatters, activation_bytes),
    )


def replicated_gradient_terms(
    parameter_bytes_per_tensor: Number, num_tensors: Number, t: Number, *, num_reduces: Number = 1
) -> tuple[Term, ...]:
    """`tp_replicated_all_reduce`: gradients of whole parameters that each rank used on a part only.

    The layers' norms under sp (each rank has a part of the sequence), norms of queries and keys under any tp (each has
    a part of the heads). Once per step, when the optimiser reads them (DTensor keeps sums partial until then); under
    FSDP2 before each of its reduce-scatters.
    """
    return (
        Term(
            "tp_replicated_all_reduce",
            "tp",
            "all_reduce",
            t,
            num_tensors * num_reduces,
            parameter_bytes_per_tensor,
            True,
        ),
    )


def tp_embedding_terms(
    activation_bytes: Number, t: Number, *, m: Number, is_training: bool, sp: bool
) -> tuple[Term, ...]:
    """Vocabulary-split embedding: `tp_embedding_all_reduce`; under sp a reduce-scatter, and its all-gather in backward.

    Backward of the all-reduce needs nothing: each rank takes the rows that it has.
    """
    if not sp:
        return (Term("tp_embedding_all_reduce", "tp", "all_reduce", t, m, activation_bytes),)
    return (
        Term("tp_embedding_reduce_scatter", "tp", "reduce_scatter", t, m, activation_bytes),
        Term("tp_embedding_all_gather", "tp", "all_gather", t, m if is_training else 0, activation_bytes),
    )


def tp_head_terms(
    activation_bytes: Number, num_tokens: Number, t: Number, *, m: Number, is_training: bool, sp: bool
) -> tuple[Term, ...]:
    """Vocabulary-split head and log-probabilities of num_tokens positions.

    `tp_loss_all_reduce`: the largest logit, the sum of exponentials and the target's logit, fp32: 3 x 4 n bytes; none
    in backward. `tp_head_all_reduce`: the gradient of the head's input; under sp an all-gather before, a reduce-scatter
    after.
    """
    loss = Term("tp_loss_all_reduce", "tp", "all_reduce", t, 3 * m, 4 * num_tokens)
    trained = m if is_training else 0
    if not sp:
        return (loss, Term("tp_head_all_reduce", "tp", "all_reduce", t, trained, activation_bytes))
    return (
        loss,
        Term("tp_head_all_gather", "tp", "all_gather", t, m, activation_bytes),
        Term("tp_head_reduce_scatter", "tp", "reduce_scatter", t, trained, activation_bytes),
    )


def tp_logits_terms(num_sequences: Number, vocab_size: Number, bytes_per_logit: Number, t: Number) -> tuple[Term, ...]:
    """`tp_logits_all_gather`: the next token's logits of each sequence, to sample from: a V b bytes."""
    payload = num_sequences * vocab_size * bytes_per_logit
    return (Term("tp_logits_all_gather", "tp", "all_gather", t, 1, payload),)
