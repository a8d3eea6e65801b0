"""Seconds of collectives on a cluster's links: latency by rounds, bytes by rate, inside and between nodes. Torch-free.

Ranks lie as `plait.cost.reshard.contiguous_places` numbers them: tp fastest, then cp, dp_shard, dp_replicate, pp.
Sources: Thakur et al. 2005 (rounds x latency + bytes / rate); NCCL src/graph/tuning.cc (base and hop latencies, hops
inside and between nodes; the better of ring and tree); stas00/ml-engineering network/README.md (a ring over q nodes
with g ranks in each drives g network cards).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from plait.cost import collectives
from plait.cost.arithmetic import Number, minimum, where
from plait.cost.cluster import Bound, Cluster
from plait.cost.traffic.term import RING, Algorithms, Term
from plait.parallel.degrees import Layout

ALGORITHMS: Algorithms = {**RING, "all_to_all": collectives.crossbar_all_to_all}
"""As large payloads travel, and all partners of an all-to-all at once."""

_HOPS_PER_NODE = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "broadcast": 1}
"""Rounds of a ring that pass from node to node, per node but one; other collectives go straight to their partner."""

_OPPOSITE: dict[Bound, Bound] = {"low": "high", "typical": "typical", "high": "low"}


def rate_bound(bound: Bound) -> Bound:
    """The bound of a rate that gives this bound of a time: the shortest time has the highest rate."""
    return _OPPOSITE[bound]


@dataclass(frozen=True, slots=True)
class LinkTime:
    """Seconds of one device's collectives. wire_s: bytes over rates; latency_s: rounds. hidden_s: both, of those that
    work of the same device can hide. sent_bytes, num_rounds: of all.
    """

    wire_s: Number = 0
    latency_s: Number = 0
    hidden_s: Number = 0
    sent_bytes: Number = 0
    num_rounds: Number = 0

    def __add__(self, other: "LinkTime") -> "LinkTime":
        return LinkTime(
            self.wire_s + other.wire_s,
            self.latency_s + other.latency_s,
            self.hidden_s + other.hidden_s,
            self.sent_bytes + other.sent_bytes,
            self.num_rounds + other.num_rounds,
        )

    def __mul__(self, times: Number) -> "LinkTime":
        return LinkTime(
            self.wire_s * times,
            self.latency_s * times,
            self.hidden_s * times,
            self.sent_bytes * times,
            self.num_rounds * times,
        )


def axis_stride(layout: Layout, term: Term) -> int:
    """How many devices lie between neighbours of the group that a term runs over."""
    if "expert" in term.name:
        return layout.ep
    inner = {
        "tp": 1,
        "ep": 1,
        "cp": layout.tp,
        "dp_shard": layout.tp * (1 if layout.dp_shard == 1 else layout.cp),
        "dp_replicate": layout.tp * layout.cp * layout.dp_shard,
        "pp": layout.world_size // layout.pp,
    }
    return inner[term.axis]


def link_time(terms: Iterable[Term], cluster: Cluster, layout: Layout, bound: Bound = "typical") -> LinkTime:
    """Of all terms, one after the other."""
    return sum((_term_time(term, cluster, layout, bound) for term in terms), LinkTime())


def _term_time(term: Term, cluster: Cluster, layout: Layout, bound: Bound) -> LinkTime:
    stride, n = axis_stride(layout, term), int(term.num_ranks)
    # Ranks of one group inside a node, or a rack that the fast link connects.
    inside = max(1, min(n, cluster.scale_up_size // stride))
    nodes = -(-n // inside)
    call = ALGORITHMS[term.collective](term.payload_bytes, n)
    wire, latency = _call(term, call, inside, nodes, cluster, bound)
    if term.collective == "all_reduce" and n > 2:
        tree = collectives.tree_all_reduce(term.payload_bytes, n)
        other_wire, other_latency = _call(term, tree, inside, nodes, cluster, bound)
        is_tree = other_wire + other_latency < wire + latency
        wire, latency = where(is_tree, other_wire, wire), where(is_tree, other_latency, latency)
        rounds = where(is_tree, tree.num_rounds, call.num_rounds)
        sent = where(is_tree, tree.sent_bytes, call.sent_bytes)
    else:
        rounds, sent = call.num_rounds, call.sent_bytes
    wire, latency, times = wire * term.num_calls, latency * term.num_calls, term.num_calls
    if term.is_overlappable:
        return LinkTime(0, 0, wire + latency, sent * times, rounds * times)
    return LinkTime(wire, latency, 0, sent * times, rounds * times)


def _call(
    term: Term, call: collectives.Transfer, inside: int, nodes: int, cluster: Cluster, bound: Bound
) -> tuple[Number, Number]:
    """(bytes over rates, rounds times latency) of one call."""
    near, far, rate = cluster.device.scale_up, cluster.device.network, rate_bound(bound)
    near_rate = near.curve.peak * near.curve.share.at(rate)
    far_rate = far.curve.peak * far.curve.share.at(rate)
    if nodes == 1:
        return call.sent_bytes / near_rate, near.base_s.at(bound) + call.num_rounds * near.hop_s.at(bound)
    if term.collective == "all_to_all":
        n = inside * nodes
        away = term.payload_bytes * (n - inside) / n
        wire = away / far_rate + (call.sent_bytes - away) / near_rate
    elif term.collective == "send":
        wire = call.sent_bytes / far_rate
    else:
        wire = call.sent_bytes / min(near_rate, inside * far_rate)
    hops_between = call.num_rounds
    if term.collective in _HOPS_PER_NODE:
        hops_between = minimum(call.num_rounds, _HOPS_PER_NODE[term.collective] * (nodes - 1))
    hops_inside = call.num_rounds - hops_between
    latency = far.base_s.at(bound) + hops_inside * near.hop_s.at(bound) + hops_between * far.hop_s.at(bound)
    return wire, latency
