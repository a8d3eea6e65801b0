"""Generation: products against the FLOP counter, sums against loops, times against a simulation, lengths by chance."""

import numpy as np
import pytest
import torch
from small_models import build, small_config
from torch.utils.flop_counter import FlopCounterMode

from plait.cost import generation, model_costs
from plait.cost.layers import Division
from plait.cost.lengths import Lengths, any_alive, constant_length, log_normal_lengths, observed_lengths
from plait.cost.model_catalogue import find_model
from plait.cost.model_config import model_spec
from plait.cost.tokens import decode_tokens, uniform_tokens


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_flop_of_generating_with_a_cache(kind):
    torch.manual_seed(1)
    # Windows are switched off: the eager cache of a window would keep one token more than the window sees.
    change = {"use_sliding_window": False} if kind == "qwen2" else {}
    config = small_config(kind, **change)
    model, spec = build(config).eval(), model_spec(config.to_dict())
    prompt, response = 9, 12
    ids = torch.randint(0, 96, (1, prompt))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        for _ in range(response - 1):
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, cache=out.cache, use_cache=True)
    first = uniform_tokens(1, prompt, spec.windows, num_head_tokens=1, mode="square")
    predicted = model_costs.forward(spec, first, 4).flop + generation.decode(spec, prompt, response, 4).flop
    assert predicted == pytest.approx(counter.get_total_flops(), rel=5e-3)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt_oss", "deepseek_v3"])
def test_decoding_is_the_sum_of_its_steps(kind):
    spec = model_spec(small_config(kind).to_dict())
    prompt, response = 5, 30
    steps = [model_costs.forward(spec, decode_tokens(1, prompt + t, spec.windows), 2) for t in range(1, response)]
    whole = generation.decode(spec, prompt, response, 2)
    assert whole.flop == pytest.approx(sum(step.flop for step in steps))
    draw = generation.op.sampling(1, 96, 2)
    assert whole.depth == sum(step.depth for step in steps) + (response - 1) * draw.depth
    assert whole.work == pytest.approx(sum(step.work for step in steps) + (response - 1) * draw.work)
    reads = [generation.decode_step(spec, 1, prompt + t) for t in range(1, response)]
    assert whole.hbm_bytes == pytest.approx(sum(step.hbm_bytes for step in reads), rel=0.02)


def test_the_sum_of_tree_depths():
    for n in range(1, 70):
        assert generation.summed_tree_depth(n) == sum(int(np.ceil(np.log2(x))) for x in range(1, n + 1))


def test_a_decode_step_by_hand():
    # Llama-3-8B, 64 sequences of 1,000 tokens in bf16: weights without the embedding's rows, 131,072 bytes of KV each.
    spec = find_model("Llama-3-8B")
    step = generation.decode_step(spec, 64, 1000)
    assert step.weight_bytes == 2 * (8_030_261_248 - 128_256 * 4096)
    assert step.kv_bytes == 64 * 131_072 * 1001
    linear = 2 * (8_030_261_248 - 128_256 * 4096 - 65 * 4096)
    assert step.flop == 64 * linear + 4 * 32 * 4096 * 64 * 1000
    # Activations of 64 tokens are small beside 8 billion weights.
    assert 0 < step.other_bytes < 0.1 * step.weight_bytes
    # fp8 weights and cache halve those two, not the rest.
    small = generation.decode_step(spec, 64, 1000, weight_b=1, kv_b=1)
    assert (small.weight_bytes * 2, small.kv_bytes * 2, small.other_bytes) == (
        step.weight_bytes,
        step.kv_bytes,
        step.other_bytes,
    )
    # A tied head is read where the embedding is not.
    tied = find_model("Qwen2.5-0.5B")
    assert generation.weights_read(tied, 1, 2) == 2 * tied.num_parameters


def test_few_tokens_read_few_experts():
    spec = find_model("Qwen3-30B-A3B")
    dense = spec.num_parameters - spec.parameters.experts - spec.parameters.embedding
    for active, share in ((1, 8 / 128), (32, 1 - (120 / 128) ** 32)):
        expected = 2 * (dense + share * spec.parameters.experts)
        assert generation.weights_read(spec, active, 2) == pytest.approx(expected)
    # Eight ranks that share the experts choose together, and each reads an eighth of what they choose.
    shared = generation.weights_read(spec, 4, 2, Division(ep=8))
    expected = 2 * (dense + (1 - (120 / 128) ** 32) * spec.parameters.experts / 8)
    assert shared == pytest.approx(expected)


def test_kv_slots_by_hand():
    spec = find_model("Llama-3-8B")
    # 40 GB over 1,008 tokens (63 blocks of 16) of 131,072 bytes.
    assert generation.kv_slots(spec, 40e9, 1000) == int(40e9 // (1008 * 131_072))
    assert generation.kv_slots(spec, 40e9, 1000, tp=8) == int(40e9 // (1008 * 131_072 / 8))
    lengths = constant_length(100)
    assert generation.resident_context(50, lengths) == 100


def test_lengths_by_hand():
    lengths = observed_lengths([1, 2, 2, 5])
    assert lengths.survival_T.tolist() == [1.0, 0.75, 0.25, 0.25, 0.25]
    assert lengths.mean == 2.5
    assert lengths.second_moment == (1 + 4 + 4 + 25) / 4
    assert lengths.expect(lambda t: t**3) == (1 + 8 + 8 + 125) / 4
    # Of two: both 1 in 1 of 16, both at most 2 in 9 of 16.
    assert lengths.expected_max(2) == pytest.approx((1 * 1 + 2 * 8 + 5 * 7) / 16)
    rest, age = lengths.residual
    # At a random moment of 10 token places: 4 are in first tokens, 3 in second ones, 1 each after.
    assert rest.tolist() == pytest.approx([(0.75 + 0.25 * 3) / 2.5, 0.75 / 2.5, 0.5 / 2.5, 0.25 / 2.5, 0])
    assert age[0] == pytest.approx((0 * 0.75 + 1 * 0.25 + 2 * 0.25 + 3 * 0.25) / 1.5)
    assert constant_length(7).expected_max(100) == 7
    with pytest.raises(AssertionError):
        Lengths(np.array([1.0, 0.2, 0.3]))


def test_expected_maximum_is_the_published_one():
    # Mean 2,000, cv 1, cap 8,192: 4,856 of 8 and 8,187 of 256; without a cap 2.65, 5.35, 9.3 times the mean.
    lengths = log_normal_lengths(2000, 1.0, 8192)
    assert lengths.expected_max(8) == pytest.approx(4856, abs=2)
    assert lengths.expected_max(256) == pytest.approx(8187, abs=2)
    free = log_normal_lengths(1000, 1.0, 200_000)
    assert free.mean == pytest.approx(1000, rel=1e-3)
    assert free.second_moment == pytest.approx(2e6, rel=5e-3)
    for n, times in ((8, 2.65), (64, 5.35), (512, 9.3)):
        assert free.expected_max(n) / 1000 == pytest.approx(times, rel=0.02)


def test_expected_maximum_by_chance():
    lengths = log_normal_lengths(80, 0.7, 300)
    rng = np.random.default_rng(3)
    probabilities = lengths.survival_T - np.append(lengths.survival_T[1:], 0)
    drawn = rng.choice(np.arange(1, 301), size=(20_000, 16), p=probabilities)
    assert lengths.expected_max(16) == pytest.approx(drawn.max(1).mean(), rel=0.01)
    assert lengths.mean == pytest.approx(drawn.mean(), rel=0.01)


def _simulate(lengths, num_sequences, num_slots, prompt, step_s, rng):
    """Event by event: slots are refilled at once; prefill gives each its first token."""
    probabilities = lengths.survival_T - np.append(lengths.survival_T[1:], 0)
    waiting = list(rng.choice(np.arange(1, lengths.cap + 1), size=num_sequences, p=probabilities))
    total, done = np.zeros(0, dtype=int), np.zeros(0, dtype=int)
    seconds, steps = 0.0, 0
    while waiting or len(total):
        free = num_slots - len(total)
        total, done = np.append(total, waiting[:free]), np.append(done, np.ones(len(waiting[:free]), dtype=int))
        waiting = waiting[free:]
        running = total > done
        total, done = total[running], done[running]
        if len(total):
            jump = int((total - done).min())
            contexts = prompt + 1 + done.mean() + np.arange(jump) - 1
            seconds += step_s(np.full(jump, len(total)), contexts).sum()
            steps += jump
            done = done + jump
    return seconds, steps


@pytest.mark.parametrize("cv", [0.5, 1.0])
@pytest.mark.parametrize(("num_sequences", "num_slots"), [(64, 64), (64, 32), (128, 32), (512, 64)])
def test_rollout_time_is_what_a_simulation_takes(cv, num_sequences, num_slots):
    lengths = log_normal_lengths(300, cv, 1200)
    rng = np.random.default_rng(1)

    def step_s(active, context):
        return 1.0 + 0.01 * active + 1e-5 * active * context

    runs = np.array([_simulate(lengths, num_sequences, num_slots, 50, step_s, rng) for _ in range(60)])
    found = generation.rollout_time(step_s, num_sequences, 50, lengths, num_slots)
    # 60 runs have a standard error of at most 2.5 %; the start, when all slots are young, is left out (up to 4 %).
    assert found.seconds == pytest.approx(runs[:, 0].mean(), rel=0.06)
    assert found.num_steps == pytest.approx(runs[:, 1].mean(), rel=0.07)


def test_the_memory_bound_limit_is_its_closed_form():
    # Weights are read until the longest ends, caches by the second moment: E[max] w + k n (S E[T] + E[T^2] / 2).
    lengths = log_normal_lengths(2000, 1.0, 8192)
    w, k, n, prompt = 1e-3, 1e-9, 128, 500
    found = generation.rollout_time(lambda active, context: w + k * active * context, n, prompt, lengths)
    closed = lengths.expected_max(n) * w + k * n * (prompt * lengths.mean + lengths.second_moment / 2)
    assert found.seconds == pytest.approx(closed, rel=2e-3)


def test_small_survivals_are_not_lost():
    assert any_alive(np.array([1e-18]), 1e6)[0] == pytest.approx(1e-12)
    assert any_alive(np.array([1.0, 0.5, 0.0]), 2).tolist() == [1.0, 0.75, 0.0]
