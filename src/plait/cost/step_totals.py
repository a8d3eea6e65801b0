"""A synchronous step from its stages' estimates: stages of one pool in turns, one after the other. Torch-free.

Work adds up; depth and rounds are those of the longest chain of the StepGraph. Bounds: Brent 1974 in operations and in
seconds, and what keeps the busiest resource busy at its peak rate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plait.cost.arithmetic import Number, maximum
from plait.cost.cluster import Cluster, Precision
from plait.cost.stage_estimate import StageEstimate

DEPENDENT_OP_S = 4 / 1.5e9
"""Latency of one operation that waits for the one before: 4 cycles (arXiv 1804.06826, Volta) at 1.5 GHz."""


@dataclass(frozen=True, slots=True)
class StepTotals:
    """brent_op: (least, most) rounds of one operation on all the operations that the devices have in flight (rate x
    latency of one); brent_s: the same in seconds, W / (sum of rates) and D x latency. least_s: of the busiest resource.
    parallelism: W / D.
    """

    work_op: Number
    depth_op: Number
    num_rounds: Number
    time_s: Number
    low_s: Number
    high_s: Number
    brent_op: tuple[Number, Number]
    brent_s: tuple[Number, Number]
    least_s: Number

    @property
    def parallelism(self) -> Number:
        """W / D: more processors than that do not help."""
        return self.work_op / self.depth_op


def stage_least_s(estimate: StageEstimate, cluster: Cluster, precision: Precision) -> Number:
    """No schedule of this stage is faster: FLOP over all peak rates, or a device's traffic over its peak bandwidths."""
    device, n = cluster.device, cluster.num_devices
    link = device.scale_up if n <= cluster.scale_up_size else device.network
    least = estimate.flop / (n * device.peak_flop_per_s(precision))
    least = maximum(least, estimate.hbm_bytes / device.memory_bytes_per_s)
    # Bytes may also pass through the faster link inside a node, so that one bounds them.
    fastest = max(link.curve.peak, device.scale_up.curve.peak)
    return maximum(least, estimate.sent_bytes / fastest)


def step_totals(
    estimates: Iterable[StageEstimate],
    predecessors: Mapping[str, Iterable[str]],
    pools: Mapping[str, Cluster],
    pool_of: Mapping[str, str],
    precision: Precision,
) -> StepTotals:
    """estimates: in an order that respects predecessors (stage -> stages it waits for)."""
    estimates = tuple(estimates)
    depth, rounds = _chain(estimates, predecessors, "depth_op"), _chain(estimates, predecessors, "num_rounds")
    work = sum((estimate.work_op for estimate in estimates), start=0)
    rate = sum(pool.num_devices * pool.device.peak_flop_per_s(precision) for pool in pools.values())
    share, chain = work / rate, depth * DEPENDENT_OP_S
    busy = dict.fromkeys(pools, 0.0)
    for estimate in estimates:
        pool = pool_of[estimate.name]
        busy[pool] += stage_least_s(estimate, pools[pool], precision)
    least: Number = chain
    for seconds in busy.values():
        least = maximum(least, seconds)
    in_flight = rate * DEPENDENT_OP_S
    return StepTotals(
        work_op=work,
        depth_op=depth,
        num_rounds=rounds,
        time_s=sum((estimate.time_s for estimate in estimates), start=0),
        low_s=sum((estimate.low_s for estimate in estimates), start=0),
        high_s=sum((estimate.high_s for estimate in estimates), start=0),
        brent_op=(maximum(work / in_flight, depth), work / in_flight + depth),
        brent_s=(maximum(share, chain), share + chain),
        least_s=least,
    )


def _chain(estimates: tuple[StageEstimate, ...], predecessors: Mapping[str, Iterable[str]], what: str) -> Number:
    """The longest path through the stages."""
    ends: dict[str, Number] = {}
    longest: Number = 0
    for estimate in estimates:
        start: Number = 0
        for name in predecessors[estimate.name]:
            start = maximum(start, ends[name])
        ends[estimate.name] = start + getattr(estimate, what)
        longest = maximum(longest, ends[estimate.name])
    return longest
