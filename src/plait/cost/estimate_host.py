"""Estimates of stages without products: checks on processor cores, advantages, weight movement. Torch-free."""

from plait.cost import stage_costs
from plait.cost.arithmetic import Number, maximum
from plait.cost.cluster import Bound, Link
from plait.cost.estimate_generate import whole_weights
from plait.cost.link_times import rate_bound
from plait.cost.reshard import Reshard, reshard
from plait.cost.residence import engine_bytes
from plait.cost.setting import Setting
from plait.cost.spec_tensors import SpecShape
from plait.cost.stage_estimate import StageEstimate
from plait.cost.stage_times import BOUNDS, Pieces, bottleneck_of, memory_terms, rates
from plait.cost.verifier_time import verifier_least_s, verifier_most_s

_NOTHING: dict[str, Number] = {"compute": 0, "memory": 0, "network": 0, "latency": 0, "dependency": 0}


def estimate_verifier(setting: Setting, pieces: Pieces) -> StageEstimate:
    """score_verifier: processor seconds over cores; the longest check is dependency. Its work is in seconds, not in
    operations, so W and D are 0.
    """
    n, cores = setting.batch.num_sequences, setting.num_cpu_cores
    mean, longest = setting.verifier_s, setting.verifier_longest_s
    low = verifier_least_s(n, cores, mean, longest)
    # The stated longest check may be longer than all would be at the stated mean.
    high = maximum(verifier_most_s(n, cores, mean, longest), low)
    shared = n * mean / cores
    terms = {**_NOTHING, "compute": shared, "dependency": maximum(low - shared, 0)}
    return _host("score_verifier", terms, low, high, pieces)


def estimate_advantage(setting: Setting, pieces: Pieces, *, uses_values: bool) -> StageEstimate:
    """advantage: four numbers per token through the host's memory, next to nothing."""
    cost = stage_costs.advantage(setting.batch, uses_values=uses_values)
    seconds = cost.rank_hbm_bytes / setting.cluster_of("advantage").device.host_bytes_per_s
    terms = {**_NOTHING, "memory": seconds}
    return _host("advantage", terms, seconds, seconds, pieces, cost)


def _host(
    name: str,
    terms: dict[str, Number],
    low: Number,
    high: Number,
    pieces: Pieces,
    cost: stage_costs.StageCost | None = None,
) -> StageEstimate:
    return StageEstimate(
        name=name,
        work_op=0 if cost is None else cost.work,
        depth_op=0 if cost is None else cost.depth,
        num_rounds=0,
        flop=0,
        sent_bytes=0,
        hbm_bytes=0,
        terms_s=terms,
        time_s=sum(terms.values(), start=0),
        low_s=low,
        high_s=high,
        bottleneck=bottleneck_of(terms),
        num_devices=0,
        memory={},
        granularity=pieces.granularity,
        num_pieces=pieces.count,
    )


def weight_movement(setting: Setting) -> Reshard:
    """Bytes per device from the policy's training layout to the engine's, by exact overlap."""
    source, target = setting.layout_of("update_policy"), setting.layout_of("generate")
    is_apart = setting.pool_of("update_policy") != setting.pool_of("generate")
    b = int(setting.inference.parameter_b)
    return reshard(
        SpecShape(setting.models["policy"]), source, whole_weights(target), bytes_per_number=b,
        pools="disaggregated" if is_apart else "colocated", is_chained=is_apart,
    )  # fmt: skip


def estimate_sync(setting: Setting, pieces: Pieces) -> StageEstimate:
    """sync_weights: no less than the busiest sender or receiver takes, one round per layer, and packing through memory.

    Stopping an engine and walking its tensors come on top; measured systems lie well above (docs/cost.md).
    """
    spec, target = setting.models["policy"], setting.layout_of("generate")
    moved = weight_movement(setting)
    busiest = float(max(moved.received_bytes.max(), moved.sent_bytes.max()))
    rounds = int(spec.num_layers) + 1 if busiest else 0
    packed = 2 * float(moved.needed_bytes.max())
    terms: dict[Bound, dict[str, Number]] = {}
    for bound in BOUNDS:
        _, bytes_per_s = rates(setting.cluster_of("sync_weights").device, setting.precision, bound)
        link, wire = _wire_s(setting, busiest, bound)
        latency = rounds * (link.base_s.at(bound) + link.hop_s.at(bound))
        terms[bound] = {**_NOTHING, "memory": packed / bytes_per_s, "network": wire, "latency": latency}
    totals = {bound: sum(terms[bound].values(), start=0) for bound in BOUNDS}
    return StageEstimate(
        name="sync_weights",
        work_op=0,
        depth_op=0,
        num_rounds=rounds,
        flop=0,
        sent_bytes=float(moved.sent_bytes.max()),
        hbm_bytes=packed,
        terms_s=terms["typical"],
        time_s=totals["typical"],
        low_s=totals["low"],
        high_s=totals["high"],
        bottleneck=bottleneck_of(terms["typical"]),
        num_devices=max(target.world_size, setting.layout_of("update_policy").world_size),
        memory=sync_memory(setting),
        granularity=pieces.granularity,
        num_pieces=pieces.count,
    )


def sync_memory(setting: Setting) -> dict[str, Number]:
    """Bytes per device by term while weights move. A sleeping engine's weights are made; one that is awake has them
    (`residence`), and sender and receiver hold one layer's part in a buffer.
    """
    weights, size = engine_bytes(setting), setting.layout_of("generate").world_size
    if setting.pool_of("update_policy") == setting.pool_of("generate"):
        return memory_terms({"parameters": weights}, size)
    buffer = weights / (setting.models["policy"].num_layers + 1)
    return memory_terms({"gathered": buffer}, size)


def _wire_s(setting: Setting, num_bytes: float, bound: Bound) -> tuple[Link, float]:
    """(the slowest link, seconds of the bytes): of one part in q they stay inside one of q nodes."""
    cluster = setting.cluster_of("sync_weights")
    is_apart = setting.pool_of("update_policy") != setting.pool_of("generate")
    way, near, far = rate_bound(bound), cluster.device.scale_up.curve, cluster.device.network.curve
    nodes = -(-cluster.num_devices // cluster.scale_up_size)
    away = 1.0 if is_apart else 1 - 1 / nodes
    seconds = num_bytes * (away / (far.peak * far.share.at(way)) + (1 - away) / (near.peak * near.share.at(way)))
    return (cluster.device.network if away else cluster.device.scale_up), seconds
