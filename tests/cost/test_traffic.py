"""Traffic of layouts: against the published volumes, at the limits, and as properties of any layout."""

import numpy as np
import pytest
import sympy
from hypothesis import assume, given
from hypothesis import strategies as st

from plait.cost.collectives import Transfer
from plait.cost.parameter_tensors import DecoderShape, num_parameters
from plait.cost.traffic.context import ring_terms, ulysses_terms
from plait.cost.traffic.data import ddp_terms, fsdp_terms, gathers_per_step, gradient_norm_terms, scatters_per_step
from plait.cost.traffic.experts import busiest_share, ep_terms
from plait.cost.traffic.layout import Work, decode_traffic, inference_traffic, training_traffic
from plait.cost.traffic.pipeline import pp_terms, pp_tied_embedding_terms
from plait.cost.traffic.tensor import sp_layer_terms, tp_layer_terms
from plait.cost.traffic.term import by_name, total
from plait.parallel.degrees import V_SCHEDULES, Layout

LLAMA_70B = DecoderShape(80, 8192, 64, 8, 128, 28672, 128256)
MIXTURE = DecoderShape(
    48,
    2048,
    32,
    4,
    128,
    6144,
    151936,
    has_qk_norm=True,
    num_experts=128,
    num_experts_per_token=8,
    expert_intermediate_size=768,
)
WORK = Work(num_microbatches=4, num_tokens=8192)


@st.composite
def layouts(draw):
    """Layouts that a mixture of 128 experts, 32 heads, 4 key/value heads and 48 layers can take."""
    power = st.sampled_from([1, 2, 4])
    dp, fsdp, tp, cp = (draw(power) for _ in range(4))
    pp = draw(st.sampled_from([1, 2, 3, 4]))
    ep = draw(st.sampled_from([1, *(e for e in (2, 4, 8, 16, 32, 64) if (fsdp * cp * tp) % e == 0 and e % tp == 0)]))
    settings = {"recompute": draw(st.sampled_from(["none", "selective", "full"]))}
    if fsdp * cp > 1:
        settings["zero"] = draw(st.sampled_from([1, 2, 3]))
    if tp > 1:
        settings["sp"] = draw(st.booleans())
    if cp > 1:
        settings["cp_kind"] = draw(st.sampled_from(["ring", "ulysses"]))
    if pp > 1:
        v_schedules = [] if settings["recompute"] == "selective" else ["zero_bubble_v", "dual_pipe_v"]
        settings["pp_schedule"] = draw(st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", *v_schedules]))
    return Layout(dp_replicate=dp, dp_shard=fsdp, tp=tp, pp=pp, cp=cp, ep=ep, **settings)


def sent(terms):
    return total(terms).sent_bytes


def test_zero_moves_two_or_three_times_the_parameters():
    """1910.02054: 2 Psi for ZeRO-1 and 2, 3 Psi for ZeRO-3, per step of one microbatch, in numbers of one dtype."""
    psi, z = num_parameters(LLAMA_70B), 64
    work = Work(num_microbatches=1, num_tokens=4096, parameter_bytes=1, gradient_bytes=1)
    for zero, published in ((1, 2), (2, 2), (3, 3)):
        terms = training_traffic(LLAMA_70B, Layout(dp_shard=z, zero=zero), work)
        moved = sum(cost.sent_bytes for name, cost in by_name(terms).items() if name.startswith("fsdp"))
        root = (2 * 128256 + 1) * 8192 if zero == 3 else 0  # gathered once, not twice
        assert moved == pytest.approx((published * psi - root) * (z - 1) / z)
    ddp = training_traffic(LLAMA_70B, Layout(dp_replicate=z), work)
    assert sent(ddp) == pytest.approx(2 * psi * (z - 1) / z)


def test_microbatches_multiply_what_zero_says_they_do():
    for m in (1, 3):
        assert gathers_per_step(3, m, is_root=False, is_kept_gathered=False) == 2 * m
        assert gathers_per_step(3, m, is_root=True, is_kept_gathered=False) == m
        assert gathers_per_step(3, m, is_root=False, is_kept_gathered=True) == 1
        assert gathers_per_step(2, m, is_root=False, is_kept_gathered=False) == 1
        assert (scatters_per_step(1, m), scatters_per_step(2, m), scatters_per_step(3, m)) == (1, m, m)
        assert scatters_per_step(3, m, is_once=True) == 1


def test_tensor_parallel_example():
    """70B, t = 8, one token: two all-reduces of 8192 x 2 bytes per layer forward, 4 (t-1)/t M_x = 57,344 bytes."""
    terms = tp_layer_terms(8192 * 2, 8, num_layers=1, m=1, is_training=False)
    assert total(terms).sent_bytes == 4 * 7 / 8 * 8192 * 2 == 57_344
    trained = tp_layer_terms(8192 * 2, 8, num_layers=1, m=1, is_training=True)
    assert sent(trained) == 2 * 57_344
    sequence = sp_layer_terms(8192 * 2, 8, num_layers=1, m=1, is_training=True)
    assert sent(sequence) == sent(trained)  # all-gathers and reduce-scatters carry what the all-reduces did
    regathered = sp_layer_terms(8192 * 2, 8, num_layers=1, m=1, is_training=True, num_regathered=2)
    assert sent(regathered) == sent(trained) * 10 / 8  # Galvatron counts 6 all-gathers


def test_decoding_issues_two_all_reduces_per_layer_and_token():
    """2 L T sequential all-reduces: 70B, T = 8192, 10 us each are 13.1 s."""
    (layers,) = [t for t in decode_traffic(LLAMA_70B, Layout(tp=8), 1) if t.name == "tp_all_reduce"]
    assert layers.num_calls == 160
    assert layers.num_calls * 8192 * 10e-6 == pytest.approx(13.1, abs=0.01)
    assert layers.payload_bytes == 8192 * 2


def test_decoding_through_a_pipeline():
    terms = [decode_traffic(LLAMA_70B, Layout(pp=4), 16, pp_rank=rank) for rank in range(4)]
    names = [[t.name for t in rank] for rank in terms]
    assert names == [["pp_send"], ["pp_send"], ["pp_send"], ["pp_token_send"]]
    assert terms[0][0].payload_bytes == 16 * 8192 * 2
    assert terms[3][0].payload_bytes == 16 * 8


def test_ulysses_of_multi_head_attention_is_four_tensors():
    """2309.14509: 4 n d / u numbers per layer, forward."""
    n, d, u = 4096, 1024, 8
    terms = ulysses_terms(
        n, u, num_heads=16, num_kv_heads=16, head_size=64, bytes_per_number=1, num_layers=1, m=1, is_training=False
    )
    assert sum(t.payload_bytes * t.num_calls for t in terms) == 4 * n * d / u
    assert sent(terms) == 4 * n * d / u * (u - 1) / u


def test_ring_sends_keys_and_values_only():
    """(c - 1) n/c 2 g e b per layer, forward."""
    attention = {"num_kv_heads": 8, "head_size": 128, "bytes_per_number": 2, "num_layers": 80, "m": 2}
    forward = ring_terms(32768, 8, **attention, is_training=False)
    assert sent(forward) == 80 * 2 * 7 * 32768 / 8 * 2 * 8 * 128 * 2
    trained = by_name(ring_terms(32768, 8, **attention, is_training=True, bytes_per_gradient=4))
    assert trained["cp_ring_send"].sent_bytes == 2 * sent(forward)
    assert trained["cp_ring_gradient_send"].sent_bytes == sent(forward) * 2 * 8 / 7


def test_experts():
    """DeepSeek-V3: 4 all-to-alls per layer and step; at most 4 nodes per token; FP8 dispatch is half of one leg."""
    sizes = {"num_experts": 256, "num_experts_per_token": 8, "hidden_size": 7168, "bytes_per_number": 2}
    terms = ep_terms(4096, 64, **sizes, num_layers=58, m=1, is_training=True)
    cost = by_name(terms)
    assert cost["ep_dispatch"].sent_bytes == cost["ep_combine"].sent_bytes == 2 * 58 * 4096 * 8 * 7168 * 2 * 63 / 64
    assert busiest_share(8, 4) == 4
    light = by_name(ep_terms(4096, 64, **sizes, num_layers=58, m=1, is_training=True, dispatch_bytes_per_number=1))
    assert light["ep_dispatch"].sent_bytes == cost["ep_dispatch"].sent_bytes / 2


def test_tied_tables_meet_where_the_pipeline_is_no_v():
    tied = DecoderShape(8, 64, 4, 2, 16, 128, 1000, is_tied=True)
    for rank, takes_part in enumerate((1, 0, 0, 1)):
        terms = training_traffic(tied, Layout(pp=4), WORK, pp_rank=rank)
        assert [t.payload_bytes for t in terms if t.name == "pp_tied_send"] == [1000 * 64 * 4] * takes_part
    (term,) = pp_tied_embedding_terms(1.0, schedule="zero_bubble_v", p=4, rank=0)
    assert term.num_calls == 0


def test_one_device_is_silent():
    for terms in (
        training_traffic(MIXTURE, Layout(), WORK),
        inference_traffic(MIXTURE, Layout(), WORK),
        decode_traffic(MIXTURE, Layout(), 64),
    ):
        assert terms == ()


@given(layouts(), st.data())
def test_an_axis_of_one_rank_is_silent(layout, data):
    rank = data.draw(st.integers(0, layout.pp - 1))
    names = {term.name for term in training_traffic(MIXTURE, layout, WORK, pp_rank=rank)}
    prefixes = {
        "tp_": layout.tp,
        "sp_": layout.tp if layout.sp else 1,
        "cp_": layout.cp,
        "ep_": layout.ep,
        "pp_": layout.pp,
        "fsdp_": max(layout.shard_ranks, layout.expert_shard_ranks),
        "hsdp_": layout.dp_replicate,
    }
    for prefix, degree in prefixes.items():
        if degree == 1:
            assert not {name for name in names if name.startswith(prefix)}
    assert ("ep_dispatch" in names) == (layout.ep > 1)
    assert ("tp_all_reduce" in names) == (layout.tp > 1 and not layout.sp)
    assert ("sp_all_gather" in names) == layout.sp


@given(layouts())
def test_messages_of_a_pipeline_are_all_received(layout):
    """What all ranks send forward is m per boundary that leaves a rank; the same backward."""
    assume(layout.pp > 1)
    p, v, m = layout.pp, layout.stages_per_rank, 4
    terms = [
        pp_terms(1.0, schedule=layout.pp_schedule, p=p, v=v, m=m, rank=rank, is_training=True) for rank in range(p)
    ]
    forward, backward = (sum(rank[i].num_calls for rank in terms) for i in (0, 1))
    at_the_turn = 1 if layout.pp_schedule in ("zero_bubble_v", "dual_pipe_v") else 0
    assert forward == backward == m * (p * v - 1 - at_the_turn)


@given(layouts(), st.integers(1, 8), st.integers(1, 4))
def test_more_work_never_moves_less(layout, m, factor):
    few, many = Work(m, 4096), Work(m + 1, 4096)
    assert sent(training_traffic(MIXTURE, layout, few)) <= sent(training_traffic(MIXTURE, layout, many))
    longer = Work(m, 4096 * factor)
    assert sent(training_traffic(MIXTURE, layout, few)) <= sent(training_traffic(MIXTURE, layout, longer))
    assert sent(inference_traffic(MIXTURE, layout, few)) <= sent(training_traffic(MIXTURE, layout, few))


@given(st.integers(2, 64), st.integers(1, 63))
def test_sharding_further_never_moves_less_per_rank(z, more):
    def moved(ranks):
        return sent(fsdp_terms(100.0, 200.0, ranks, num_units=3, num_gathers=2, num_scatters=1))

    assert moved(z) <= moved(z + more) < 3 * (2 * 100 + 200)
    assert total(ddp_terms(100.0, 1)) == Transfer(0, 0, 0, 0)


@given(layouts())
def test_recompute_only_adds(layout):
    plain, full = (
        sent(training_traffic(MIXTURE, layout.with_recompute(recompute), WORK)) for recompute in ("none", "full")
    )
    assert plain <= full
    if layout.pp == 1 or layout.pp_schedule not in V_SCHEDULES:
        assert plain == sent(training_traffic(MIXTURE, layout.with_recompute("selective"), WORK))


def test_formulas_take_symbols_and_arrays():
    n, t, layers = sympy.symbols("n t L", positive=True)
    symbol = sent(tp_layer_terms(n * 8192 * 2, t, num_layers=layers, m=1, is_training=True))
    assert sympy.simplify(symbol - 8 * layers * (t - 1) / t * n * 8192 * 2) == 0
    sizes = np.array([1.0, 2.0, 8.0])
    array = sent(tp_layer_terms(100.0, sizes, num_layers=2, m=3, is_training=True))
    assert list(array) == [sent(tp_layer_terms(100.0, s, num_layers=2, m=3, is_training=True)) for s in sizes]
    c = sympy.symbols("c", positive=True)
    ring = ring_terms(n, c, num_kv_heads=1, head_size=1, bytes_per_number=1, num_layers=1, m=1, is_training=False)
    assert sympy.simplify(sent(ring) - (c - 1) * n / c * 2) == 0
    assert list(sent(gradient_norm_terms("tp", sizes))) == [0, 4, 7]
