"""Seconds of a rank's operators by cause, and the shape of a stage estimate's parts. Torch-free."""

from collections.abc import Mapping
from typing import NamedTuple

from plait.cost.arithmetic import Number, maximum
from plait.cost.cluster import Bound, Device, Precision
from plait.cost.link_times import rate_bound
from plait.cost.operators import Cost

BOUNDS: tuple[Bound, ...] = ("low", "typical", "high")
CAUSES = {
    "compute": "compute",
    "memory": "memory bandwidth",
    "network": "network",
    "latency": "latency",
    "dependency": "dependency",
}
"""Cause of seconds -> what it is called as a bottleneck."""

COLLECTIVE_BUFFER_BYTES = 0.4e9
"""Held by the collectives' library on a device that has partners. Source: ai-dynamo/aiconfigurator, 0.34 to 0.39 GB."""


class Pieces(NamedTuple):
    """The smallest piece after which a consumer may start, and how many a stage has."""

    granularity: str
    count: Number


def rates(device: Device, precision: Precision, bound: Bound) -> tuple[float, float]:
    """(operations in products per second, bytes of memory per second) that are reached."""
    way = rate_bound(bound)
    flop_per_s = device.peak_flop_per_s(precision) * device.matmul_share.at(way)
    return flop_per_s, device.memory_bytes_per_s * device.memory_share.at(way)


def rank_seconds(cost: Cost, device: Device, precision: Precision, bound: Bound) -> dict[str, Number]:
    """Seconds by cause of operators in a row: a product overlaps its own traffic with memory, nothing else.

    Under the high bound it does not either.
    """
    flop_per_s, bytes_per_s = rates(device, precision, bound)
    compute, traffic = cost.flop / flop_per_s, cost.product_bytes / bytes_per_s
    beyond = traffic if bound == "high" else maximum(traffic - compute, 0)
    other = (cost.hbm_bytes - cost.product_bytes) / bytes_per_s
    launches = cost.num_operators * device.op_latency_s.at(bound)
    return {"compute": compute, "memory": beyond + other, "latency": launches}


def bottleneck_of(terms_s: Mapping[str, Number]) -> str:
    """The cause that adds most seconds (numbers only)."""
    return CAUSES[max(CAUSES, key=lambda cause: terms_s.get(cause, 0))]


_TERM_OF = {
    "gathered": "buffers",
    "recomputed layer": "activations",
    "working": "activations",
}


def memory_terms(counted: Mapping[str, Number], num_devices: int) -> dict[str, Number]:
    """Bytes per device by term, of the rank that needs most; `plait.cost.residence` says what lies beside them.

    buffers: units that are gathered for a moment, and the collectives' own.
    """
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "kv_cache", "buffers")
    found: dict[str, Number] = dict.fromkeys(names, 0)
    for name, num_bytes in counted.items():
        found[_TERM_OF.get(name, name)] += num_bytes
    found["buffers"] += COLLECTIVE_BUFFER_BYTES if num_devices > 1 else 0
    return found
