"""The traffic formulas against the collectives that torch issues on 4 processes (gloo), one group for all cases.

Compared as multisets of (collective, ranks, payload bytes): the number of calls and each one's size must be equal.
"""

from collections import Counter
from dataclasses import replace

import pytest
from issued.launch import launch

from plait.cost.collectives import pairwise_all_to_all, ring_all_gather
from plait.cost.parameter_tensors import DecoderShape
from plait.cost.reshard import contiguous_places, moves, nested_places, reshard
from plait.cost.traffic.context import ring_terms, ulysses_terms
from plait.cost.traffic.experts import ep_terms
from plait.cost.traffic.layout import Work, inference_traffic, training_traffic
from plait.cost.traffic.pipeline import pp_terms
from plait.cost.traffic.tensor import tp_layer_terms
from plait.parallel.degrees import Layout

WORLD, FP32 = 4, 4
# What tests/cost/issued builds and runs (written twice, so that a change of one shows).
SHAPE = DecoderShape(
    num_layers=3,
    hidden_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_size=6,
    intermediate_size=28,
    vocab_size=34,
    has_qk_norm=True,
)
WORK = Work(num_microbatches=3, num_tokens=16, activation_bytes=FP32, parameter_bytes=FP32, gradient_bytes=FP32)
RESHARD_SHAPE = DecoderShape(
    num_layers=4,
    hidden_size=10,
    num_heads=8,
    num_kv_heads=4,
    head_size=2,
    intermediate_size=16,
    vocab_size=14,
    has_qk_norm=True,
    num_experts=4,
    num_experts_per_token=2,
    expert_intermediate_size=4,
)


@pytest.fixture(scope="module")
def issued(tmp_path_factory):
    """{case: [what rank 0 issued, rank 1, ...]}"""
    return launch(tmp_path_factory.mktemp("issued"), WORLD)


def counted(calls):
    return Counter((collective, ranks, payload) for collective, ranks, payload in calls)


def expected(terms):
    counts = Counter()
    for term in terms:
        if term.num_calls:
            counts[term.collective, term.num_ranks, term.payload_bytes] += term.num_calls
    return counts


def without(terms, *names):
    assert set(names) <= {term.name for term in terms}, "a name that is not there would hide a mistake"
    return [term for term in terms if term.name not in names]


def step(text, **settings):
    return training_traffic(SHAPE, Layout.parse(text, **settings), WORK)


def test_ddp(issued):
    terms = step("dp4")
    assert [term.name for term in terms] == ["ddp_all_reduce"]
    for calls in issued["ddp"]:
        assert counted(calls) == expected(terms)


@pytest.mark.parametrize(
    ("case", "terms"),
    [
        ("zero2", step("fsdp4", zero=2)),
        ("zero1", step("fsdp4", zero=1)),
        ("hsdp", step("dp2fsdp2")),
        ("fsdp_tp", step("fsdp2tp2")),
    ],
)
def test_sharded_data_parallelism(issued, case, terms):
    for calls in issued[case]:
        assert counted(calls) == expected(without(terms, "grad_norm_all_reduce"))


def test_zero3_with_its_gradient_norm(issued):
    for calls in issued["zero3"]:
        assert counted(calls["step"] + calls["norm"]) == expected(step("fsdp4"))
        assert len(calls["norm"]) == 1


def test_zero3_inference_gathers_once_per_microbatch(issued):
    for calls in issued["zero3_inference"]:
        assert counted(calls) == expected(inference_traffic(SHAPE, Layout.parse("fsdp4"), WORK))


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("tp", {}),
        ("tp_recomputed", {"recompute": "full"}),
        ("sp", {"sp": True}),
        ("sp_recomputed", {"sp": True, "recompute": "full"}),
    ],
)
def test_tensor_parallelism(issued, case, settings):
    """Gradients of whole parameters wait, as partial sums, for the optimiser."""
    # Two replicas of the tp pair train alike in this case, without data parallelism between them.
    terms = without(step("tp2", **settings), "grad_norm_all_reduce")
    for calls in issued[case]:
        assert counted(calls["step"]) == expected(without(terms, "tp_replicated_all_reduce"))
        assert counted(calls["step"] + calls["optimizer"]) == expected(terms)


def test_a_layout_change_per_projection_costs_five_all_reduces_in_backward(issued):
    """q, k, v, gate and up each sum their input's gradient; changed once per block, there are two."""
    prepared = step("tp2")
    activation = next(term.payload_bytes for term in prepared if term.name == "tp_all_reduce")
    five = tp_layer_terms(activation, 2, num_layers=3, m=3, is_training=True, input_all_reduces=5)
    terms = [*without(prepared, "tp_all_reduce", "grad_norm_all_reduce"), *five]
    for calls in issued["tp_unprepared"]:
        assert counted(calls["step"] + calls["optimizer"]) == expected(terms)


@pytest.mark.parametrize(
    ("schedule", "p", "v"),
    [("gpipe", 4, 1), ("1f1b", 4, 1), ("interleaved_1f1b", 2, 2), ("zero_bubble_v", 2, 2), ("dual_pipe_v", 2, 2)],
)
def test_pipelines(issued, schedule, p, v):
    for rank, calls in enumerate(issued[f"pp {schedule}"]):
        terms = pp_terms(5 * 6 * FP32, schedule=schedule, p=p, v=v, m=8, rank=rank % p, is_training=True)
        assert counted(calls) == expected(terms)
    assert sum(len(calls) for calls in issued["pp 1f1b"]) == 2 * 8 * 3  # m each way over p - 1 boundaries
    assert sum(len(calls) for calls in issued["pp zero_bubble_v"][:2]) == 2 * 8 * 2  # twice 1F1B's 2 m (p - 1)


ATTENTION = {"num_kv_heads": 4, "head_size": 8, "bytes_per_number": FP32, "num_layers": 1, "m": 1, "is_training": True}


def test_ring_attention(issued):
    """3 hops of keys and values each way, and 4 of their gradients: published accounts leave out the last, home."""
    for calls in issued["ring"]:
        assert counted(calls) == expected(ring_terms(16, WORLD, **ATTENTION))
        assert len(calls) == 3 + 3 + 4


def test_ring_attention_in_bf16_sends_gradients_in_fp32(issued):
    terms = ring_terms(16, WORLD, **{**ATTENTION, "bytes_per_number": 2}, bytes_per_gradient=4)
    for calls in issued["ring_bf16"]:
        assert counted(calls) == expected(terms)


def test_ulysses(issued):
    for calls in issued["ulysses"]:
        assert counted(calls) == expected(ulysses_terms(16, WORLD, num_heads=4, **ATTENTION))
        assert len(calls) == 8


def test_experts(issued):
    terms = ep_terms(
        16,
        WORLD,
        num_experts=8,
        num_experts_per_token=2,
        hidden_size=5,
        bytes_per_number=FP32,
        num_layers=1,
        m=1,
        is_training=True,
    )
    for calls in issued["experts"]:
        assert counted(calls) == expected(terms)


@pytest.mark.parametrize(
    "text",
    [
        "fsdp4 dp2tp2",
        "tp4 dp2tp2 nested",
        "tp2pp2 dp2tp2 nested",
        "fsdp2pp2 dp4",
        "fsdp4ep4 dp2tp2",
        "dp2tp2 fsdp2cp2",
    ],
)
def test_resharding_moves_what_is_counted(issued, text):
    """The processes carried out the moves and compared each piece with the whole tensor's."""
    source, target = (Layout.parse(part) for part in text.split()[:2])
    places = nested_places(source, target) if text.endswith("nested") else contiguous_places(target)
    counts = reshard(RESHARD_SHAPE, source, target, target_places=places, bytes_per_number=FP32)
    sent = [sum(payload for _, _, payload in calls) for calls in issued[f"reshard {text}"]]
    assert sent == list(counts.sent_bytes)
    assert sum(sent) == counts.received_bytes.sum() > 0
    received = Counter()
    for move in moves(RESHARD_SHAPE, source, target, target_places=places):
        size = FP32
        for part in move.box:
            size *= part.stop - part.start
        received[move.receiver] += size
    assert [received[rank] for rank in range(WORLD)] == list(counts.received_bytes)


def test_dtensor_gathers_where_exact_overlap_would_exchange(issued):
    """rows -> columns of an 8 x 12 tensor needs 3/16 of it per rank; DTensor on gloo gathers all of it: 3/4."""
    for calls in issued["redistribute"]:
        whole = [["all_gather", WORLD, 8 * 12 * FP32]]
        assert calls == {"columns": whole, "whole": whole}
    size = 8 * 12 * FP32
    assert ring_all_gather(size, WORLD).sent_bytes == size * 3 / 4
    assert pairwise_all_to_all(size / WORLD, WORLD).sent_bytes == size * 3 / 16


def test_work_is_not_mixed_up():
    """The cases above would not see num_tokens and num_microbatches exchanged if they were equal."""
    assert WORK.num_tokens != WORK.num_microbatches
    assert step("tp2") != training_traffic(SHAPE, Layout.parse("tp2"), replace(WORK, num_tokens=8))
