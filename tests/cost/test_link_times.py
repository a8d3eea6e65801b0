"""Seconds of collectives on links with round numbers, by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.cost.cluster import Cluster, Curve, Device, Interval, Link
from plait.cost.link_times import link_time
from plait.cost.traffic.term import Term
from plait.parallel.degrees import Layout

ONE = Interval(0.5, 1.0, 1.0)
NEAR = Link(Curve(100e9, ONE, 1e6), Interval(1e-6, 2e-6, 4e-6), Interval(1e-7, 2e-7, 4e-7))
FAR = Link(Curve(10e9, ONE, 1e6), Interval(1e-5, 2e-5, 4e-5), Interval(1e-6, 2e-6, 4e-6))
DEVICE = Device(
    "round", {"bf16": 1e14}, 80e9, 1e12, ONE, ONE, Interval(0, 0, 0), scale_up=NEAR, network=FAR, host_bytes_per_s=1e10
)
NODE = Cluster("node", DEVICE, 1, 8)
TWO_NODES = Cluster("two nodes", DEVICE, 2, 8)


def seconds(term, cluster, layout, bound="typical"):
    return link_time([term], cluster, layout, bound)


def test_a_ring_inside_a_node():
    found = seconds(Term("x", "tp", "all_gather", 8, 3, 8e9), NODE, Layout(tp=8))
    assert found.sent_bytes == pytest.approx(3 * 7e9)
    assert found.num_rounds == 3 * 7
    assert found.wire_s == pytest.approx(3 * 7e9 / 100e9)
    assert found.latency_s == pytest.approx(3 * (2e-6 + 7 * 2e-7))
    assert found.hidden_s == 0


def test_a_ring_over_two_nodes_drives_the_cards_of_all_its_ranks():
    # 8 ranks per node and 10 GB/s each: 80 GB/s between nodes, less than the 100 GB/s inside. One hop between nodes.
    found = seconds(Term("x", "dp_shard", "all_gather", 16, 1, 16e9), TWO_NODES, Layout(dp_shard=16))
    assert found.wire_s == pytest.approx(15e9 / 80e9)
    assert found.latency_s == pytest.approx(2e-5 + 14 * 2e-7 + 1 * 2e-6)
    # With tp 8 inside, a data-parallel group has one rank per node, and its one card.
    apart = seconds(Term("x", "dp_shard", "all_gather", 2, 1, 2e9), TWO_NODES, Layout(dp_shard=2, tp=8))
    assert apart.wire_s == pytest.approx(1e9 / 10e9)


def test_small_all_reduces_take_the_tree():
    small = seconds(Term("x", "tp", "all_reduce", 8, 1, 8), NODE, Layout(tp=8))
    assert small.num_rounds == 2 * 3
    assert small.latency_s == pytest.approx(2e-6 + 6 * 2e-7)
    # At 1 GB the ring's 2 x 7/8 of the bytes matter more than its 14 rounds: the tree sends 2 of them.
    large = seconds(Term("x", "tp", "all_reduce", 8, 1, 1e9), NODE, Layout(tp=8))
    assert large.num_rounds == 14
    assert large.wire_s == pytest.approx(2 * 7 / 8 * 1e9 / 100e9)


def test_all_to_all_leaves_the_node_through_its_own_card():
    found = seconds(Term("x", "ep", "all_to_all", 16, 1, 16e9), TWO_NODES, Layout(dp_shard=16, ep=16))
    assert found.wire_s == pytest.approx(8e9 / 10e9 + 7e9 / 100e9)
    assert found.num_rounds == 1


def test_pipeline_neighbours_are_as_far_apart_as_the_ranks_of_a_stage():
    send = Term("x", "pp", "send", 2, 1, 1e9, True)
    inside = seconds(send, NODE, Layout(pp=2, dp_shard=4))
    between = seconds(send, TWO_NODES, Layout(pp=2, dp_shard=8))
    assert inside.hidden_s == pytest.approx(1e9 / 100e9 + 2e-6 + 2e-7)
    assert between.hidden_s == pytest.approx(1e9 / 10e9 + 2e-5 + 2e-6)
    assert inside.wire_s == inside.latency_s == 0


@given(
    collective=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    ranks=st.sampled_from([2, 4, 8, 16]),
    payload=st.floats(1, 1e10),
)
def test_bounds_and_payload_order_times(collective, ranks, payload):
    term, layout = Term("x", "dp_shard", collective, ranks, 1, payload), Layout(dp_shard=ranks)

    def total(of, bound):
        found = seconds(of, TWO_NODES, layout, bound)
        return found.wire_s + found.latency_s

    low, typical, high = (total(term, bound) for bound in ("low", "typical", "high"))
    assert low <= typical <= high
    assert total(replace(term, payload_bytes=2 * payload), "typical") >= typical
