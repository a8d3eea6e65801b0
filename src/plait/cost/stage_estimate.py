"""What one stage costs on its pool: the record stage estimates give and step estimates compose. Torch-free."""

from collections.abc import Mapping
from dataclasses import dataclass

from plait.cost.arithmetic import Number


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage on one pool under one layout; every number may be a float, a numpy array or a sympy expression.

    work_op W: operations over all devices. depth_op D: the longest chain of dependent operations. num_rounds R:
    communication rounds on the critical path, kept apart from depth. flop: over all devices. sent_bytes, hbm_bytes: per
    device. terms_s: seconds by cause (compute, memory, network, latency, dependency), which need not add up to time_s:
    some overlap. low_s, high_s: from the uncertainty of the efficiency curves. bottleneck: the cause that decides (for
    floats): compute | memory bandwidth | network | latency | dependency. memory: peak bytes per device by term
    (parameters, gradients, optimizer, activations, logits, kv_cache, buffers). granularity: the smallest piece after
    which a consumer may start (from the StepGraph). num_pieces: of that granularity in the stage, for streaming.
    """

    name: str
    work_op: Number
    depth_op: Number
    num_rounds: Number
    flop: Number
    sent_bytes: Number
    hbm_bytes: Number
    terms_s: Mapping[str, Number]
    time_s: Number
    low_s: Number
    high_s: Number
    bottleneck: str
    num_devices: int
    memory: Mapping[str, Number]
    granularity: str
    num_pieces: Number
