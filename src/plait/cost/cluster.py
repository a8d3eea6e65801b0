"""Devices, their links and how many there are; rates as curves over size, with the lowest and highest that is seen.

Torch-free. Values come from `plait.specs/clusters` or from a user's file: `plait.cost.cluster_catalogue`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from plait.cost.arithmetic import Number
from plait.errors import ConfigError, Violation

Bound = Literal["low", "typical", "high"]
Precision = Literal["bf16", "fp8", "fp32"]


@dataclass(frozen=True, slots=True)
class Interval:
    """The lowest, typical and highest value of something that is uncertain."""

    low: float
    typical: float
    high: float

    def at(self, bound: Bound = "typical") -> float:
        """One of the three."""
        return {"low": self.low, "typical": self.typical, "high": self.high}[bound]


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate that grows with size: peak x share x size / (size + half).

    half: the size at which half of it is reached, so size / rate is a fixed latency plus size over the full rate.
    Source of the form: bus bandwidth of NCCL over message size (stas00/ml-engineering network/README.md).
    """

    peak: float
    share: Interval
    half: float

    def rate(self, size: Number, bound: Bound = "typical") -> Number:
        """Reached per second with this size."""
        return self.peak * self.share.at(bound) * size / (size + self.half)

    def seconds(self, size: Number, bound: Bound = "typical") -> Number:
        """Time of one piece of this size, its latency included: (size + half) / (peak x share)."""
        return (size + self.half) / (self.peak * self.share.at(bound))


@dataclass(frozen=True, slots=True)
class Link:
    """Between devices, per device and direction. base_s: latency of a collective; hop_s: of each of its steps."""

    curve: Curve
    base_s: Interval
    hop_s: Interval


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or the processor of this machine).

    flop_per_s: dense peak by precision. memory_bytes_per_s: peak. scale_up: the link inside a node or rack; network:
    between nodes. scale_up_size: devices that scale_up connects, 0 for those of a node. op_latency_s: of one dependent
    operator. host_bytes_per_s: to the host's memory. price_per_hour, cpu_cores: per device, None where unknown.
    sources: field -> where its value is from.
    """

    name: str
    flop_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    matmul_share: Interval
    memory_share: Interval
    op_latency_s: Interval
    scale_up: Link
    network: Link
    host_bytes_per_s: float
    scale_up_size: int = 0
    price_per_hour: float | None = None
    cpu_cores: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def peak_flop_per_s(self, precision: Precision = "bf16") -> float:
        """Raises ConfigError where the device has no such unit."""
        if precision not in self.flop_per_s:
            rule = f"{self.name} has no rate for {precision}"
            raise ConfigError([Violation("device.flop_per_s", rule, f"It has: {', '.join(self.flop_per_s)}")])
        return self.flop_per_s[precision]

    def matmul(self, precision: Precision = "bf16") -> Curve:
        """Matrix products by their floating-point operations.

        half = typical rate x latency of an operator: a small product takes as long as launching it, so the launch is
        in the curve and must not be added again.
        """
        peak = self.peak_flop_per_s(precision)
        return Curve(peak, self.matmul_share, peak * self.matmul_share.typical * self.op_latency_s.typical)

    @property
    def memory(self) -> Curve:
        """Traffic with device memory by its bytes; the launch is in the curve, as in `matmul`."""
        half = self.memory_bytes_per_s * self.memory_share.typical * self.op_latency_s.typical
        return Curve(self.memory_bytes_per_s, self.memory_share, half)

    def crossover_batch(self, b: float = 2, precision: Precision = "bf16") -> float:
        """Sequences of a decode step at which products take as long as reading weights of b bytes: F b / (2 BW)."""
        return self.peak_flop_per_s(precision) * b / (2 * self.memory_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Cluster:
    """num_nodes of devices_per_node devices of one kind."""

    name: str
    device: Device
    num_nodes: int
    devices_per_node: int

    @property
    def num_devices(self) -> int:
        """Of all nodes."""
        return self.num_nodes * self.devices_per_node

    @property
    def scale_up_size(self) -> int:
        """Neighbouring devices that the fast link connects: those of a node, or of a rack where it reaches further."""
        return min(self.num_devices, max(self.devices_per_node, self.device.scale_up_size))

    def link(self, span: int) -> Link:
        """The slowest link among `span` neighbouring devices."""
        return self.device.scale_up if span <= self.scale_up_size else self.device.network

    @property
    def num_cpu_cores(self) -> float | None:
        """Of all nodes, for verifiers; None where unknown."""
        return None if self.device.cpu_cores is None else self.device.cpu_cores * self.num_devices

    @property
    def price_per_hour(self) -> float | None:
        """Of all devices; None where unknown."""
        return None if self.device.price_per_hour is None else self.device.price_per_hour * self.num_devices


def roofline_s(
    device: Device,
    flop: Number,
    hbm_bytes: Number,
    *,
    num_operators: Number = 1,
    precision: Precision = "bf16",
    bound: Bound = "typical",
) -> tuple[Number, Number]:
    """(seconds of products, seconds of memory traffic) of num_operators equal operators; a lower bound of both
    together is the larger, an upper one their sum.
    """
    products = num_operators * device.matmul(precision).seconds(flop / num_operators, bound)
    traffic = num_operators * device.memory.seconds(hbm_bytes / num_operators, bound)
    return products, traffic
