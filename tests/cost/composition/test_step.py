"""Whole steps: work, depth, memory, sharing, bounds; against hand calculation, longest paths and greedy schedules."""

from dataclasses import replace

import numpy as np
import pytest
from event_simulation import greedy_makespan
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost import stage_costs
from plait.cost.composition.bounds import PoolRates, brent_op, brent_s
from plait.cost.composition.fusion import PieceCounts
from plait.cost.composition.placement import placement_kind, pools_of
from plait.cost.composition.pool_memory import state_names
from plait.cost.composition.sharing import scalar_head, share
from plait.cost.composition.step import Arrangement, Schedule, compose, longest_chain
from plait.cost.lengths import constant_length
from plait.cost.model_catalogue import find_model
from plait.cost.parameter_tensors import DecoderShape
from plait.cost.reshard import nested_places, reshard, reshard_time_s
from plait.cost.stage_costs import StepBatch
from plait.cost.stage_estimate import StageEstimate
from plait.parallel.degrees import Layout
from plait.stages.graph import Stage, StepGraph

settings.register_profile("plait", deadline=None, derandomize=True)
settings.load_profile("plait")


def stage(name, role, kind, reads, writes, granularity="sample"):
    return Stage(name, (role,), kind, frozenset(reads.split()), frozenset(writes.split()), granularity)


PPO = StepGraph(
    [
        stage("generate", "policy", "generation", "prompts engine_weights@v", "samples"),
        stage("score_verifier", "verifier", "host", "samples", "verdicts"),
        stage("old_logprob", "policy", "inference", "samples policy_weights@v", "old_logprobs"),
        stage("ref_logprob", "reference", "inference", "samples reference_weights", "ref_logprobs"),
        stage("value", "critic", "inference", "samples critic_weights@v", "values"),
        replace(stage("advantage", "none", "host", "verdicts values", "advantages"), roles=()),
        stage(
            "update_policy",
            "policy",
            "training",
            "advantages old_logprobs ref_logprobs policy_weights@v",
            "policy_weights@v+1",
            "minibatch",
        ),
        stage("update_critic", "critic", "training", "advantages values critic_weights@v", "critic_weights@v+1"),
        stage("sync_weights", "policy", "transfer", "policy_weights@v+1", "engine_weights@v+1", "step"),
    ],
    inputs={"prompts", "engine_weights@v", "policy_weights@v", "critic_weights@v", "reference_weights"},
    outputs={"policy_weights@v+1", "critic_weights@v+1", "engine_weights@v+1"},
)
NAMES = tuple(s.name for s in PPO.stages)


def estimate(name, time_s=1.0, *, work=100.0, depth=10.0, rounds=1, memory=None, num_devices=8, **fields):
    values = {
        "name": name,
        "work_op": work,
        "depth_op": depth,
        "num_rounds": rounds,
        "flop": 0.9 * work,
        "sent_bytes": 5.0,
        "hbm_bytes": 50.0,
        "terms_s": {"compute": time_s},
        "time_s": time_s,
        "low_s": 0.5 * time_s,
        "high_s": 2 * time_s,
        "bottleneck": "compute",
        "num_devices": num_devices,
        "memory": memory or {},
        "granularity": "step",
        "num_pieces": 1,
    }
    return StageEstimate(**(values | fields))


TIMES = {
    "generate": 10.0,
    "score_verifier": 3.0,
    "old_logprob": 2.0,
    "ref_logprob": 2.5,
    "value": 1.5,
    "advantage": 0.1,
    "update_policy": 6.0,
    "update_critic": 5.0,
    "sync_weights": 0.5,
}
ESTIMATES = {name: estimate(name, time) for name, time in TIMES.items()}


def arranged(place=None, **options):
    return Arrangement(pools_of(PPO, place or {}, "all"), **options)


def test_colocated_by_hand():
    found = compose(PPO, ESTIMATES, arranged())
    # Everything in turns; the verifier runs on the host beside the three passes (2 + 2.5 + 1.5 > 3), then the rest.
    assert found.time_s == pytest.approx(10 + 6 + 0.1 + 6 + 5 + 0.5)
    assert (found.low_s, found.high_s) == (pytest.approx(found.time_s / 2), pytest.approx(found.time_s * 2))
    assert found.pools["host"].busy_s == pytest.approx(3.1)
    assert found.pools["all"].idle_share == pytest.approx(0.1 / found.time_s)
    assert (found.work_op, found.num_rounds) == (900, 5)
    # generate, one pass, advantage, one update, sync: siblings count once.
    assert found.depth_op == 50
    assert found.parallelism == 18


def test_disaggregated_by_hand():
    place = {"policy": "policy", "critic": "critic", "reference": "reference", "generate": "rollout"}
    found = compose(PPO, ESTIMATES, arranged(place))
    # Passes beside each other, so the verifier is the longest; updates beside each other.
    assert found.time_s == pytest.approx(10 + 3 + 0.1 + 6 + 0.5)
    assert found.pools["critic"].idle_share == pytest.approx(1 - 6.5 / found.time_s)
    assert found.depth_op == compose(PPO, ESTIMATES, arranged()).depth_op
    fused = dict.fromkeys(("score_verifier", "ref_logprob", "value"), "sample")
    sampled = {n: replace(e, granularity="sample", num_pieces=100) for n, e in ESTIMATES.items() if n != "sync_weights"}
    pieces = PieceCounts(num_samples=100)
    streamed = compose(PPO, ESTIMATES | sampled, arranged(place, fuse=fused, pieces=pieces))
    # Assessment ends one piece after generation, but for old_logprob, which waits; then advantage and updates.
    assert streamed.time_s == pytest.approx(10 + 2 + 6 + 0.5)
    assert streamed.spans[1, "ref_logprob"].start_s == pytest.approx(0.1)
    assert streamed.spans[1, "score_verifier"].end_s == pytest.approx(10 + 0.03)


def test_steps_and_schedules():
    place = {"generate": "rollout", "sync_weights": ("rollout", "all")}
    one = compose(PPO, ESTIMATES, arranged(place))
    for schedule in (Schedule(), Schedule("fully_async", 0)):
        four = compose(PPO, ESTIMATES, arranged(place, schedule=schedule), num_steps=4)
        assert (four.time_s, four.step_s) == (pytest.approx(4 * one.time_s), pytest.approx(one.time_s))
        assert (four.work_op, four.depth_op) == (4 * one.work_op, 4 * one.depth_op)
    late = compose(PPO, ESTIMATES, arranged(place, schedule=Schedule("one_step_off_policy", 1)), num_steps=4)
    assert late.time_s < four.time_s
    # The depth of a step is that of its longer half once generation runs ahead: 10 for generation, 40 for the rest,
    # of which old_logprob, advantage and update are a chain through the policy's weights.
    assert late.depth_op == 50 + 3 * 30
    with pytest.raises(AssertionError, match="fixed staleness"):
        Schedule("sync", 1)


def test_many_plans_at_once():
    rng = np.random.default_rng(3)
    scale = {name: rng.uniform(0.5, 2, 20) for name in NAMES}
    arrays = {n: replace(e, time_s=e.time_s * scale[n], low_s=e.low_s * scale[n]) for n, e in ESTIMATES.items()}
    found = compose(PPO, arrays, arranged({"generate": "rollout"}))
    for i in (0, 7, 19):
        alone = {n: replace(e, time_s=e.time_s * scale[n][i]) for n, e in ESTIMATES.items()}
        assert found.time_s[i] == pytest.approx(compose(PPO, alone, arranged({"generate": "rollout"})).time_s)


STATE = {"parameters": 2.0, "gradients": 4.0, "optimizer": 12.0}


def test_memory_of_a_pool_over_a_step():
    memory = {
        "generate": {"parameters": 1.0, "kv_cache": 30.0},
        "old_logprob": {"parameters": 2.0, "logits": 3.0},
        "ref_logprob": {"parameters": 2.0, "logits": 3.0},
        "value": {"parameters": 2.0},
        "update_policy": {**STATE, "activations": 20.0},
        "update_critic": {**STATE, "activations": 21.0},
    }
    estimates = {n: replace(e, memory=memory.get(n, {})) for n, e in ESTIMATES.items()}
    layouts = dict.fromkeys(NAMES, "fsdp8") | {"generate": "dp4tp2"}
    found = compose(PPO, estimates, arranged(layouts=layouts)).pools["all"]
    # Policy, critic and reference stay, and the engine's copy, which has a layout of its own: 14 + 14 + 2 + 1.
    by_stage = {moment.stage: moment.total_bytes for moment in found.held}
    assert by_stage[None] == by_stage["sync_weights"] == 31
    assert by_stage["generate"] == 61
    assert by_stage["update_critic"] == 31 + 4 + 21
    assert found.peak_bytes == 61
    # Nothing is held twice where the engine uses the trainer's layout.
    same = compose(PPO, estimates, arranged(layouts=dict.fromkeys(NAMES, "fsdp8"))).pools["all"]
    assert same.peak_bytes == 60
    away = compose(PPO, estimates, arranged(layouts=layouts, offloaded=frozenset({"policy", "critic"}))).pools["all"]
    by_stage = {moment.stage: moment.total_bytes for moment in away.held}
    assert (by_stage[None], by_stage["generate"], by_stage["update_critic"]) == (3, 33, 3 + 14 + 4 + 21)
    assert away.peak_bytes == 42
    # Apart and asynchronous: the engine's pool holds the weights that still generate and those that arrive.
    schedule = Schedule("one_step_off_policy", 1)
    apart = compose(PPO, estimates, arranged({"generate": "rollout"}, layouts=layouts, schedule=schedule))
    assert apart.pools["rollout"].peak_bytes == 1 + 1 + 30
    assert apart.pools["all"].peak_bytes == 30 + 4 + 21


def test_names_of_placements():
    assert placement_kind(PPO, pools_of(PPO, {}, "all")) == "colocated"
    layouts = dict.fromkeys(NAMES, "fsdp8")
    assert placement_kind(PPO, pools_of(PPO, {}, "all"), layouts) == "colocated"
    assert placement_kind(PPO, pools_of(PPO, {}, "all"), layouts | {"generate": "tp8"}) == "hybrid"
    assert placement_kind(PPO, pools_of(PPO, {"generate": "rollout"}, "all")) == "disaggregated"
    both = {"generate": "a", "policy": ("a", "b"), "critic": "b"}
    assert placement_kind(PPO, pools_of(PPO, both, "b")) == "partly_colocated"
    assert state_names(PPO, layouts)["generate"] == "policy"
    assert state_names(PPO, layouts | {"generate": "tp8"})["generate"] == "engine"


def test_partly_colocated_stages_wait_for_both_pools():
    place = {"generate": "a", "reference": "b", "critic": "b", "policy": ("a", "b")}
    found = compose(PPO, ESTIMATES, arranged(place))
    # old_logprob takes both pools, then reference and value follow on b; the policy's update needs both again.
    assert found.spans[1, "old_logprob"].start_s == 10
    assert found.spans[1, "ref_logprob"].start_s == 12
    assert found.spans[1, "update_policy"].start_s == pytest.approx(12 + 4 + 0.1)


def test_a_shared_trunk_lowers_work():
    spec = find_model("Qwen2.5-0.5B")
    batch = StepBatch(4, 4, 100, constant_length(400), num_tokens_per_microbatch=8192)
    critic = spec.with_scalar_head()
    costs = {
        "generate": stage_costs.generate(spec, batch),
        "old_logprob": stage_costs.log_probabilities("old_logprob", spec, batch),
        "ref_logprob": stage_costs.log_probabilities("ref_logprob", spec, batch),
        "value": stage_costs.value(spec, batch),
        "update_policy": stage_costs.update("update_policy", spec, batch),
        "update_critic": stage_costs.update("update_critic", critic, batch),
    }
    estimates = {n: replace(e, work_op=costs[n].work, flop=costs[n].flop) if n in costs else e
                 for n, e in ESTIMATES.items()}  # fmt: skip
    heads = {
        "value": scalar_head(16 * 400, spec.hidden_size, 2, is_training=False),
        "update_critic": scalar_head(16 * 400, spec.hidden_size, 2, is_training=True),
    }

    def of(sharing):
        graph, changed = share(sharing, PPO, estimates, heads=heads)
        return graph, compose(graph, changed, Arrangement(pools_of(graph, {}, "all")))

    (graph, independent), (shared_graph, shared), (free_graph, free) = map(
        of, ("independent", "shared_trunk", "critic_free")
    )
    assert graph is PPO
    assert [s.name for s in free_graph.stages] == [n for n in NAMES if n not in ("value", "update_critic")]
    assert independent.work_op - free.work_op == pytest.approx(costs["value"].work + costs["update_critic"].work)
    # 2 D per token forward, 4 D backward.
    assert shared.work_op - free.work_op == pytest.approx((2 + 6) * spec.hidden_size * 16 * 400)
    assert free.time_s < shared.time_s < independent.time_s
    assert shared_graph["update_policy"].writes == {"policy_weights@v+1", "critic_weights@v+1"}
    assert shared_graph["advantage"].reads == {"verdicts", "values"}
    # Without old_logprob the values need a pass of their own, on the policy's weights.
    short = StepGraph(
        [replace(s, reads=s.reads - {"old_logprobs"}) for s in PPO.stages if s.name != "old_logprob"],
        inputs=PPO.inputs,
        outputs=PPO.outputs,
    )
    alone, _ = share("shared_trunk", short, {n: e for n, e in estimates.items() if n != "old_logprob"}, heads=heads)
    assert alone["value"].roles == ("policy", "critic")


def test_resharding_between_hybrid_layouts():
    shape, source, target = DecoderShape(24, 896, 16, 16, 56, 4864, 1024), Layout.parse("tp8"), Layout.parse("dp4tp2")
    moved = {
        name: reshard(shape, source, target, target_places=places)
        for name, places in (("contiguous", None), ("nested", nested_places(source, target)))
    }
    plain, nested = moved["contiguous"], moved["nested"]
    busiest = max(nested.received_bytes.max(), nested.sent_bytes.max())
    found = reshard_time_s(nested, in_bytes_per_s=3e11, out_bytes_per_s=3e11, num_buckets=4, alpha_s=1e-5)
    assert found == pytest.approx(busiest / 3e11 + 4e-5)
    # A rank's part in the target contains the one it holds: it receives less and keeps nothing beside it.
    assert nested.sent_bytes.max() < plain.sent_bytes.max()
    assert nested.peak_extra_bytes.max() < plain.peak_extra_bytes.max()
    assert nested.peak_extra_bytes.max() == nested.needed_bytes.max() - nested.held_bytes.min()


@st.composite
def random_dags(draw):
    count = draw(st.integers(1, 40))
    return {i: draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set() for i in range(count)}


@settings(max_examples=200)
@given(random_dags(), st.integers(1, 6), st.integers(0, 5))
def test_brents_bounds_hold_for_greedy_schedules(before, num_processors, seed):
    took = greedy_makespan(dict.fromkeys(before, 1.0), before, num_processors, seed)
    longest = {}
    for task in sorted(before):
        longest[task] = 1 + max((longest[other] for other in before[task]), default=0)
    bounds = brent_op(len(before), max(longest.values()), num_processors)
    assert bounds.least <= took <= bounds.most
    # The same in seconds on a machine with so many operations in flight.
    latency = 3e-9
    seconds = brent_s(len(before), max(longest.values()), num_processors / latency, latency)
    assert (seconds.least, seconds.most) == (
        pytest.approx(bounds.least * latency),
        pytest.approx(bounds.most * latency),
    )


@given(st.dictionaries(st.sampled_from(NAMES), st.integers(1, 50), min_size=1), st.integers(1, 4))
def test_depth_is_the_longest_path_of_the_graph(given_depths, num_steps):
    depths = {name: given_depths.get(name, 1) for name in NAMES}
    longest = {}
    for one in PPO.stages:
        longest[one.name] = depths[one.name] + max((longest[p] for p in PPO.predecessors[one.name]), default=0)
    assert longest_chain(PPO, depths) == max(longest.values())
    assert longest_chain(PPO, depths, num_steps) == num_steps * max(longest.values())
    assert longest_chain(PPO, depths, num_steps, 1) <= num_steps * max(longest.values())


rates = {name: PoolRates(8, 100.0, 1000.0, 10.0) for name in ("all", "rollout")}


@given(st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4), st.floats(0, 100)), min_size=9, max_size=9),
       st.sampled_from(["all", "rollout"]), st.integers(0, 2), st.integers(1, 4))  # fmt: skip
def test_no_arrangement_beats_its_resources(asked, generating, staleness, num_steps):
    """Stage times from the same peak rates: the whole can only take longer than each resource."""
    estimates = {}
    for name, (flop, hbm, sent) in zip(NAMES, asked, strict=True):
        on_host = PPO[name].kind == "host"
        time = 1.0 if on_host else max(flop / 800, hbm / 1000, sent / 10)
        work = 0.0 if on_host else flop
        estimates[name] = estimate(name, time, work=work, flop=work, depth=2.0, hbm_bytes=hbm, sent_bytes=sent)
    found = compose(
        PPO,
        estimates,
        arranged({"generate": generating}, schedule=Schedule("fully_async", staleness)),
        rates={pool: rates[pool] for pool in {generating, "all"}},
        dependent_op_s=1e-6,
        num_steps=num_steps,
    )
    assert 0 < found.least_s <= found.time_s * (1 + 1e-9)
    busiest = max(sum(estimates[s.name].flop for s in PPO.stages if s.kind != "host") / 1600 * num_steps, 0)
    assert found.least_s >= busiest * (1 - 1e-9)
    assert found.brent_s.least <= found.brent_s.most


def test_resource_bound_by_hand():
    estimates = {
        n: replace(e, flop=800.0, work_op=800.0, hbm_bytes=3000.0, sent_bytes=4.0) for n, e in ESTIMATES.items()
    }
    found = compose(PPO, estimates, arranged(), rates={"all": rates["all"]})
    # Seven stages on devices: 7 s of products, 21 s of memory traffic, 2.8 s of network.
    assert found.least_s == pytest.approx(21)
    # W / (sum of rates): nine stages of 800 operations on 8 x 100 per second; a chain of 50 takes next to nothing.
    assert found.brent_s.least == pytest.approx(9)
