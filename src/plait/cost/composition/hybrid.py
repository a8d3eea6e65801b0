"""One pool, another layout per stage: what it costs to reshard the weights in between, by exact overlap. Torch-free."""

from typing import Literal

import numpy as np

from plait.cost.arithmetic import Number
from plait.cost.reshard import Reshard, reshard_time_s
from plait.cost.stage_estimate import StageEstimate


def reshard_estimate(
    moved: Reshard,
    *,
    in_bytes_per_s: tuple[Number, Number, Number],
    out_bytes_per_s: tuple[Number, Number, Number],
    memory_bytes_per_s: Number,
    num_buckets: int = 1,
    alpha_s: Number = 0.0,
    name: str = "sync_weights",
) -> StageEstimate:
    """The stage that moves weights as `plait.cost.reshard.reshard` counts them: no arithmetic, one round per bucket.

    in_bytes_per_s, out_bytes_per_s: of one device (lowest, typical, highest). sent_bytes and hbm_bytes are those of the
    busiest device; received weights are read by the sender and written by the receiver. memory: what exists beside the
    layout that a device held before. Measured systems lie well above this time: packing and stopping come on top.
    """
    low, typical, high = (
        reshard_time_s(moved, in_bytes_per_s=i, out_bytes_per_s=o, num_buckets=num_buckets, alpha_s=alpha_s)
        for i, o in zip(in_bytes_per_s, out_bytes_per_s, strict=True)
    )
    latency = num_buckets * alpha_s
    traffic = float(np.max(moved.sent_bytes + moved.received_bytes))
    network = typical - latency
    return StageEstimate(
        name=name,
        work_op=0,
        depth_op=0,
        num_rounds=num_buckets,
        flop=0,
        sent_bytes=float(moved.sent_bytes.max()),
        hbm_bytes=traffic,
        terms_s={
            "compute": 0.0,
            "memory": traffic / memory_bytes_per_s,
            "network": network,
            "latency": latency,
            "dependency": 0.0,
        },
        time_s=typical,
        low_s=high,
        high_s=low,
        bottleneck=_slower(network, latency),
        num_devices=len(moved.sent_bytes),
        memory={"buffers": float(moved.peak_extra_bytes.max())},
        granularity="step",
        num_pieces=1,
    )


def _slower(network: Number, latency: Number) -> Literal["network", "latency"]:
    return "network" if network >= latency else "latency"
