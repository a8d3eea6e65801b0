"""What no schedule can beat, and what a greedy one keeps to. Torch-free.

Brent 1974 ("The parallel evaluation of general arithmetic expressions"); Graham 1969 for greedy schedules.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from plait.cost.arithmetic import Number, maximum
from plait.cost.composition.flow import largest

DEPENDENT_OP_S = 4 / 1.5e9
"""Latency of one arithmetic operation that waits for the one before it: 4 cycles (Jia et al., arXiv 1804.06826, Volta's
core instructions; later devices have not been faster) at 1.5 GHz. Launching a kernel is another thing, a thousand times
as long, and counted as latency in a stage's time."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """No schedule takes less than `least`; no greedy one more than `most`."""

    least: Number
    most: Number


def brent_op(work_op: Number, depth_op: Number, num_processors: Number) -> Bounds:
    """Steps of one operation on p processors: max(W / p, D) <= T <= W / p + D."""
    share = work_op / num_processors
    return Bounds(maximum(share, depth_op), share + depth_op)


def brent_s(work_op: Number, depth_op: Number, op_per_s: Number, dependent_op_s: Number = DEPENDENT_OP_S) -> Bounds:
    """In seconds: W / (sum of rates) and D x the latency of one dependent operation.

    The same as `brent_op` with the p = rate x latency operations that a machine has in flight, times the latency.
    """
    share, chain = work_op / op_per_s, depth_op * dependent_op_s
    return Bounds(maximum(share, chain), share + chain)


def average_parallelism(work_op: Number, depth_op: Number) -> Number:
    """W / D: more processors than that do not help."""
    return work_op / depth_op


@dataclass(frozen=True, slots=True)
class PoolRates:
    """num_devices, and the peak rates of each."""

    num_devices: int
    flop_per_s: Number
    memory_bytes_per_s: Number
    network_bytes_per_s: Number


@dataclass(frozen=True, slots=True)
class Demand:
    """What one stage asks of its pool: FLOP of all devices, bytes of each."""

    flop: Number
    hbm_bytes: Number
    sent_bytes: Number


def pool_least_s(demands: Iterable[Demand], rates: PoolRates) -> Number:
    """A pool's busiest resource: max(FLOP / sum of rates, memory traffic / bandwidth, bytes sent / bandwidth)."""
    demands = tuple(demands)
    return largest(
        (
            sum((d.flop for d in demands), start=0) / (rates.num_devices * rates.flop_per_s),
            sum((d.hbm_bytes for d in demands), start=0) / rates.memory_bytes_per_s,
            sum((d.sent_bytes for d in demands), start=0) / rates.network_bytes_per_s,
        )
    )


def steady_step_s(busy_s: Iterable[Number], chain_s: Number, max_staleness: Number) -> Number:
    """Seconds per step of an endless run: max(busiest pool, chain / (max_staleness + 1)).

    chain_s: from one generation through the update to the publication of its weights. Staleness lets max_staleness + 1
    steps be under way; the recurrence of arXiv 2608.27046, section 4.5 (which leaves the publication out).
    """
    return maximum(largest(busy_s), chain_s / (max_staleness + 1))
