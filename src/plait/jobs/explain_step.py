"""The step of `plait explain`: its stages' estimates composed as the plan places, fuses and schedules them."""

from collections.abc import Iterable, Iterator, Mapping

from plait.cost.cluster import Cluster, Precision
from plait.cost.composition.bounds import Demand, PoolRates, pool_least_s
from plait.cost.composition.fusion import PieceCounts, own_granularity, streams
from plait.cost.composition.placement import placement_kind, pools_of
from plait.cost.composition.sharing import scalar_head, with_head
from plait.cost.composition.step import Arrangement, StepEstimate, compose
from plait.cost.estimate import estimate_stage
from plait.cost.residence import has_sleeping_engine
from plait.cost.setting import ROLE_OF_STAGE, Setting, costed_as
from plait.cost.stage_costs import StepBatch
from plait.cost.stage_estimate import StageEstimate
from plait.cost.stage_times import Pieces
from plait.jobs.explain_request import Asked
from plait.parallel.degrees import Layout
from plait.stages.graph import Granularity, Stage, StepGraph


def piece_counts(batch: StepBatch) -> PieceCounts:
    """Of one pass over the samples of a step."""
    return PieceCounts(batch.num_sequences, batch.num_prompts, batch.num_updates // batch.num_epochs)


def stage_estimate(setting: Setting, stage: Stage, names: tuple[str, ...]) -> StageEstimate:
    """One stage. The head of a critic that shares the policy's trunk is added to the policy's own pass."""
    batch = setting.batch
    passes = batch.num_epochs if stage.granularity == "minibatch" else 1
    pieces = Pieces(stage.granularity, piece_counts(batch).of(stage.granularity) * passes)
    found = estimate_stage(setting, costed_as(stage), names, pieces)
    if "critic" not in stage.roles or "policy" not in stage.roles:
        return found
    spec, is_training = setting.models["policy"], stage.kind == "training"
    num_tokens = batch.tokens(spec).num_tokens * (batch.num_epochs if is_training else 1)
    head = scalar_head(num_tokens, spec.hidden_size, setting.inference.parameter_b, is_training=is_training)
    return with_head(found, head, name=stage.name)


def pool_rates(cluster: Cluster, precision: Precision) -> PoolRates:
    """Peak rates of one device. Bytes may leave by the faster of its links, so that one bounds them."""
    device, link = cluster.device, cluster.device.scale_up
    if cluster.num_devices > cluster.scale_up_size and device.network.curve.peak > link.curve.peak:
        link = device.network
    return PoolRates(
        cluster.num_devices, device.peak_flop_per_s(precision), device.memory_bytes_per_s, link.curve.peak
    )  # fmt: skip


def stage_least_s(estimate: StageEstimate, rates: PoolRates) -> float:
    """No schedule of this stage is faster."""
    return float(pool_least_s([Demand(estimate.flop, estimate.hbm_bytes, estimate.sent_bytes)], rates))


def stage_pools(setting: Setting, graph: StepGraph) -> dict[str, tuple[str, ...]]:
    """Stage -> the pools that it holds: weights move between the trainer's and the engine's."""
    pools = pools_of(graph, setting.place, next(iter(setting.pools)))
    pools["sync_weights"] = tuple(dict.fromkeys(setting.pool_of(name) for name in ("update_policy", "generate")))
    return pools


def placement(setting: Setting, graph: StepGraph) -> str:
    """colocated, hybrid, partly_colocated or disaggregated."""
    layouts = {s.name: setting.layout_of(costed_as(s)) for s in graph.stages}
    return placement_kind(graph, stage_pools(setting, graph), layouts)


def composed(asked: Asked, estimates: Mapping[str, StageEstimate]) -> StepEstimate:
    """asked.num_steps steps. An engine that shares its devices with a trained model sleeps while that trains; states
    that a layout offloads are on the devices only where they are used.
    """
    setting, graph = asked.setting, asked.graph
    models = [stage for stage in graph.stages if stage.name in ROLE_OF_STAGE]
    away = {s.roles[0] for s in models if s.kind != "generation" and _layout(setting, s).offload == "all"}
    # The engine's weights are a copy of their own, under whatever layout.
    layouts = {s.name: (s.kind == "generation", _layout(setting, s)) for s in graph.stages}
    arrangement = Arrangement(
        pools=stage_pools(setting, graph),
        fuse=asked.fuse,
        pieces=piece_counts(setting.batch),
        schedule=asked.schedule,
        layouts=layouts,
        offloaded=frozenset(away | ({"engine"} if has_sleeping_engine(setting, estimates) else set())),
    )
    rates = {name: pool_rates(cluster, setting.precision) for name, cluster in setting.pools.items()}
    return compose(graph, estimates, arrangement, rates=rates, num_steps=asked.num_steps)


def _layout(setting: Setting, stage: Stage) -> Layout:
    return setting.layout_of(costed_as(stage))


def coarser_pieces(graph: StepGraph, fuse: Mapping[str, Granularity]) -> Iterator[str]:
    """Where data pass in larger pieces than a plan asks for, in words."""
    passed = streams(graph, fuse)
    for name, asked in fuse.items():
        taken: Iterable[Granularity] = {piece for (_, consumer), piece in passed.items() if consumer == name}
        own = own_granularity(graph[name], passed) if set(taken) - {"step"} else "step"
        if own != asked:
            yield f"{name} takes pieces by {own}, not by {asked}: what it reads or what it does is no finer"
