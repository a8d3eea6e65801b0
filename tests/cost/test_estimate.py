"""Stage estimates: limits of one device, sums by cause, a loop over decode steps, memory against its own functions."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost import stage_costs
from plait.cost.activations import activation_bytes
from plait.cost.cluster_catalogue import find_cluster
from plait.cost.estimate import estimate_stage
from plait.cost.estimate_generate import num_slots
from plait.cost.fit import stage_memory
from plait.cost.generation import decode_step
from plait.cost.layers import Division
from plait.cost.lengths import constant_length, log_normal_lengths
from plait.cost.model_catalogue import find_model
from plait.cost.residence import resident_bytes
from plait.cost.setting import Setting
from plait.cost.stage_costs import StepBatch
from plait.cost.stage_times import Pieces
from plait.cost.state import PRECISION_RECIPES, rank_state
from plait.parallel.degrees import Layout

SPEC = find_model("Qwen2.5-7B")
STAGES = ("generate", "score_verifier", "old_logprob", "ref_logprob", "advantage", "update_policy", "sync_weights")
PPO = (
    "generate",
    "score_verifier",
    "old_logprob",
    "value",
    "advantage",
    "update_policy",
    "update_critic",
    "sync_weights",
)
BATCH = StepBatch(8, 8, 256, log_normal_lengths(800, 0.8, 3072), num_tokens_per_microbatch=8192)


def setting(cluster="8xH100", train="fsdp8", generate="dp8", batch=BATCH, **change):
    layouts = {"policy": Layout.parse(train), "reference": Layout.parse(train), "critic": Layout.parse(train)}
    layouts["generate"] = Layout.parse(generate)
    critic = SPEC.with_scalar_head()
    models = {"policy": SPEC, "reference": SPEC, "critic": critic}
    return Setting(models, {"main": find_cluster(cluster)}, batch, layouts, logits_chunk=1024, **change)


@pytest.mark.parametrize(
    ("train", "generate"),
    [("fsdp8", "dp8"), ("fsdp2tp4", "dp2tp4"), ("pp4fsdp2", "dp4tp2"), ("cp2fsdp4", "dp8"), ("dp2fsdp2tp2", "tp8")],
)
def test_causes_add_up_and_lie_between_the_bounds(train, generate):
    for stage in STAGES:
        found = estimate_stage(setting(train=train, generate=generate), stage, STAGES)
        assert sum(found.terms_s.values()) == pytest.approx(found.time_s, rel=1e-9), stage
        assert found.low_s <= found.time_s * (1 + 1e-9), stage
        assert found.time_s <= found.high_s * (1 + 1e-9), stage
        assert min(found.terms_s.values()) >= 0, stage


def test_work_and_depth_are_those_of_the_stage_costs_whatever_the_layout():
    costs = {
        "generate": stage_costs.generate(SPEC, BATCH),
        "old_logprob": stage_costs.log_probabilities("old_logprob", SPEC, BATCH),
        "update_policy": stage_costs.update("update_policy", SPEC, BATCH),
    }
    for train, generate in (("fsdp8", "dp8"), ("fsdp2tp4", "dp2tp4"), ("pp4fsdp2", "dp4tp2")):
        for stage, cost in costs.items():
            found = estimate_stage(setting(train=train, generate=generate), stage, STAGES)
            assert (found.work_op, found.flop) == pytest.approx((cost.work, cost.flop)), stage
            assert found.depth_op == pytest.approx(cost.depth, abs=20), stage
            assert found.num_devices == 8


def test_one_device_sends_nothing_and_reaches_its_rates():
    one = setting("1xH100", "", "")
    cost = stage_costs.update("update_policy", SPEC, BATCH)
    found = estimate_stage(one, "update_policy", STAGES)
    assert (found.sent_bytes, found.num_rounds, found.terms_s["network"], found.terms_s["dependency"]) == (0, 0, 0, 0)
    # H100: 989e12 dense, of which 0.8 x 0.803 are taken as typical (specs/clusters/devices.toml).
    assert found.terms_s["compute"] == pytest.approx(cost.flop / (989e12 * 0.643), rel=1e-2)
    assert found.hbm_bytes == cost.rank_hbm_bytes
    assert found.bottleneck == "compute"
    moved = estimate_stage(one, "sync_weights", STAGES)
    assert (moved.sent_bytes, moved.num_rounds, moved.terms_s["network"]) == (0, 0, 0)
    assert estimate_stage(one, "generate", STAGES).sent_bytes == 0


def test_a_pipeline_fills_and_drains():
    # One replica, so that nothing else is waited for: idle (p - 1) of m microbatches' time of the slowest rank.
    found = estimate_stage(setting("4xH100", "pp4", "dp4"), "update_policy", STAGES)
    m = stage_costs.update("update_policy", SPEC, BATCH, Layout(pp=4)).passes.num_microbatches
    assert m == 9
    busy = found.terms_s["compute"] + found.terms_s["memory"]
    # The optimiser's traffic is in busy, and not in a microbatch.
    assert found.terms_s["dependency"] == pytest.approx(busy * 3 / m, rel=0.1)
    idle = {}
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_v"):
        layouts = {"policy": Layout(pp=4, pp_schedule=schedule), "generate": Layout(dp_replicate=4)}
        how = replace(setting("4xH100"), layouts=layouts)
        idle[schedule] = estimate_stage(how, "update_policy", STAGES).terms_s["dependency"]
    assert idle["gpipe"] == idle["1f1b"]
    assert idle["zero_bubble_v"] < idle["interleaved_1f1b"] < idle["1f1b"]


def test_generation_is_a_loop_over_decode_steps():
    # Equal lengths: every step has all 8 sequences of a replica, at a context one longer.
    batch = StepBatch(8, 8, 256, constant_length(400), num_tokens_per_microbatch=8192)
    found = estimate_stage(setting(batch=batch), "generate", STAGES)
    device = find_cluster("8xH100").device
    rate, bandwidth = 989e12 * device.matmul_share.typical, 3.35e12 * device.memory_share.typical
    looped = 0.0
    for t in range(1, 400):
        step = decode_step(SPEC, 8, 256 + t)
        moved = step.weight_bytes + step.kv_bytes
        looped += max(step.flop / rate, moved / bandwidth) + step.other_bytes / bandwidth
        looped += step.num_operators * device.op_latency_s.typical
    assert looped < found.time_s < 1.1 * looped  # prefill comes on top
    assert found.terms_s["dependency"] == pytest.approx(0, abs=1e-3 * found.time_s)
    assert found.bottleneck == "memory bandwidth"
    spread = estimate_stage(
        setting(batch=replace(batch, lengths=log_normal_lengths(400, 1.5, 4000))), "generate", STAGES
    )
    assert spread.bottleneck == "dependency"


def test_slots_are_what_memory_has_room_for():
    batch = StepBatch(64, 64, 256, constant_length(2000), num_tokens_per_microbatch=8192)
    one = setting("1xH100", "", "", batch)
    # 95 % of 80e9, less 2 bytes a parameter; a slot: 57,344 bytes a token (1,256 of them in blocks of 16), its logits.
    free = 0.95 * 80e9 - 2 * 7_615_616_512
    each = 57_344 * 1264 + 152_064 * 18
    assert num_slots(one, 0) == free // each
    assert num_slots(one, 10e9) == (free - 10e9) // each
    assert num_slots(one, 79e9) == 1
    assert num_slots(replace(one, num_slots=64), 0) == 64
    memory = stage_memory(one, "generate", ("generate",))
    assert sum(memory.values()) <= 0.95 * 80e9


def test_memory_is_that_of_state_and_activations():
    how = setting(train="fsdp8")
    found = estimate_stage(how, "update_policy", STAGES).memory
    state = rank_state(SPEC, PRECISION_RECIPES["fsdp2_fp32_masters"], zero=3, dp_shard=8)
    assert (found["parameters"], found["gradients"], found["optimizer"]) == (
        state.parameters, state.gradients, state.optimizer,
    )  # fmt: skip
    assert found["parameters"] == 4 * 7_615_616_512 / 8
    assert found["buffers"] == state.gathered + 0.4e9
    tokens = BATCH.tokens(SPEC) * (1 / 8)
    micro = tokens * (1 / -(-tokens.num_tokens // 8192))
    kept = activation_bytes(SPEC, micro, 2, division=Division(), logits_chunk=1024)
    assert found["activations"] == pytest.approx(kept.layers + kept.outside)
    assert found["logits"] == pytest.approx(1024 * 152_064 * 10)
    assert found["kv_cache"] == 0


def test_what_stays_on_a_device_beside_a_stage():
    how, n = setting(train="fsdp8"), 7_615_616_512
    critic = n - 152_064 * 3584 + 3584
    # PPO: the critic's fp32 masters and moments, 12 bytes a parameter, while the policy is updated; and the other way.
    assert resident_bytes(how, "update_policy", PPO) == pytest.approx(12 * critic / 8)
    assert resident_bytes(how, "update_critic", PPO) == pytest.approx(12 * n / 8)
    # Generation: both. The engine's own weights are the stage's.
    assert resident_bytes(how, "generate", PPO) == pytest.approx(12 * (n + critic) / 8)
    # A pass of the policy works on its own parameters: their moments stay, and a frozen reference.
    with_reference = resident_bytes(how, "old_logprob", STAGES)
    assert with_reference == pytest.approx(8 * n / 8 + 2 * n / 8)
    layouts = {**how.layouts, "policy": Layout(dp_shard=8, offload="optimizer")}
    away = resident_bytes(replace(how, layouts=layouts), "generate", ("generate", "update_policy"))
    assert away == pytest.approx(4 * n / 8)


def test_offload_is_paid_on_the_way_to_the_host():
    how = setting(train="fsdp8")
    kept = estimate_stage(how, "update_policy", STAGES)
    layouts = {**how.layouts, "policy": Layout(dp_shard=8, offload="optimizer")}
    moved = estimate_stage(replace(how, layouts=layouts), "update_policy", STAGES)
    state = 8 * 7_615_616_512 / 8
    extra = moved.terms_s["network"] - kept.terms_s["network"]
    assert extra == pytest.approx(2 * state / find_cluster("8xH100").device.host_bytes_per_s)
    assert moved.memory["optimizer"] == 0


def test_checks_on_cores():
    how = setting(num_cpu_cores=16, verifier_s=0.5, verifier_longest_s=10.0)
    found = estimate_stage(how, "score_verifier", STAGES, Pieces("sample", 64))
    # 64 checks of half a second on 16 cores: 2 s, and one of them may take 10.
    assert (found.time_s, found.low_s) == (10.0, 10.0)
    assert found.high_s == pytest.approx(2 + 15 / 16 * 10)
    assert (found.bottleneck, found.granularity, found.num_pieces) == ("dependency", "sample", 64)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.integers(2, 64),
    tokens=st.integers(50, 2000),
    train=st.sampled_from(["fsdp8", "fsdp2tp4", "pp2fsdp4"]),
    stage=st.sampled_from(["generate", "ref_logprob", "update_policy"]),
)
def test_more_work_takes_no_less_time(prompts, tokens, train, stage):
    # Enough microbatches for the pipeline, so that none is left out.
    def seconds(num_prompts, num_tokens):
        batch = StepBatch(num_prompts, 16, 200, constant_length(num_tokens), num_tokens_per_microbatch=4096)
        return estimate_stage(setting(train=train, batch=batch), stage, STAGES).time_s

    once = seconds(prompts, tokens)
    # A microbatch more or less rounds launches up or down by some ten microseconds each.
    assert seconds(2 * prompts, tokens) >= once * 0.999
    assert seconds(prompts, 2 * tokens) >= once * 0.999


@settings(max_examples=20, deadline=None)
@given(shard=st.sampled_from([1, 2, 4]), recompute=st.sampled_from(["none", "selective"]))
def test_more_shards_and_more_recompute_need_no_more_memory(shard, recompute):
    def memory(degree, how):
        layouts = {"policy": Layout(dp_shard=degree, recompute=how), "generate": Layout(dp_replicate=degree)}
        found = replace(setting(f"{degree}xH100"), layouts=layouts)
        return sum(stage_memory(found, "update_policy", ("generate", "update_policy")).values())

    assert memory(2 * shard, recompute) <= memory(shard, recompute) + 0.4e9  # one device has no collectives' buffers
    assert memory(shard, "full") <= memory(shard, recompute)
