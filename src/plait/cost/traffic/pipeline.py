"""Traffic of pipeline parallelism. Torch-free."""

from plait.cost.arithmetic import Number
from plait.cost.traffic.term import Term
from plait.parallel.degrees import V_SCHEDULES, PipelineSchedule
from plait.parallel.pipeline_orders import rank_of_stage, stages_of_rank


def pp_terms(
    activation_bytes: Number,
    *,
    schedule: PipelineSchedule,
    p: int,
    v: int,
    m: Number,
    rank: int,
    is_training: bool,
) -> tuple[Term, ...]:
    """`pp_send` and `pp_gradient_send` of one rank: m messages per stage whose neighbour is on another rank.

    1F1B: m each way, none at the ends. Interleaved: v m, since every stage hands over; the last stage of a round hands
    on to rank 0. V-shaped: 2 m at inner ranks, and where the V turns the neighbour is the rank itself.
    activation_bytes: what crosses a boundary, after cp (and sp) took their parts.
    """
    forward = backward = 0
    for stage in stages_of_rank(schedule, rank, p, v):
        forward += stage + 1 < p * v and rank_of_stage(schedule, stage + 1, p) != rank
        backward += stage > 0 and rank_of_stage(schedule, stage - 1, p) != rank
    return (
        Term("pp_send", "pp", "send", p, m * forward, activation_bytes, True),
        Term("pp_gradient_send", "pp", "send", p, m * backward if is_training else 0, activation_bytes, True),
    )


def pp_tied_embedding_terms(
    gradient_bytes: Number, *, schedule: PipelineSchedule, p: int, rank: int
) -> tuple[Term, ...]:
    """`pp_tied_send`: the gradient of a shared table, which the first rank (embedding) and the last (head) exchange.

    Each sends its own whole and adds the other's: the bytes of an all-reduce between two, in one round. The V-shaped
    schedules hold both on rank 0.
    """
    takes_part = p > 1 and rank in (0, p - 1) and schedule not in V_SCHEDULES
    return (Term("pp_tied_send", "pp", "send", p, int(takes_part), gradient_bytes),)


def pp_token_terms(num_sequences: Number, *, p: int, rank: int) -> tuple[Term, ...]:
    """`pp_token_send`: sampled ids (8 bytes) from the last rank back to the first, once per decode step."""
    return (Term("pp_token_send", "pp", "send", p, int(p > 1 and rank == p - 1), 8 * num_sequences),)
