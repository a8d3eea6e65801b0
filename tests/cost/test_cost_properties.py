"""Properties that hold for every input, and one formula for floats, arrays and symbols."""

import math
from dataclasses import replace

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost import arithmetic, generation, model_costs
from plait.cost import operators as op
from plait.cost.activations import activation_bytes
from plait.cost.cluster import Curve, Interval
from plait.cost.layers import Division, layer_forward
from plait.cost.lengths import log_normal_lengths
from plait.cost.model_catalogue import find_model
from plait.cost.model_spec import FeedForward, GroupedAttention, LayerRun, ModelSpec
from plait.cost.state import PRECISION_RECIPES, rank_state, state_bytes
from plait.cost.tokens import attended_pairs, decode_tokens, packed_tokens, uniform_tokens

NAMES = ("Qwen2.5-0.5B", "Qwen3-30B-A3B", "DeepSeek-V3", "gpt-oss-20b")
settings.register_profile("plait", deadline=None, derandomize=True)
settings.load_profile("plait")
sizes = st.integers(1, 5000)
degrees = st.sampled_from([1, 2, 4, 8])
names = st.sampled_from(NAMES)


@given(sizes, st.integers(1, 6000))
def test_pairs_are_bounded(s, window):
    causal = attended_pairs(s)
    assert s <= attended_pairs(s, window) <= causal <= attended_pairs(s, mode="square")
    assert attended_pairs(s, max(s, window)) == causal
    assert attended_pairs(s, 1) == s


@given(st.lists(sizes, min_size=1, max_size=8))
def test_packing_never_attends_across_sequences(lengths):
    packed = packed_tokens(np.array(lengths))
    assert packed.pairs[None] == sum(attended_pairs(s) for s in lengths)
    assert packed.pairs[None] <= attended_pairs(sum(lengths))


@given(names, sizes, sizes, degrees, st.booleans())
def test_more_tokens_never_cost_less(name, s, more, tp, sp):
    spec, division = find_model(name), Division(tp=tp, sp=sp)
    short, long = uniform_tokens(1, s, spec.windows), uniform_tokens(1, s + more, spec.windows)
    for make in (model_costs.forward, model_costs.backward):
        a, b = make(spec, short, 2, division), make(spec, long, 2, division)
        assert a.flop < b.flop
        assert a.depth <= b.depth
        assert a.hbm_bytes < b.hbm_bytes
        assert a.flop <= a.work
    kept = [activation_bytes(spec, t, 2, division=division) for t in (short, long)]
    assert kept[0].kept < kept[1].kept


@given(names, sizes, degrees)
def test_ranks_never_add_work_or_memory(name, s, ways):
    spec, tokens = find_model(name), uniform_tokens(2, s, find_model(name).windows)
    whole = model_costs.forward(spec, tokens, 2)
    recipe = PRECISION_RECIPES["fsdp2_fp32_masters"]
    for division in (Division(tp=ways), Division(cp=ways), Division(ep=ways)):
        part = model_costs.forward(spec, tokens, 2, division)
        assert part.flop <= whole.flop * (1 + 1e-12)
        assert part.depth == whole.depth
        assert rank_state(spec, recipe, division, zero=3, dp_shard=8).total <= (
            rank_state(spec, recipe, zero=3, dp_shard=8).total * (1 + 1e-12)
        )
        kept = activation_bytes(spec, tokens, 2, division=division)
        assert kept.kept <= activation_bytes(spec, tokens, 2).kept * (1 + 1e-12)


@given(st.floats(1e6, 1e12), st.sampled_from(sorted(PRECISION_RECIPES)), st.integers(1, 512))
def test_zero_stages_never_hold_more(num_parameters, recipe, shard):
    totals = [state_bytes(num_parameters, PRECISION_RECIPES[recipe], zero=z, shard=shard).total for z in range(4)]
    assert totals == sorted(totals, reverse=True)
    if shard == 1:
        assert len(set(totals)) == 1


@given(names, sizes, st.sampled_from(["fused", "eager"]))
def test_recompute_trades_memory_for_work(name, s, implementation):
    spec = find_model(name)
    tokens = uniform_tokens(1, s, spec.windows)
    hows = ("none", "selective", "full")
    kept = [activation_bytes(spec, tokens, 2, implementation=implementation, recompute=h).layers for h in hows]
    work = [model_costs.backward(spec, tokens, 2, implementation=implementation, recompute=h).work for h in hows]
    assert kept[0] > kept[2]
    assert kept[1] > kept[2]
    assert work[0] < work[1] < work[2]
    forward = model_costs.forward(spec, tokens, 2, implementation=implementation)
    assert work[2] - work[0] <= forward.work


@given(st.floats(1, 500), st.floats(0, 2), st.integers(1, 400), st.integers(1, 10_000))
def test_the_longest_lies_between_the_mean_and_the_cap(mean, cv, cap, n):
    lengths = log_normal_lengths(mean, cv, cap)
    assert 1 <= lengths.mean <= lengths.expected_max(n) + 1e-9 <= cap + 2e-9
    assert lengths.expected_max(n) <= lengths.expected_max(2 * n) + 1e-9
    assert lengths.second_moment >= lengths.mean**2 * (1 - 1e-12)
    assert lengths.expected_max(1) == pytest.approx(lengths.mean)
    assert lengths.expect(lambda t: t) == pytest.approx(lengths.mean)


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(1, 300), st.floats(0.1, 1.5))
def test_fewer_slots_never_take_less_time(n, slots, cv):
    lengths = log_normal_lengths(100, cv, 400)

    def step_s(active, context):
        return 1e-2 + 1e-4 * active + 1e-7 * active * context

    full = generation.rollout_time(step_s, n, 50, lengths)
    few = generation.rollout_time(step_s, n, 50, lengths, slots)
    # The steady state leaves out that all slots start young: up to a few percent where they are nearly enough.
    assert few.seconds >= 0.9 * full.seconds
    assert few.mean_active <= min(n, slots) * 1.1


@given(st.floats(1, 1e15), st.floats(1, 1e15), st.floats(0, 1e12))
def test_curves_rise_to_their_peak(a, b, half):
    curve = Curve(1e12, Interval(0.4, 0.6, 0.8), half)
    small, large = sorted((a, b))
    assert curve.rate(small) <= curve.rate(large) * (1 + 1e-12) <= 0.6e12 * (1 + 1e-9)
    assert curve.seconds(small) == pytest.approx(small / curve.rate(small))
    assert curve.rate(small, "low") <= curve.rate(small) <= curve.rate(small, "high")


@given(st.integers(1, 512), st.integers(1, 128), st.integers(0, 2000))
def test_touched_experts(num_experts, num_chosen, n):
    num_chosen = min(num_chosen, num_experts)
    touched = op.expected_experts(n, num_experts, num_chosen)
    assert min(n, 1) * num_chosen - 1e-6 <= touched <= min(num_experts, n * num_chosen) + 1e-6


@given(st.integers(1, 2**40))
def test_tree_depth(n):
    assert 2 ** arithmetic.tree_depth(n) >= n
    assert arithmetic.tree_depth(n) == (n - 1).bit_length()


def _symbols(names):
    return sympy.symbols(names, positive=True, integer=True)


D, F, N, M, H, V, L = _symbols("D F N M H V L")


def _spec(d, f, n, m, h, v, count):
    attention = GroupedAttention(n, m, h, h, has_qk_norm=True)
    return ModelSpec("s", v, d, (LayerRun(count),), attention, FeedForward(f), None, False, 4096)


def test_floats_arrays_and_symbols_go_through_the_same_lines():
    numbers = dict(zip((D, F, N, M, H, V, L), (64, 112, 8, 4, 16, 96, 3), strict=True))
    s, tp = _symbols("s t")
    symbolic = model_costs.forward(_spec(D, F, N, M, H, V, L), uniform_tokens(2, s), 2, Division(tp=tp))
    plain = _spec(*numbers.values())
    lengths, ways = np.array([1.0, 7.0, 64.0]), np.array([1, 2, 4])
    arrays = model_costs.forward(plain, uniform_tokens(2, lengths), 2, Division(tp=ways))
    for i, (length, way) in enumerate(zip(lengths, ways, strict=True)):
        alone = model_costs.forward(plain, uniform_tokens(2, int(length)), 2, Division(tp=int(way)))
        for part in ("work", "depth", "flop", "read_bytes", "write_bytes"):
            value = getattr(alone, part)
            filled = getattr(symbolic, part).subs({**numbers, s: int(length), tp: int(way)})
            assert float(filled) == pytest.approx(float(value)), part
            assert float(np.broadcast_to(getattr(arrays, part), 3)[i]) == pytest.approx(float(value)), part


def test_the_published_forms_can_be_printed():
    x = _symbols("x")
    layer = layer_forward(_spec(D, F, N, N, D / N, V, 1), LayerRun(1), uniform_tokens(1, x), 2)
    # Per token of MHA with SwiGLU: 2 (4 D^2 + 3 D F) + 4 D (x + 1) / 2.
    assert sympy.simplify(layer.flop / x - (8 * D**2 + 6 * D * F + 2 * D * (x + 1))) == 0
    state = rank_state(_spec(D, F, N, M, H, V, L), PRECISION_RECIPES["fp32"], zero=0)
    parameters = L * (2 * D * N * H + 2 * D * M * H + 3 * D * F + 2 * D + 2 * H) + D + 2 * V * D
    assert sympy.expand(state.total - 16 * parameters) == 0


def test_arithmetic_by_hand():
    assert (arithmetic.maximum(2, 3), arithmetic.minimum(2, 3)) == (3, 2)
    assert arithmetic.maximum(np.array([1, 5]), 3).tolist() == [3, 5]
    assert (arithmetic.ceil(1.2), arithmetic.floor(1.8), arithmetic.log2(8)) == (2, 1, 3)
    assert arithmetic.where(np.array([True, False]), 1, 2).tolist() == [1, 2]
    assert (arithmetic.where(True, 1, 2), arithmetic.where(False, 1, 2)) == (1, 2)
    x = _symbols("x")
    assert arithmetic.where(x > 2, 1, 2).subs(x, 3) == 1
    assert (arithmetic.maximum(x, 4).subs(x, 2), arithmetic.ceil(x / 2).subs(x, 3)) == (4, 2)
    assert arithmetic.tree_depth(np.array([1, 2, 3, 1024, 1025])).tolist() == [0, 1, 2, 10, 11]
    assert arithmetic.tree_depth(0) == 0


def test_costs_add_in_a_row_and_beside():
    a, b = op.Cost(10, 3, 8, 100, 10, 110, 1), op.Cost(1, 5, 0, 7, 9, 0, 1)
    assert a + b == op.Cost(11, 8, 8, 107, 19, 110, 2)
    assert op.beside(a, b) == op.Cost(11, 5, 8, 107, 19, 110, 2)
    assert a * 3 == op.Cost(30, 9, 24, 300, 30, 330, 3)
    assert a.off_path() == replace(a, depth=0)
    assert a.hbm_bytes == 110


def test_operators_by_hand():
    assert op.linear(3, 8, 5, 2) == op.Cost(240, 4, 240, 2 * (24 + 40), 2 * 15, 2 * (24 + 40 + 15), 1)
    assert op.linear_weight_gradient(16, 8, 5, 2, gradient_b=4) == op.Cost(
        1280, 5, 1280, 2 * 16 * 13, 4 * 40, 2 * 16 * 13 + 4 * 40, 1
    )
    # What holds no product has no traffic of one.
    assert (op.softmax(2, 9, 4).product_bytes, op.softmax(2, 9, 4).num_operators) == (0, 1)
    assert op.linear_input_gradient(3, 8, 5, 2).depth == 4
    assert op.softmax(2, 9, 4).depth == 2 * 4 + 3
    assert (op.adam(10).work, op.adam(10).depth, op.adam(10).hbm_bytes) == (150, 9, 280)
    assert op.clip(1024).depth == 15
    assert op.sampling(1, 1024, 2).depth == 54
    # A bitonic network over 1,024 numbers has 55 rounds of 512 comparisons.
    assert op.sampling(1, 1024, 2, sorts=True).work - op.sampling(1, 1024, 2).work == 55 * 512
    assert op.gae(1, 1024, is_scan=False).depth > 30 * op.gae(1, 1024).depth
    assert math.isclose(op.policy_loss(64).depth, 12)
    step = decode_tokens(4, 100, (None, 8))
    assert (step.pairs, step.num_keys(8), step.longest_within(8)) == ({None: 400, 8: 32}, 32, 8)
