"""Each collective's bytes, messages and rounds against its algorithm carried out on numbers."""

from math import ceil, log2

import numpy as np
import pytest
import sympy

from plait.cost import collectives as cc
from plait.cost.collectives import Transfer

M = 64.0 * 3 * 5 * 7  # bytes, divisible by every n used: one byte per element of the vectors below
POWERS = (2, 4, 8, 16)
ANY = (2, 3, 5, 7, 8)


class Wire:
    """Ranks that send slices of a vector to each other, counted; a round's messages all leave before any arrives."""

    def __init__(self, n, length=int(M)):
        self.data = np.arange(n * length, dtype=float).reshape(n, length) % 101
        self.whole = self.data.sum(axis=0)
        self.sent, self.messages, self.rounds, self.reduced = (np.zeros(n) for _ in range(4))

    def round(self, sends, is_sum):
        """sends: [(from, to, slice)]."""
        self.rounds += 1
        carried = [(sender, receiver, part, self.data[sender, part].copy()) for sender, receiver, part in sends]
        for sender, receiver, part, values in carried:
            self.sent[sender] += values.size
            self.messages[sender] += 1
            if is_sum:
                self.data[receiver, part] += values
                self.reduced[receiver] += values.size
            else:
                self.data[receiver, part] = values

    @property
    def busiest(self):
        return Transfer(*(values.max() for values in (self.sent, self.messages, self.rounds, self.reduced)))


def pieces(n, length=int(M)):
    size = length // n
    return [slice(i * size, (i + 1) * size) for i in range(n)]


def ring_rounds(wire, n, is_sum, shift=0):
    parts = pieces(n)
    for step in range(n - 1):
        wire.round([(r, (r + 1) % n, parts[(r - step + shift) % n]) for r in range(n)], is_sum)


@pytest.mark.parametrize("n", ANY)
def test_ring_all_reduce(n):
    wire = Wire(n)
    ring_rounds(wire, n, True)
    scattered = wire.busiest
    parts = pieces(n)
    assert all((wire.data[r, parts[(r + 1) % n]] == wire.whole[parts[(r + 1) % n]]).all() for r in range(n))
    assert scattered == cc.ring_reduce_scatter(M, n)
    ring_rounds(wire, n, False, shift=1)
    assert (wire.data == wire.whole).all()
    assert wire.busiest == cc.ring_all_reduce(M, n)
    assert cc.ring_all_gather(M, n) == Transfer(scattered.sent_bytes, scattered.num_messages, scattered.num_rounds, 0)


@pytest.mark.parametrize("n", POWERS)
def test_recursive_doubling_all_reduce(n):
    wire = Wire(n)
    distance = 1
    while distance < n:
        wire.round([(r, r ^ distance, slice(None)) for r in range(n)], True)
        distance *= 2
    assert (wire.data == wire.whole).all()
    assert wire.busiest == cc.recursive_doubling_all_reduce(M, n)


@pytest.mark.parametrize("n", POWERS)
def test_rabenseifner_all_reduce(n):
    wire, low, high = Wire(n), [0] * n, [int(M)] * n
    distance = n // 2
    while distance:
        sends = []
        for r in range(n):
            middle = (low[r] + high[r]) // 2
            sends.append((r, r ^ distance, slice(middle, high[r]) if not r & distance else slice(low[r], middle)))
        wire.round(sends, True)
        for r in range(n):
            middle = (low[r] + high[r]) // 2
            low[r], high[r] = (middle, high[r]) if r & distance else (low[r], middle)
        distance //= 2
    gathered_from = wire.busiest
    distance = 1
    while distance < n:
        wire.round([(r, r ^ distance, slice(low[r], high[r])) for r in range(n)], False)
        bounds = [(min(low[r], low[r ^ distance]), max(high[r], high[r ^ distance])) for r in range(n)]
        low, high = [b[0] for b in bounds], [b[1] for b in bounds]
        distance *= 2
    assert (wire.data == wire.whole).all()
    assert wire.busiest == cc.rabenseifner_all_reduce(M, n)
    gather = cc.recursive_all_gather(M, n)
    assert gather.sent_bytes == wire.busiest.sent_bytes - gathered_from.sent_bytes
    assert gather.num_rounds == wire.busiest.num_rounds - gathered_from.num_rounds


def tree(n):
    """Parents of a binary tree whose leaves are the even ranks, as NCCL's: rank 0 is the root, with one child."""
    parents = {}

    def build(ranks, parent):
        if ranks:
            middle = max((r & -r, r) for r in ranks)[1]
            parents[middle] = parent
            build([r for r in ranks if r < middle], middle)
            build([r for r in ranks if r > middle], middle)

    build(list(range(1, n)), 0)
    return parents


@pytest.mark.parametrize("n", POWERS)
def test_double_binary_tree_all_reduce(n):
    """Half of M on each of two trees; the second is the first with every rank shifted by one, so leaves turn inside."""
    wire = Wire(n)
    half = int(M) // 2
    trees = []
    for shift, part in ((0, slice(0, half)), (1, slice(half, int(M)))):
        parents = {(child + shift) % n: (parent + shift) % n for child, parent in tree(n).items()}
        depth = {}
        for child in parents:
            rank, depth[child] = child, 0
            while rank in parents:
                rank, depth[child] = parents[rank], depth[child] + 1
        trees.append((parents, depth, part))
    deepest = max(max(depth.values()) for _, depth, _ in trees)
    for level in range(deepest, 0, -1):
        wire.round([(c, p[c], part) for p, depth, part in trees for c in p if depth[c] == level], True)
    for level in range(1, deepest + 1):
        wire.round([(p[c], c, part) for p, depth, part in trees for c in p if depth[c] == level], False)
    assert (wire.data == wire.whole).all()
    model, busiest = cc.tree_all_reduce(M, n), wire.busiest
    assert busiest.num_rounds == model.num_rounds == 2 * ceil(log2(n))
    assert busiest.sent_bytes <= model.sent_bytes
    assert busiest.num_messages <= model.num_messages
    if n > 4:  # small trees have no rank with two children and a parent
        assert busiest == model
    assert wire.sent.mean() == pytest.approx(2 * (n - 1) / n * M)


@pytest.mark.parametrize("n", ANY)
def test_all_to_all(n):
    """Rank r's piece j must end as rank j's piece r; one partner per round, the next one further away each time."""
    parts = pieces(n)
    start = Wire(n)
    wire, arrived = Wire(n), np.empty_like(start.data)
    for step in range(n):
        for r in range(n):
            arrived[(r + step) % n, parts[r]] = start.data[r, parts[(r + step) % n]]
        if step:
            wire.round([(r, (r + step) % n, parts[r]) for r in range(n)], False)
    for r in range(n):
        for j in range(n):
            assert (arrived[j, parts[r]] == start.data[r, parts[j]]).all()
    assert wire.busiest == cc.pairwise_all_to_all(M, n)
    assert cc.crossbar_all_to_all(M, n) == Transfer(wire.busiest.sent_bytes, n - 1, 1)


@pytest.mark.parametrize("n", POWERS)
def test_bruck_all_to_all(n):
    blocks = [[(r, (r + j) % n) for j in range(n)] for r in range(n)]  # slot j: what must travel j ranks on
    sent = rounds = 0
    step = 1
    while step < n:
        moving = [j for j in range(n) if j & step]
        blocks = [[blocks[(r - step) % n][j] if j in moving else blocks[r][j] for j in range(n)] for r in range(n)]
        sent += len(moving) * M / n
        rounds += 1
        step *= 2
    assert all(target == r for r in range(n) for _, target in blocks[r])
    assert cc.bruck_all_to_all(M, n) == Transfer(sent, rounds, rounds)


@pytest.mark.parametrize(("n", "num_chunks"), [(2, 1), (3, 4), (8, 5)])
def test_chain_broadcast(n, num_chunks):
    has = {0: list(range(num_chunks))} | {r: [] for r in range(1, n)}
    rounds = 0
    while any(len(has[r]) < num_chunks for r in has):
        rounds += 1
        arriving = [(r + 1, has[r][len(has[r + 1])]) for r in range(n - 1) if len(has[r]) > len(has[r + 1])]
        for r, chunk in arriving:
            has[r].append(chunk)
    assert cc.chain_broadcast(M, n, num_chunks) == Transfer(M, num_chunks, rounds)


@pytest.mark.parametrize("n", [2, 3, 8, 13])
def test_tree_broadcast(n):
    have, rounds, by_root = {0}, 0, 0
    while len(have) < n:
        new = {r + len(have) for r in have} & set(range(n))
        by_root += 1
        have, rounds = have | new, rounds + 1
    assert cc.tree_broadcast(M, n) == Transfer(M * by_root, by_root, rounds)


def test_hierarchical_all_reduce_and_the_card_rate():
    """382 GB/s of bus bandwidth on 4 nodes of 8 B200 is 37 GB/s per card of 50 (stas00/ml-engineering)."""
    assert cc.network_card_rate(382e9, 8, 4) == pytest.approx(37.0e9, rel=0.002)
    g, q = 8, 4
    cost = cc.hierarchical_all_reduce(M, g, q)
    assert cost.inside.sent_bytes == 2 * 7 / 8 * M
    assert cost.between.sent_bytes == 2 * 3 / 4 * M / 8
    # The rate through the card, from the time that the bus bandwidth stands for.
    time_s = 2 * (g * q - 1) / (g * q) * M / 382e9
    assert cost.between.sent_bytes / time_s == pytest.approx(cc.network_card_rate(382e9, g, q))


ALL = {
    name: function
    for name, function in vars(cc).items()
    if name.startswith(("ring", "recursive", "raben", "tree", "in_switch", "pairwise", "crossbar", "bruck", "chain"))
}


@pytest.mark.parametrize("name", sorted(ALL))
def test_one_rank_sends_nothing_and_formulas_take_arrays_and_symbols(name):
    assert len(ALL) == 13
    function = ALL[name]
    assert function(M, 1) == Transfer(0, 0, 0, 0)
    sizes = np.array([1.0, 2.0, 4.0, 8.0])
    array = function(M, sizes)
    m, n = sympy.symbols("M n", positive=True)
    symbol = function(m, n)
    for i, ranks in enumerate(sizes):
        number = function(M, float(ranks))
        assert np.broadcast_to(array.sent_bytes, 4)[i] == number.sent_bytes
        assert np.broadcast_to(array.num_rounds, 4)[i] == number.num_rounds
        assert float(sympy.sympify(symbol.sent_bytes).subs({m: M, n: int(ranks)})) == number.sent_bytes


def test_time():
    """2 (n-1) rounds of 5 us, 2 x 7/8 x 800 MB at 100 GB/s, 7/8 x 800 MB added up at 1 ns per kB."""
    cost = cc.ring_all_reduce(800e6, 8)
    rate = cc.constant_bandwidth(100e9)
    took = cc.transfer_time_s(cost, 800e6, alpha_s=5e-6, bandwidth=rate, reduce_s_per_byte=1e-12)
    assert took == pytest.approx(14 * 5e-6 + 1.4e9 / 100e9 + 0.7e9 * 1e-12)
    half = cc.saturating_bandwidth(100e9, 10e6)
    assert half(10e6) == pytest.approx(50e9)
    assert cc.transfer_time_s(cc.ring_all_reduce(0.0, 8), 0.0, alpha_s=0, bandwidth=half) == 0
    both = cc.hierarchical_all_reduce(800e6, 8, 2)
    took = cc.hierarchical_time_s(
        both,
        800e6,
        ranks_per_node=8,
        alpha_inside_s=0,
        alpha_between_s=1e-5,
        inside=rate,
        between=cc.constant_bandwidth(50e9),
    )
    assert took == pytest.approx(1.4e9 / 100e9 + 100e6 / 50e9 + 2 * 1e-5)
