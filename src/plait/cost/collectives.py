"""What one collective costs a rank: bytes, messages, rounds. Torch-free, plain arithmetic.

n ranks; M bytes is the whole tensor (for reduce-scatter and all-gather the unsharded one, for all-to-all what one rank
holds before it). A *message* is one send of one rank; a *round* is a step that cannot start before the one before it
has arrived, so its latency is paid in full. Every formula gives 0 for n = 1. Sources: Thakur, Rabenseifner, Gropp 2005
("Optimization of collective communication operations in MPICH"); NCCL's src/graph/tuning.cc and nccl-tests
doc/PERFORMANCE.md. The tests run each algorithm on numbers, check its result and count what it sends.
"""

from collections.abc import Callable
from dataclasses import dataclass

from plait.cost import arithmetic as am
from plait.cost.arithmetic import Number

Bandwidth = Callable[[Number], Number]
"""Bytes of a payload -> bytes per second that a rank sends."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one rank does in a collective: bytes and messages sent, rounds waited for, bytes it adds up."""

    sent_bytes: Number = 0
    num_messages: Number = 0
    num_rounds: Number = 0
    reduced_bytes: Number = 0

    def __add__(self, other: "Transfer") -> "Transfer":
        return Transfer(
            self.sent_bytes + other.sent_bytes,
            self.num_messages + other.num_messages,
            self.num_rounds + other.num_rounds,
            self.reduced_bytes + other.reduced_bytes,
        )

    def __mul__(self, times: Number) -> "Transfer":
        """The transfer of that many collectives, one after another."""
        return Transfer(
            self.sent_bytes * times,
            self.num_messages * times,
            self.num_rounds * times,
            self.reduced_bytes * times,
        )


def ring_reduce_scatter(M: Number, n: Number) -> Transfer:
    """(n-1)/n M bytes in n-1 rounds; each rank adds up what it receives."""
    sent = (n - 1) / n * M
    return Transfer(sent, n - 1, n - 1, sent)


def ring_all_gather(M: Number, n: Number) -> Transfer:
    """(n-1)/n M bytes in n-1 rounds."""
    return Transfer((n - 1) / n * M, n - 1, n - 1)


def recursive_all_gather(M: Number, n: Number) -> Transfer:
    """Recursive doubling (and PAT): (n-1)/n M bytes in log2 n rounds, n a power of two."""
    return Transfer((n - 1) / n * M, am.log2(n), am.log2(n))


def ring_all_reduce(M: Number, n: Number) -> Transfer:
    """Reduce-scatter, then all-gather: 2 (n-1)/n M bytes in 2 (n-1) rounds."""
    return ring_reduce_scatter(M, n) + ring_all_gather(M, n)


def recursive_doubling_all_reduce(M: Number, n: Number) -> Transfer:
    """The whole tensor with a partner twice as far each time: M log2 n bytes in log2 n rounds, n a power of two."""
    rounds = am.log2(n)
    return Transfer(M * rounds, rounds, rounds, M * rounds)


def rabenseifner_all_reduce(M: Number, n: Number) -> Transfer:
    """Recursive halving, then doubling: 2 (n-1)/n M bytes in 2 log2 n rounds, n a power of two."""
    sent = (n - 1) / n * M
    return Transfer(2 * sent, 2 * am.log2(n), 2 * am.log2(n), sent)


def tree_all_reduce(M: Number, n: Number, num_chunks: Number = 1) -> Transfer:
    """Double binary tree: up to 2 M bytes; the depth of a tree, there and back, in rounds: 2 ceil(log2 n).

    Each half of M goes up one tree and down it. A rank inside one tree sends M/2 up and 2 x M/2 down there, and M/2 up
    where it is a leaf, so 2 M; it adds up M/2 from each of two children. Cut into chunks, the last one follows
    num_chunks - 1 rounds behind the first.
    """
    is_many = n > 1
    rounds = 2 * am.ceil(am.log2(n)) + num_chunks - 1
    return Transfer(
        am.where(is_many, 2 * M, 0),
        am.where(is_many, 4 * num_chunks, 0),
        am.where(is_many, rounds, 0),
        am.where(is_many, M, 0),
    )


def in_switch_all_reduce(M: Number, n: Number, is_one_shot: bool = False) -> Transfer:
    """The switch adds up (NVLS, SHARP): each rank sends its M once, and with NVLS the M/n that it had reduced: M + M/n.

    NVLS: every rank reads its part reduced by the switch (its peers' M (n-1)/n, and its own, leave the ranks: M), then
    stores it to all through the switch (M/n). One shot (SHARP): M up, M down. Two hops. At full size the rate is 0.85
    of the link on Hopper and 0.74 on Blackwell (NCCL).
    """
    sent = M if is_one_shot else M + M / n
    messages = 1 if is_one_shot else 2
    return Transfer(am.where(n > 1, sent, 0), am.where(n > 1, messages, 0), am.where(n > 1, 2, 0))


def pairwise_all_to_all(M: Number, n: Number) -> Transfer:
    """M local bytes, M/n of them to each rank: (n-1)/n M bytes in n-1 messages, one partner per round."""
    return Transfer((n - 1) / n * M, n - 1, n - 1)


def crossbar_all_to_all(M: Number, n: Number) -> Transfer:
    """As pairwise, all partners at once on a full crossbar: the same bytes and messages in one round."""
    return Transfer((n - 1) / n * M, n - 1, am.where(n > 1, 1, 0))


def bruck_all_to_all(M: Number, n: Number) -> Transfer:
    """Half the tensor in each of log2 n rounds: M/2 log2 n bytes, n a power of two; for small messages."""
    return Transfer(M / 2 * am.log2(n), am.log2(n), am.log2(n))


def chain_broadcast(M: Number, n: Number, num_chunks: Number = 1) -> Transfer:
    """Each rank but the last hands M on: M bytes; n-2 rounds to fill the chain, then one per chunk."""
    is_many = n > 1
    return Transfer(am.where(is_many, M, 0), am.where(is_many, num_chunks, 0), am.where(is_many, n - 2 + num_chunks, 0))


def tree_broadcast(M: Number, n: Number) -> Transfer:
    """Binomial tree: the root sends M to ceil(log2 n) ranks, one per round; others send fewer."""
    rounds = am.ceil(am.log2(n))
    return Transfer(M * rounds, rounds, rounds)


def point_to_point(M: Number) -> Transfer:
    """M bytes in one message."""
    return Transfer(M, 1, 1)


@dataclass(frozen=True, slots=True)
class Hierarchical:
    """A collective of two levels: what a rank does inside its node, and through its network card."""

    inside: Transfer
    between: Transfer


def hierarchical_all_reduce(M: Number, ranks_per_node: Number, num_nodes: Number) -> Hierarchical:
    """Reduce-scatter in the node, ring all-reduce of M/g between nodes, all-gather in the node.

    g ranks per node, q nodes: 2 (g-1)/g M bytes inside, 2 (q-1)/q M/g through the card of each rank (stas00,
    ml-engineering, network/README.md).
    """
    inside = ring_reduce_scatter(M, ranks_per_node) + ring_all_gather(M, ranks_per_node)
    return Hierarchical(inside, ring_all_reduce(M / ranks_per_node, num_nodes))


def network_card_rate(bus_bytes_per_s: Number, ranks_per_node: Number, num_nodes: Number) -> Number:
    """Bytes per second through each card that a measured all-reduce bus bandwidth stands for.

    busbw = 2 (n-1)/n M / time (nccl-tests) and the card carries 2 (q-1)/q M/g in that time: busbw (q-1)/(n-1).
    """
    return bus_bytes_per_s * (num_nodes - 1) / (ranks_per_node * num_nodes - 1)


def constant_bandwidth(peak_bytes_per_s: Number) -> Bandwidth:
    """The same rate at every size: for formulas that state the latency of a round apart."""
    return lambda payload_bytes: peak_bytes_per_s + 0 * payload_bytes


def saturating_bandwidth(peak_bytes_per_s: Number, half_bytes: Number) -> Bandwidth:
    """peak M / (M + M_half): half the peak at M_half, as fitted to measured bus bandwidth.

    Such a fit holds the latency already (M / rate = (M + M_half) / peak): use it with alpha_s = 0.
    """
    return lambda payload_bytes: peak_bytes_per_s * payload_bytes / (payload_bytes + half_bytes)


def transfer_time_s(
    transfer: Transfer,
    payload_bytes: Number,
    *,
    alpha_s: Number,
    bandwidth: Bandwidth,
    reduce_s_per_byte: Number = 0,
) -> Number:
    """rounds alpha + sent bytes / bandwidth(payload) + bytes added up x their time (Thakur et al.).

    payload_bytes: M of one collective, which picks the point on the curve. Nothing sent takes no time.
    """
    is_sent = transfer.sent_bytes > 0
    wire = am.where(is_sent, transfer.sent_bytes / bandwidth(am.maximum(payload_bytes, 1)), 0)
    return transfer.num_rounds * alpha_s + wire + transfer.reduced_bytes * reduce_s_per_byte


def hierarchical_time_s(
    cost: Hierarchical,
    payload_bytes: Number,
    *,
    ranks_per_node: Number,
    alpha_inside_s: Number,
    alpha_between_s: Number,
    inside: Bandwidth,
    between: Bandwidth,
) -> Number:
    """The levels one after the other; pipelined in chunks, time tends to the larger of the two."""
    within = transfer_time_s(cost.inside, payload_bytes, alpha_s=alpha_inside_s, bandwidth=inside)
    part = payload_bytes / ranks_per_node
    return within + transfer_time_s(cost.between, part, alpha_s=alpha_between_s, bandwidth=between)
