"""Tables of a whole step: how stages share devices and time. Torch-free.

The symbolic column comes from `composition.step.compose` called with symbols for the seconds of the stages, the example
from the same call with numbers.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy

from plait.cost import stage_costs
from plait.cost.cluster_catalogue import find_cluster
from plait.cost.composition.bounds import steady_step_s
from plait.cost.composition.flow import largest
from plait.cost.composition.fusion import ONE_PIECE, PieceCounts
from plait.cost.composition.placement import pools_of
from plait.cost.composition.sharing import Sharing, scalar_head, share
from plait.cost.composition.step import Arrangement, Schedule, StepEstimate, compose
from plait.cost.document.model_tables import EXAMPLE_MODEL
from plait.cost.document.symbols import amount
from plait.cost.document.table import Table, formula
from plait.cost.lengths import constant_length
from plait.cost.model_catalogue import find_model
from plait.cost.stage_costs import StageCost, StepBatch
from plait.cost.stage_estimate import StageEstimate
from plait.stages.graph import Granularity, Kind, Stage, StepGraph

NUM_DEVICES = 8


def _stage(name: str, kind: Kind, role: str, reads: str, writes: str, granularity: Granularity = "sample") -> Stage:
    return Stage(name, (role,), kind, frozenset(reads.split()), frozenset(writes.split()), granularity)


def ppo_graph() -> StepGraph:
    """A step of PPO with a reference and a critic of its own: the richest that the table needs."""
    advantages = "advantages"
    return StepGraph(
        [
            _stage("generate", "generation", "policy", "prompts engine_weights@v", "samples"),
            _stage("old_logprob", "inference", "policy", "samples policy_weights@v", "old_logprobs"),
            _stage("ref_logprob", "inference", "reference", "samples reference_weights", "ref_logprobs"),
            _stage("value", "inference", "critic", "samples critic_weights@v", "values"),
            _stage("advantage", "host", "verifier", "samples values", advantages),
            _stage("update_policy", "training", "policy", f"{advantages} old_logprobs ref_logprobs policy_weights@v",
                   "policy_weights@v+1", "minibatch"),
            _stage("update_critic", "training", "critic", f"{advantages} values critic_weights@v", "critic_weights@v+1",
                   "minibatch"),
            _stage("sync_weights", "transfer", "policy", "policy_weights@v+1", "engine_weights@v+1", "step"),
        ],
        inputs={"prompts", "engine_weights@v", "policy_weights@v", "critic_weights@v", "reference_weights"},
        outputs={"policy_weights@v+1", "critic_weights@v+1", "engine_weights@v+1"},
    )  # fmt: skip


LETTERS = {
    "generate": "t_gen", "old_logprob": "t_old", "ref_logprob": "t_ref", "value": "t_val", "advantage": "t_adv",
    "update_policy": "t_pol", "update_critic": "t_cri", "sync_weights": "t_syn",
}  # fmt: skip


def _costs() -> dict[str, StageCost]:
    """Of one of eight data-parallel replicas: 128 sequences, each device holding the whole model."""
    spec = find_model(EXAMPLE_MODEL)
    critic, batch = spec.with_scalar_head(), StepBatch(16, 8, 512, constant_length(2048), 16_384)
    return {
        "generate": stage_costs.generate(spec, batch),
        "old_logprob": stage_costs.log_probabilities("old_logprob", spec, batch),
        "ref_logprob": stage_costs.log_probabilities("ref_logprob", spec, batch),
        "value": stage_costs.value(spec, batch),
        "advantage": stage_costs.advantage(batch, uses_values=True),
        "update_policy": stage_costs.update("update_policy", spec, batch),
        "update_critic": stage_costs.update("update_critic", critic, batch),
    }


def example_estimates() -> dict[str, StageEstimate]:
    """Roofline seconds on eight H100: the larger of products at their typical rate and traffic at its typical rate.

    No collectives, no launches: `plait explain` counts those. Weights reach the engines at half the fast link's peak.
    """
    device = find_cluster("8xH100").device
    flop_per_s = device.peak_flop_per_s() * device.matmul_share.typical
    bytes_per_s = device.memory_bytes_per_s * device.memory_share.typical
    found = {}
    for name, cost in _costs().items():
        seconds = {"compute": cost.rank_flop / flop_per_s, "memory": cost.rank_hbm_bytes / bytes_per_s}
        time_s = 0.0 if name == "advantage" else max(seconds.values())
        cause = max(seconds, key=lambda key: seconds[key])
        found[name] = _estimate(name, cost.work * NUM_DEVICES, cost.depth, time_s, cause, cost.flop * NUM_DEVICES)
    weights = 2 * find_model(EXAMPLE_MODEL).num_parameters
    found["sync_weights"] = _estimate("sync_weights", 0, 0, weights / (0.5 * 450e9), "network", 0)
    return found


def _estimate(name: str, work: Any, depth: Any, time_s: Any, cause: str, flop: Any) -> StageEstimate:
    return StageEstimate(
        name=name, work_op=work, depth_op=depth, num_rounds=0, flop=flop, sent_bytes=0, hbm_bytes=0,
        terms_s={cause: time_s}, time_s=time_s, low_s=time_s, high_s=time_s, bottleneck=cause, num_devices=NUM_DEVICES,
        memory={}, granularity="step", num_pieces=1,
    )  # fmt: skip


def symbolic_estimates() -> dict[str, StageEstimate]:
    """One letter per stage for its seconds, its work and its depth."""
    found = {}
    for name, letter in LETTERS.items():
        time, work, depth = (sympy.Symbol(letter.replace("t_", kind), positive=True) for kind in ("t_", "W_", "D_"))
        found[name] = _estimate(name, work, depth, time, "compute", work)
    return found


def _streaming(estimates: Mapping[str, StageEstimate], graph: StepGraph, pieces: PieceCounts) -> dict[str, Any]:
    """The same stages, told how many pieces they have."""
    return {
        name: replace(e, granularity=graph[name].granularity, num_pieces=pieces.of(graph[name].granularity))
        for name, e in estimates.items()
    }


APART = {"policy": "train", "generate": "rollout", "reference": "reference", "critic": "critic"}
FUSED: dict[str, Granularity] = {"old_logprob": "sample", "ref_logprob": "sample"}


def _rows() -> list[tuple[str, StepEstimate, StepEstimate]]:
    """(strategy, with symbols, with numbers)."""
    graph, pieces = ppo_graph(), PieceCounts(num_samples=sympy.Symbol("B", positive=True, integer=True))
    both = ((symbolic_estimates(), pieces), (example_estimates(), PieceCounts(num_samples=1024)))

    def of(name: str, place: dict[str, str], sharing: Sharing, fuse: dict[str, Granularity] | None = None) -> Any:
        found = []
        for estimates, counts in both:
            used, changed = share(sharing, graph, estimates, heads=_heads(estimates))
            changed = _streaming(changed, used, counts) if fuse else changed
            how = Arrangement(pools_of(used, place, "train"), fuse=fuse or {}, pieces=counts if fuse else ONE_PIECE)
            found.append(compose(used, changed, how))
        return (name, *found)

    return [
        of("colocated (and hybrid: t_syn is then resharding)", {}, "independent"),
        of("colocated, shared trunk", {}, "shared_trunk"),
        of("colocated, critic-free", {}, "critic_free"),
        of("disaggregated", APART, "independent"),
        of("disaggregated, critic-free", APART, "critic_free"),
        of("disaggregated, critic-free, fused by samples", APART, "critic_free", FUSED),
    ]


def _heads(estimates: Mapping[str, StageEstimate]) -> dict[str, Any]:
    if isinstance(estimates["generate"].time_s, sympy.Expr):
        return {
            "value": scalar_head(0, 1, 2, is_training=False),
            "update_critic": scalar_head(0, 1, 2, is_training=True),
        }
    width, tokens = find_model(EXAMPLE_MODEL).hidden_size, 1024 * 2048
    return {
        name: scalar_head(tokens, width, 2, is_training=name != "value") for name in ("value", "update_critic")
    }  # fmt: skip


def step_table() -> Table:
    """Placements, sharing and fusion of one step."""
    rows = []
    for name, symbolic, numeric in _rows():
        shown = (formula(symbolic.time_s), formula(symbolic.depth_op))
        pools = ", ".join(f"{pool} {1 - use.idle_share:.0%}" for pool, use in numeric.pools.items() if pool != "host")
        rows.append((name, *shown, amount(numeric.work_op), f"{numeric.time_s:.4g} s", pools))
    return Table(
        "Step",
        "t_*: seconds of a stage on its pool, D_*: its depth (gen: generate, old and ref: log-probabilities, val: "
        "value, adv: advantage, pol and cri: updates, syn: sync_weights); B samples. Example: each stage's roofline "
        "on eight H100 in every row, so a row with four pools uses four times as many devices. Busy: share of the "
        "step that each pool works. The head of a shared trunk is left out of the formulas (2 D per token) and "
        "counted in the example.",
        ("strategy", "time", "depth", "W, example", "time, example", "busy, example"),
        rows,
        "Placement and fusion change time and never work or depth; a shared trunk or no critic is what lowers W.",
    )


def schedule_table() -> Table:
    """Several steps: what staleness buys."""
    rollout, train, sync, staleness = sympy.symbols("t_gen t_train t_syn k", positive=True)
    forms = [
        ("sync", steady_step_s([rollout, train + sync], rollout + train + sync, 0)),
        ("one_step_off_policy", steady_step_s([rollout, train + sync], rollout + train + sync, 1)),
        ("fully_async, staleness k", steady_step_s([rollout, train + sync], rollout + train + sync, staleness)),
    ]
    estimates, graph = example_estimates(), ppo_graph()
    place = {"generate": "rollout", "sync_weights": "train"}
    rows = []
    for (name, value), bound in zip(forms, (0, 1, 4), strict=True):
        kind = name.split(",")[0]
        how = Arrangement(pools_of(graph, place, "train"), schedule=Schedule(kind, bound))  # type: ignore[arg-type]
        found = compose(graph, estimates, how, num_steps=8)
        use = found.pools
        busy = ", ".join(f"{pool} {1 - use[pool].idle_share:.0%}" for pool in ("rollout", "train"))
        rows.append((name, formula(value), str(bound), f"{found.time_s:.4g} s", f"{found.step_s:.4g} s", busy))
    return Table(
        "Steps",
        "An endless run of generation on one pool and all else (t_train) on another. Example: eight steps with the "
        "stages above on two pools of eight H100. With staleness the engine's pool holds a shadow copy of the weights.",
        ("schedule", "time per step, endless", "staleness", "8 steps", "per step", "busy"),
        rows,
        "One step of staleness is enough to hide the shorter pool behind the longer one; more of it only evens out "
        "steps of different length.",
    )


def memory_table() -> Table:
    """What a device holds over a step, with symbols: states that stay, and the largest of what comes and goes."""
    graph = ppo_graph()
    states = {"policy": "S_pol", "reference": "S_ref", "critic": "S_cri"}
    estimates = {}
    for stage in graph.stages:
        memory = {}
        if stage.name in LETTERS and stage.kind in ("generation", "inference", "training"):
            letter = "S_eng" if stage.kind == "generation" else states[stage.roles[0]]
            memory = {
                "parameters": sympy.Symbol(letter, positive=True),
                "activations": sympy.Symbol(LETTERS[stage.name].replace("t_", "A_"), positive=True),
            }
        estimates[stage.name] = replace(symbolic_estimates()[stage.name], memory=memory)
    layouts: dict[str, object] = {stage.name: stage.name == "generate" for stage in graph.stages}
    rows = []
    for name, place, schedule, offloaded in (
        ("colocated or hybrid", {}, Schedule(), frozenset[str]()),
        ("colocated, engine and policy offloaded", {}, Schedule(), frozenset({"engine", "policy"})),
        ("disaggregated", APART, Schedule(), frozenset[str]()),
        ("disaggregated, asynchronous", APART, Schedule("one_step_off_policy", 1), frozenset[str]()),
    ):
        how = Arrangement(
            pools_of(graph, place, "train"), schedule=schedule, layouts=layouts, offloaded=offloaded
        )  # fmt: skip
        for pool, use in compose(graph, estimates, how).pools.items():
            if pool in ("train", "rollout"):
                resting = use.held[0].total_bytes
                extra = largest(sympy.expand(moment.total_bytes - resting) for moment in use.held[1:])
                rows.append((name, pool, formula(resting), formula(extra)))
    return Table(
        "Memory of a step",
        "Bytes of one device. S_*: parameters and optimiser state that stay between stages (pol, ref, cri, and eng, "
        "the engine's copy under a layout of its own); A_*: activations, logits, caches and gradients while a stage "
        "runs.",
        ("strategy", "pool", "always", "at most, besides"),
        rows,
        "Colocation adds up states and takes the largest of what comes and goes, so offloading is worth it exactly "
        "where states are large beside activations; asynchrony costs one more copy of the engine's weights.",
    )
