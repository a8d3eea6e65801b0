"""Stages: against sums over single sequences, published rules of thumb and shares, bytes by hand."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from plait.cost import model_costs, stage_costs
from plait.cost.generation import decode, prefill
from plait.cost.lengths import constant_length, log_normal_lengths, observed_lengths
from plait.cost.model_catalogue import find_model
from plait.cost.stage_costs import StepBatch
from plait.cost.state import PRECISION_RECIPES
from plait.cost.tokens import packed_tokens
from plait.parallel.degrees import Layout

SPEC = find_model("Qwen2.5-7B")
BATCH = StepBatch(8, 4, 512, constant_length(2000), num_tokens_per_microbatch=16_384)


def test_totals_are_the_sum_over_sequences():
    spec = find_model("gpt-oss-20b")
    seen = [10, 300, 300, 77]
    batch = StepBatch(1, 4, 50, observed_lengths(seen), num_tokens_per_microbatch=4096)
    lengths = 50 + np.array(seen)
    tokens = packed_tokens(lengths, spec.windows, num_head_tokens=sum(seen))
    forward = model_costs.forward(spec, tokens, 2, with_logprobs=True)
    old = stage_costs.log_probabilities("old_logprob", spec, batch)
    assert old.flop == pytest.approx(forward.flop)
    assert old.work == pytest.approx(forward.work)
    trained = stage_costs.update("update_policy", spec, batch)
    assert trained.flop == pytest.approx(model_costs.train(spec, tokens, 2).flop)
    found = stage_costs.generate(spec, batch)
    expected = prefill(spec, 4, 50, 2).flop + sum(decode(spec, 50, t, 2).flop for t in seen)
    assert found.flop == pytest.approx(expected)
    shared = stage_costs.generate(spec, batch, shares_prefixes=True)
    assert found.flop - shared.flop == pytest.approx(prefill(spec, 3, 50, 2).flop)


def test_rules_of_thumb_for_short_sequences():
    # In units of N x tokens: generate 2, each log-probability pass 2, update 6. N without the embedding's rows, which
    # multiply nothing; logits are only for responses.
    batch = StepBatch(8, 4, 1, constant_length(100), num_tokens_per_microbatch=4096)
    unit = (SPEC.num_parameters - SPEC.parameters.embedding) * 32 * 101
    assert stage_costs.generate(SPEC, batch).flop / unit == pytest.approx(2, rel=0.02)
    assert stage_costs.log_probabilities("ref_logprob", SPEC, batch).flop / unit == pytest.approx(2, rel=0.02)
    assert stage_costs.update("update_policy", SPEC, batch).flop / unit == pytest.approx(6, rel=0.02)
    layers = SPEC.num_parameters - SPEC.parameters.embedding - SPEC.parameters.head
    assert stage_costs.value(SPEC, batch).flop / (layers * 32 * 101) == pytest.approx(2, rel=0.02)
    critic = stage_costs.update("update_critic", SPEC.with_scalar_head(), batch)
    assert critic.flop / (layers * 32 * 101) == pytest.approx(6, rel=0.02)


def test_generation_is_a_third_of_the_update():
    # Qwen2.5-7B, 512 + 2,000 tokens: one inference pass, a third of the update.
    generated, old = stage_costs.generate(SPEC, BATCH).flop, stage_costs.log_probabilities("old_logprob", SPEC, BATCH)
    trained = stage_costs.update("update_policy", SPEC, BATCH, implementation="eager").flop
    assert generated / old.flop == pytest.approx(1, rel=0.02)
    assert generated / trained == pytest.approx(1 / 3, rel=0.02)


def test_updates_multiply_depth_and_epochs_work():
    one = stage_costs.update("update_policy", SPEC, BATCH)
    four = stage_costs.update("update_policy", SPEC, replace(BATCH, num_sequences_per_minibatch=8))
    assert four.flop == pytest.approx(one.flop)
    # Fewer tokens per update: four times all but two levels of the trees over tokens.
    assert one.depth * 4 - 40 <= four.depth <= one.depth * 4
    twice = stage_costs.update("update_policy", SPEC, replace(BATCH, num_epochs=2))
    assert (twice.flop, twice.depth) == pytest.approx((2 * one.flop, 2 * one.depth), rel=1e-3)
    again = stage_costs.update("update_policy", SPEC, BATCH, Layout(recompute="full"))
    # All products of the layers but the last: queries, output, keys, values, gate, up; and attention's.
    matrices = 2 * 3584**2 + 2 * 3584 * 512 + 2 * 3584 * 18_944
    core = 4 * 3584 * 32 * 2512 * 2513 / 2
    assert again.flop - one.flop == pytest.approx(28 * (2 * 32 * 2512 * matrices + core))


@pytest.mark.parametrize(
    ("text", "sp"), [("fsdp4", False), ("dp2fsdp2", False), ("tp4", False), ("tp4", True), ("fsdp2cp2tp2", True)]
)
def test_ranks_share_the_work(text, sp):
    layout = Layout.parse(text, sp=sp)
    for stage in (
        stage_costs.log_probabilities("old_logprob", SPEC, BATCH, layout),
        stage_costs.update("update_policy", SPEC, BATCH, layout),
        stage_costs.generate(SPEC, BATCH, layout),
    ):
        if stage.stage == "generate" and "cp" in text:
            continue
        assert stage.rank_flop * layout.world_size == pytest.approx(stage.flop, rel=1e-6), stage.stage
    whole = stage_costs.update("update_policy", SPEC, BATCH)
    part = stage_costs.update("update_policy", SPEC, BATCH, layout)
    assert (part.work, part.depth) == (pytest.approx(whole.work), whole.depth)
    assert part.rank_hbm_bytes < whole.rank_hbm_bytes
    assert part.memory_bytes < whole.memory_bytes


def test_the_last_pipeline_stage_is_the_busiest():
    layout = Layout(pp=4)
    found = stage_costs.update("update_policy", SPEC, BATCH, layout)
    whole = stage_costs.update("update_policy", SPEC, BATCH)
    assert whole.flop / 4 < found.rank_flop < whole.flop / 3
    assert found.depth == whole.depth
    # 28 layers in four: the first stage keeps four microbatches, the last has the head and the logits.
    assert set(found.memory) == {
        "parameters",
        "gathered",
        "gradients",
        "optimizer",
        "activations",
        "logits",
    }


def test_memory_of_an_update_by_hand():
    layout = Layout(dp_shard=8)
    found = stage_costs.update("update_policy", SPEC, BATCH, layout, logits_chunk=1024).memory
    assert found["parameters"] == 4 * SPEC.num_parameters / 8
    assert found["gradients"] == 4 * SPEC.num_parameters / 8
    assert found["optimizer"] == 8 * SPEC.num_parameters / 8
    assert found["gathered"] == 2 * 2 * 2 * 152_064 * 3584
    # 4 of 32 sequences of 2,512 tokens per rank fit into one microbatch.
    per_token = 2 * (4 * 3584 + 2 * 3584 + 2 * 512 + 3 * 18_944) + 4 * 28
    outside = 2 * 2 * 3584 + 2 * 2 * 128
    assert found["activations"] == pytest.approx(4 * 2512 * (28 * per_token + outside))
    assert found["logits"] == 1024 * 152_064 * 10


def test_traffic_of_generation_is_its_closed_form():
    # Weights until the longest ends, caches by the second moment: formula for a memory-bound rollout.
    lengths = log_normal_lengths(800, 1.0, 4096)
    batch = StepBatch(16, 8, 300, lengths, num_tokens_per_microbatch=16_384)
    found = stage_costs.generate(SPEC, batch)
    weights = 2 * (SPEC.num_parameters - SPEC.parameters.embedding)
    cache = SPEC.kv_bytes_per_token(2)
    steps = lengths.expected_max(128) * weights + cache * 128 * (300 * lengths.mean + lengths.second_moment / 2)
    # Activations and sampling come on top.
    assert steps < found.rank_hbm_bytes < 1.25 * steps
    assert found.memory["kv_cache"] == pytest.approx(128 * cache * (300 + lengths.second_moment / (2 * lengths.mean)))
    few = stage_costs.generate(SPEC, batch, num_slots=16)
    assert few.rank_hbm_bytes > found.rank_hbm_bytes
    assert few.memory["kv_cache"] * 8 == pytest.approx(found.memory["kv_cache"])


def test_host_stages():
    batch = StepBatch(16, 8, 300, constant_length(1000), num_tokens_per_microbatch=1000)
    checked = stage_costs.score_verifier(batch, 0.5)
    assert (checked.cpu_s, checked.longest_cpu_s) == (64.0, 0.5)
    spread = stage_costs.score_verifier(batch, observed_lengths([1, 1, 1, 9]), resolution_s=0.1)
    assert spread.cpu_s == pytest.approx(128 * 0.3)
    assert spread.longest_cpu_s == pytest.approx(0.9, rel=1e-6)
    assert stage_costs.advantage(batch).work == 5 * 128 + 4 * 16
    assert stage_costs.advantage(batch).depth == 2 * 3 + 7
    gae = stage_costs.advantage(batch, uses_values=True)
    assert (gae.work, gae.depth) == (9 * 128 * 1000, 3 + 4 * 10)


def test_dynamic_sampling_by_chance():
    rng = np.random.default_rng(2)
    rates = rng.beta(1, 2, size=400)
    group = rng.random((50, 400, 4)) < rates[:, None]
    is_mixed = (group.any(-1) & ~group.all(-1)).mean()
    assert stage_costs.expected_rounds(rates, 4) == pytest.approx(1 / is_mixed, rel=0.02)


def test_a_reward_model_scores_a_sequence_once():
    found = stage_costs.score_reward(SPEC, BATCH)
    critic = stage_costs.value(SPEC, BATCH)
    assert critic.flop - found.flop == pytest.approx(2 * 3584 * (32 * 2000 - 32))
    scalar = SPEC.with_scalar_head()
    assert scalar.num_parameters == SPEC.num_parameters - SPEC.parameters.head + 3584
    assert find_model("Qwen3-4B").with_scalar_head().parameters.head == 2560
    recipe = PRECISION_RECIPES["inference_fp8"]
    small = stage_costs.score_reward(SPEC, BATCH, Layout(tp=2), recipe=recipe)
    assert small.memory["parameters"] < found.memory["parameters"] / 3.9


def test_importing_and_planning_is_quick():
    code = (
        "import time; t = time.perf_counter(); import plait.cost.stage_costs, plait.cost.cluster_catalogue, sys;"
        "print(time.perf_counter() - t); assert 'torch' not in sys.modules and 'sympy' not in sys.modules"
    )
    runs = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    # A loaded machine delays single runs, not all.
    assert min(runs) < 0.3


def test_a_sequence_is_not_divided_over_replicas():
    batch = StepBatch(1, 2, 512, constant_length(2000), num_tokens_per_microbatch=16_384)
    alone = stage_costs.update("update_policy", SPEC, batch, Layout(dp_shard=8)).passes
    assert alone.num_tokens_per_microbatch == pytest.approx(2512)
    assert stage_costs.update("update_policy", SPEC, batch, Layout(dp_shard=2)).passes.micro.flop == alone.micro.flop


def test_offloaded_units_pass_through_the_device():
    found = stage_costs.update("update_policy", SPEC, BATCH, Layout(offload="all"), recipe=PRECISION_RECIPES["fp32"])
    # The largest unit is the embedding with the head: two of them, 4 bytes a number.
    assert found.memory["gathered"] == 2 * 4 * 2 * 152_064 * 3584
    assert (found.memory["parameters"], found.memory["gradients"], found.memory["optimizer"]) == (0, 0, 0)
