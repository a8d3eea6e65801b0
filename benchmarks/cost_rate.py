"""How many stages of plans the cost model evaluates per second on one core, with numpy arrays over many plans.

    taskset -c 1 chrt -r 1 python benchmarks/cost_rate.py [--plans 1000000] [--chunk 8192] [--rounds 5]

A plan is a layout for each of generate, ref_logprob and update_policy, a placement, a batch and a length of responses;
its step has six stages. Three rates, each the median over the rounds:

- `plan_stages_per_s`: everything, end to end: the costs of every distinct (stage, layout, batch, length) by the
  formulas on arrays, then for each plan a look-up of its stages and the composition of the step (time with its
  interval, work, depth, rounds, memory of both pools, bounds). Plans with the same layout share a stage's costs.
- `composed_stages_per_s`: of that, the composition alone.
- `unshared_stages_per_s`: the formulas of one forward pass where no two plans share anything.

The plans are checked: some of them are evaluated again one by one with plain numbers. The last line is JSON.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping

import numpy as np

from plait.cost.activations import activation_bytes
from plait.cost.arithmetic import Number, ceil, maximum
from plait.cost.cluster_catalogue import find_cluster
from plait.cost.composition.bounds import PoolRates
from plait.cost.composition.fusion import PieceCounts
from plait.cost.composition.step import Arrangement, StepEstimate, compose
from plait.cost.generation import decode_step, prefill
from plait.cost.layers import Division
from plait.cost.model_catalogue import find_model
from plait.cost.model_costs import backward, forward
from plait.cost.stage_estimate import StageEstimate
from plait.cost.state import PRECISION_RECIPES, rank_state
from plait.cost.tokens import uniform_tokens
from plait.stages.graph import Granularity, Kind, Stage, StepGraph

SPEC = find_model("Qwen3-8B")
DEVICE = find_cluster("8xH100").device
PROMPT_TOKENS, NUM_DEVICES, NUM_SAMPLES = 512, 64, 8
FLOP_PER_S = DEVICE.peak_flop_per_s() * DEVICE.matmul_share.typical
BYTES_PER_S = DEVICE.memory_bytes_per_s * DEVICE.memory_share.typical
WIRE_BYTES_PER_S = DEVICE.scale_up.curve.peak * DEVICE.scale_up.curve.share.typical
LENGTHS = np.array([512.0, 1024, 2048, 4096, 8192])
PROMPTS = np.array([64.0, 128, 256, 512])
DEGREES = [(tp, cp) for tp in (1, 2, 4, 8) for cp in (1, 2, 4, 8)]
Rows = dict[str, np.ndarray]


def _stage(name: str, kind: Kind, reads: str, writes: str, granularity: Granularity) -> Stage:
    return Stage(name, ("policy",), kind, frozenset(reads.split()), frozenset(writes.split()), granularity)


GRAPH = StepGraph(
    [
        _stage("generate", "generation", "prompts engine_weights@v", "samples", "sample"),
        _stage("score_verifier", "host", "samples", "verdicts", "sample"),
        _stage("ref_logprob", "inference", "samples", "ref_logprobs", "sample"),
        _stage("advantage", "host", "verdicts", "advantages", "group"),
        _stage("update_policy", "training", "advantages ref_logprobs policy_weights@v", "policy_weights@v+1", "step"),
        _stage("sync_weights", "transfer", "policy_weights@v+1", "engine_weights@v+1", "step"),
    ],
    inputs={"prompts", "engine_weights@v", "policy_weights@v"},
    outputs={"policy_weights@v+1", "engine_weights@v+1"},
)
NUM_STAGES = len(GRAPH.stages)
PLACES = {
    "colocated": dict.fromkeys((stage.name for stage in GRAPH.stages), ("train",)),
    "apart": {stage.name: ("rollout" if stage.name == "generate" else "train",) for stage in GRAPH.stages},
}


def forward_costs(prompts: Number, response: Number, tp: Number, cp: Number) -> Rows:
    """ref_logprob: one forward pass, per device."""
    sequences = prompts * NUM_SAMPLES
    tokens = uniform_tokens(sequences, PROMPT_TOKENS + response, num_head_tokens=response)
    cost = forward(SPEC, tokens * (tp * cp / NUM_DEVICES), 2, Division(tp=tp, cp=cp), with_logprobs=True)
    whole = forward(SPEC, tokens, 2, with_logprobs=True)
    return _rows(cost.flop, cost.hbm_bytes, whole.work, whole.depth, whole.flop, 2 * SPEC.num_parameters / tp, 0 * tp)


def update_costs(prompts: Number, response: Number, tp: Number, cp: Number) -> Rows:
    """update_policy: one optimiser step, ZeRO-3 over what tp leaves, per device."""
    sequences = prompts * NUM_SAMPLES
    tokens = uniform_tokens(sequences, PROMPT_TOKENS + response, num_head_tokens=response)
    division, part = Division(tp=tp, cp=cp), tokens * (tp * cp / NUM_DEVICES)
    cost = forward(SPEC, part, 2, division, with_logprobs=True)
    cost += backward(SPEC, part, 2, division, recompute="full", with_logprobs=True)
    whole = forward(SPEC, tokens, 2, with_logprobs=True) + backward(SPEC, tokens, 2, with_logprobs=True)
    state = rank_state(SPEC, PRECISION_RECIPES["fsdp2_fp32_masters"], division, zero=3, dp_shard=NUM_DEVICES / tp / cp)
    micro = part * (1 / ceil(maximum(part.num_tokens / 32_768, 1)))
    kept = activation_bytes(SPEC, micro, 2, division=division, recompute="full", logits_chunk=1024)
    return _rows(
        cost.flop, cost.hbm_bytes, whole.work, whole.depth, whole.flop, state.parameters + state.optimizer,
        state.gradients + state.gathered + kept.peak,
    )  # fmt: skip


def generate_costs(prompts: Number, response: Number, tp: Number, cp: Number) -> Rows:
    """generate: prefill, then T - 1 decode steps of all sequences of a replica; cp ranks are more replicas."""
    own = prompts * NUM_SAMPLES * tp / NUM_DEVICES
    division = Division(tp=tp)
    first = prefill(SPEC, own, PROMPT_TOKENS, 2, division)
    middle = decode_step(SPEC, own, PROMPT_TOKENS + response / 2, division=division)
    steps = response - 1
    replicas = NUM_DEVICES / tp
    return _rows(
        first.flop + steps * middle.flop, first.hbm_bytes + steps * middle.hbm_bytes,
        (first.work + steps * middle.work) * tp * replicas, first.depth + steps * middle.depth,
        (first.flop + steps * middle.flop) * tp * replicas, 2 * SPEC.num_parameters / tp,
        own * SPEC.kv_bytes(PROMPT_TOKENS + response, 2, tp=tp),
    )  # fmt: skip


def _rows(
    flop: Number, hbm: Number, work: Number, depth: Number, total_flop: Number, state: Number, extra: Number
) -> Rows:
    """One value per quantity and case."""
    parts = {
        "compute_s": flop / FLOP_PER_S, "memory_s": hbm / BYTES_PER_S, "hbm_bytes": hbm, "work": work, "depth": depth,
        "flop": total_flop, "state": state, "extra": extra,
    }  # fmt: skip
    shape = np.broadcast_shapes(*(np.shape(part) for part in parts.values()))
    return {name: np.broadcast_to(np.asarray(part, dtype=float), shape) for name, part in parts.items()}


FORMULAS = {"generate": generate_costs, "ref_logprob": forward_costs, "update_policy": update_costs}


def shared_costs() -> dict[str, Rows]:
    """Every distinct (stage, degrees, prompts, length): rows in that order."""
    degrees = np.array(DEGREES, dtype=float)
    index = np.indices((len(DEGREES), len(PROMPTS), len(LENGTHS))).reshape(3, -1)
    cases = (PROMPTS[index[1]], LENGTHS[index[2]], degrees[index[0], 0], degrees[index[0], 1])
    return {stage: of(*cases) for stage, of in FORMULAS.items()}


def estimates(costs: Mapping[str, Rows], chosen: Mapping[str, np.ndarray], prompts: Number) -> dict[str, StageEstimate]:
    """Stages of many plans (or of one, with numbers for rows)."""
    found = {}
    for name, rows in costs.items():
        row = {quantity: values[chosen[name]] for quantity, values in rows.items()}
        time_s = maximum(row["compute_s"], row["memory_s"])
        memory = {"parameters": row["state"], "activations": row["extra"]}
        found[name] = _estimate(
            name, time_s, row["work"], row["depth"], row["flop"], row["hbm_bytes"], memory, prompts
        )  # fmt: skip
    checks = prompts * NUM_SAMPLES * 0.05 / 128
    found["score_verifier"] = _estimate("score_verifier", checks, 0, 0, 0, 0, {}, prompts)
    found["advantage"] = _estimate("advantage", 1e-6 * prompts, 5 * prompts * NUM_SAMPLES, 13, 0, 0, {}, prompts)
    moved = costs["generate"]["state"][chosen["generate"]]
    found["sync_weights"] = _estimate("sync_weights", moved / WIRE_BYTES_PER_S, 0, 0, 0, moved, {}, prompts)
    return found


def _estimate(
    name: str, time_s: Number, work: Number, depth: Number, flop: Number, hbm: Number, memory: dict, prompts: Number
) -> StageEstimate:
    granularity = GRAPH[name].granularity
    count = {"sample": prompts * NUM_SAMPLES, "group": prompts, "step": 1}[granularity]
    return StageEstimate(
        name=name, work_op=work, depth_op=depth, num_rounds=1, flop=flop, sent_bytes=0, hbm_bytes=hbm,
        terms_s={"compute": time_s}, time_s=time_s, low_s=0.8 * time_s, high_s=1.5 * time_s, bottleneck="compute",
        num_devices=NUM_DEVICES, memory=memory, granularity=granularity, num_pieces=count,
    )  # fmt: skip


RATES = PoolRates(NUM_DEVICES, DEVICE.peak_flop_per_s(), DEVICE.memory_bytes_per_s, DEVICE.scale_up.curve.peak)


def step(found: Mapping[str, StageEstimate], place: str, prompts: Number) -> StepEstimate:
    """The step that these stages make."""
    pieces = PieceCounts(num_samples=prompts * NUM_SAMPLES, num_groups=prompts)
    how = Arrangement(PLACES[place], {"score_verifier": "sample", "ref_logprob": "sample"}, pieces)
    return compose(GRAPH, found, how, rates={pool: RATES for names in PLACES[place].values() for pool in names})


def random_plans(num_plans: int, seed: int = 1) -> dict[str, np.ndarray]:
    """Indices of degrees per stage, of prompts and of lengths."""
    rng = np.random.default_rng(seed)
    plans = {name: rng.integers(len(DEGREES), size=num_plans) for name in FORMULAS}
    return plans | {
        "prompts": rng.integers(len(PROMPTS), size=num_plans),
        "length": rng.integers(len(LENGTHS), size=num_plans),
    }


def chunks(plans: Mapping[str, np.ndarray], chunk: int) -> Iterator[tuple[str, dict[str, np.ndarray], np.ndarray]]:
    """(placement, rows of each stage's costs, prompts) of plans that fit the processor's cache; half of each kind."""
    num_plans = len(plans["prompts"])
    for number, start in enumerate(range(0, num_plans, chunk)):
        part = slice(start, start + chunk)
        batch = plans["prompts"][part] * len(LENGTHS) + plans["length"][part]
        rows = {name: plans[name][part] * len(PROMPTS) * len(LENGTHS) + batch for name in FORMULAS}
        yield ("colocated", "apart")[number % 2], rows, PROMPTS[plans["prompts"][part]]


def check(plans: Mapping[str, np.ndarray], chunk: int, times: np.ndarray, memory: np.ndarray) -> None:
    """Some plans again, one by one: the formulas with plain numbers, nothing shared."""
    for index in (0, 1, len(times) // 2, len(times) - 1):
        prompts, response = float(PROMPTS[plans["prompts"][index]]), float(LENGTHS[plans["length"][index]])
        alone = {}
        for name, of in FORMULAS.items():
            tp, cp = DEGREES[plans[name][index]]
            alone[name] = {q: v.reshape(1) for q, v in of(prompts, response, float(tp), float(cp)).items()}
        one = estimates(alone, dict.fromkeys(FORMULAS, 0), prompts)  # type: ignore[arg-type]
        found = step(one, ("colocated", "apart")[index // chunk % 2], prompts)
        assert np.isclose(found.time_s, times[index], rtol=1e-12), (index, found.time_s, times[index])
        assert np.isclose(found.pools["train"].peak_bytes, memory[index], rtol=1e-12), index


def evaluate(plans: Mapping[str, np.ndarray], chunk: int) -> tuple[float, float, np.ndarray, np.ndarray]:
    """(seconds of all, seconds of composition, time of each step, memory of the training pool)."""
    times, memory = [], []
    start = time.perf_counter()
    costs = shared_costs()
    shared = time.perf_counter() - start
    for place, rows, prompts in chunks(plans, chunk):
        found = step(estimates(costs, rows, prompts), place, prompts)
        times.append(found.time_s)
        memory.append(found.pools["train"].peak_bytes)
    whole = time.perf_counter() - start
    return whole, whole - shared, np.concatenate(times), np.concatenate(memory)


def unshared(num_plans: int, chunk: int) -> float:
    """Seconds of one forward pass's formulas for plans that have nothing in common."""
    rng = np.random.default_rng(2)
    start = time.perf_counter()
    for first in range(0, num_plans, chunk):
        size = min(chunk, num_plans - first)
        tp, cp = 2.0 ** rng.integers(4, size=size), 2.0 ** rng.integers(4, size=size)
        tokens = uniform_tokens(rng.uniform(64, 512, size), rng.uniform(512, 8192, size))
        forward(SPEC, tokens, 2, Division(tp=tp, cp=cp), with_logprobs=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure, check, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=1_000_000)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    plans = random_plans(arguments.plans)
    rounds = [evaluate(plans, arguments.chunk) for _ in range(arguments.rounds)]
    check(plans, arguments.chunk, rounds[0][2], rounds[0][3])
    alone = [unshared(arguments.plans, arguments.chunk) for _ in range(arguments.rounds)]
    count = arguments.plans * NUM_STAGES
    figures = {
        "plan_stages_per_s": count / statistics.median(whole for whole, *_ in rounds),
        "composed_stages_per_s": count / statistics.median(composed for _, composed, *_ in rounds),
        "unshared_stages_per_s": arguments.plans / statistics.median(alone),
        "shared_costs_s": statistics.median(whole - composed for whole, composed, *_ in rounds),
        "num_plans": arguments.plans,
        "stages_per_plan": NUM_STAGES,
        "distinct_stage_costs": 3 * len(DEGREES) * len(PROMPTS) * len(LENGTHS),
        "target_per_s": 1_000_000,
    }
    for name, value in figures.items():
        print(f"{name}: {value:,.4g}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
