"""Traffic of data parallelism: DDP, ZeRO 1 to 3, HSDP. Torch-free, plain arithmetic.

m microbatches per optimiser step; r replicas; z ranks that share one copy. A *unit* is what is gathered at once: a
layer, or the root with all that is in no layer. Sources: ZeRO 1910.02054; what FSDP2 issues, counted in tests/cost.
"""

from plait.cost.arithmetic import Number
from plait.cost.traffic.term import Term


def ddp_terms(gradient_bytes: Number, r: Number, num_buckets: Number = 1) -> tuple[Term, ...]:
    """`ddp_all_reduce`: all gradients once per step, 2 (r-1)/r of them sent; in buckets, as they become ready.

    With microbatches only the last one synchronises (`no_sync`); DDP left alone does it after each: num_buckets x m.
    """
    return (Term("ddp_all_reduce", "dp_replicate", "all_reduce", r, num_buckets, gradient_bytes / num_buckets, True),)


def gathers_per_step(zero: int, m: Number, *, is_root: bool, is_kept_gathered: bool) -> Number:
    """All-gathers of one unit in a training step.

    ZeRO-3: each microbatch gathers for its forward and again for its backward, 2 m; the root stays gathered in between,
    m (FSDP2's default). Kept gathered until the step ends (as under a pipeline): 1, as in ZeRO-1 and 2.
    """
    assert zero in (1, 2, 3)
    if zero < 3 or is_kept_gathered:
        return 1
    return m if is_root else 2 * m


def scatters_per_step(zero: int, m: Number, *, is_once: bool = False) -> Number:
    """Reduce-scatters of one unit in a training step: m, since gradients are kept sharded between microbatches.

    Once in ZeRO-1, which keeps whole gradients until the last microbatch; once also for 2 and 3 where is_once says that
    whoever runs it adds up whole gradients first (torch's pipeline schedules do): that holds ZeRO-1's memory.
    """
    return 1 if zero == 1 or is_once else m


def fsdp_terms(
    parameter_bytes: Number,
    gradient_bytes: Number,
    z: Number,
    *,
    num_units: Number,
    num_gathers: Number,
    num_scatters: Number,
    prefix: str = "fsdp",
    axis: str = "dp_shard",
) -> tuple[Term, ...]:
    """`fsdp_all_gather` and `fsdp_reduce_scatter` of num_units equal units.

    parameter_bytes, gradient_bytes: of one unit, padding included, in the dtypes that travel. Sent per device:
    (z-1)/z of each per call; ZeRO-3 with one microbatch thus moves 3 Psi, ZeRO-1 and 2 move 2 Psi (1910.02054).
    """
    return (
        Term(f"{prefix}_all_gather", axis, "all_gather", z, num_units * num_gathers, parameter_bytes, True),
        Term(f"{prefix}_reduce_scatter", axis, "reduce_scatter", z, num_units * num_scatters, gradient_bytes, True),
    )


def hsdp_terms(
    gradient_bytes: Number, z: Number, r: Number, *, num_units: Number, num_reduces: Number = 1, prefix: str = "hsdp"
) -> tuple[Term, ...]:
    """`hsdp_all_reduce`: each rank's shard of the gradients over the r replicas: 2 (r-1)/r x gradient_bytes/z.

    num_reduces: once per step where only the last microbatch asks for it (`set_requires_all_reduce`), else with each
    reduce-scatter.
    """
    calls = num_units * num_reduces
    return (Term(f"{prefix}_all_reduce", "dp_replicate", "all_reduce", r, calls, gradient_bytes / z, True),)


def gradient_norm_terms(axis: str, num_ranks: Number, num_numbers: Number = 1) -> tuple[Term, ...]:
    """`grad_norm_all_reduce`: fp32 numbers over the ranks of an axis that splits gradients, once per step.

    One number would do; DTensor's clip_grad_norm_ adds up the norms of all tensors of a rank, one number each.
    """
    return (Term("grad_norm_all_reduce", axis, "all_reduce", num_ranks, 1, 4 * num_numbers),)
