"""One stage on one pool under one layout: work, depth, bytes, seconds by cause, memory. Torch-free.

Composes what the other files count: stage costs (work, depth, traffic with memory, state, activations), the layout's
collectives, pipeline idle time, and the device's rates with their uncertainty. Seconds by cause add up to the estimate:
each is what it adds to those before it.

compute: products at the reached rate. memory: traffic of products beyond that time, and of all else. latency: launches,
and rounds of collectives. network: bytes that work does not hide. dependency: what waits for others (pipeline fill and
drain, the longest sequence, the longest check). low_s: the best rates, all hidden that can be; high_s: the worst rates,
nothing hidden.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from plait.cost import pipeline, stage_costs
from plait.cost.arithmetic import Number, maximum
from plait.cost.cluster import Bound
from plait.cost.estimate_generate import estimate_generate
from plait.cost.estimate_host import estimate_advantage, estimate_sync, estimate_verifier
from plait.cost.link_times import LinkTime, link_time
from plait.cost.residence import resident_bytes
from plait.cost.setting import ROLE_OF_STAGE, TRAINED, Setting
from plait.cost.spec_tensors import SpecShape
from plait.cost.stage_costs import RankPasses, StageCost
from plait.cost.stage_estimate import StageEstimate
from plait.cost.stage_times import BOUNDS, Pieces, bottleneck_of, memory_terms, rank_seconds
from plait.cost.state import PrecisionRecipe
from plait.cost.traffic.layout import Work, inference_traffic, training_traffic
from plait.parallel.degrees import Layout


def estimate_stage(
    setting: Setting, stage: str, stages: Iterable[str] = (), pieces: Pieces = Pieces("step", 1)
) -> StageEstimate:
    """The estimate of one stage of a step. stages: all of its step, whose models share the devices.

    Unknown stages are an assertion; a layout must be possible (`plait.parallel.layout_rules`).
    """
    if stage == "generate":
        return estimate_generate(setting, resident_bytes(setting, stage, stages), pieces)
    if stage == "score_verifier":
        return estimate_verifier(setting, pieces)
    if stage == "advantage":
        return estimate_advantage(setting, pieces, uses_values="value" in set(stages))
    if stage == "sync_weights":
        return estimate_sync(setting, pieces)
    return _estimate_passes(setting, stage, pieces)


def pass_cost(setting: Setting, stage: str, layout: Layout | None = None) -> StageCost:
    """Work, traffic and memory of a stage that passes sequences through a model."""
    spec, how = setting.spec_of(stage), setting.layout_of(stage) if layout is None else layout
    role, batch = ROLE_OF_STAGE[stage], setting.batch
    if stage in ("update_policy", "update_critic"):
        return stage_costs.update(
            stage, spec, batch, how, recipe=setting.training, implementation=setting.implementation,
            logits_chunk=setting.logits_chunk,
        )  # fmt: skip
    recipe = setting.inference
    if role in TRAINED:
        # The trained model's own parameters, as its update holds them.
        recipe = PrecisionRecipe(setting.training.parameter_b, 0, 0, setting.training.held_b)
    how_made = setting.implementation
    if stage == "value":
        return stage_costs.value(spec, batch, how, recipe=recipe, implementation=how_made)
    if stage == "score_reward":
        return stage_costs.score_reward(spec, batch, how, recipe=recipe, implementation=how_made)
    assert stage in ("old_logprob", "ref_logprob"), stage
    return stage_costs.log_probabilities(
        stage, spec, batch, how, recipe=recipe, implementation=how_made, logits_chunk=setting.logits_chunk
    )


@dataclass(frozen=True, slots=True)
class _Times:
    """Seconds by cause under one bound."""

    terms_s: dict[str, Number]
    links: LinkTime

    @property
    def total_s(self) -> Number:
        return sum(self.terms_s.values(), start=0)


def _estimate_passes(setting: Setting, stage: str, pieces: Pieces) -> StageEstimate:
    layout = setting.layout_of(stage)
    cost = pass_cost(setting, stage)
    assert cost.passes is not None
    times = {bound: _pass_times(setting, stage, cost.passes, bound) for bound in BOUNDS}
    typical = times["typical"]
    return StageEstimate(
        name=stage,
        work_op=cost.work,
        depth_op=cost.depth,
        num_rounds=typical.links.num_rounds,
        flop=cost.flop,
        sent_bytes=typical.links.sent_bytes,
        hbm_bytes=cost.rank_hbm_bytes,
        terms_s=typical.terms_s,
        time_s=typical.total_s,
        low_s=times["low"].total_s,
        high_s=times["high"].total_s,
        bottleneck=bottleneck_of(typical.terms_s),
        num_devices=layout.world_size,
        memory=memory_terms(cost.memory, layout.world_size),
        granularity=pieces.granularity,
        num_pieces=pieces.count,
    )


def _pass_times(setting: Setting, stage: str, passes: RankPasses, bound: Bound) -> _Times:
    layout, cluster, precision = setting.layout_of(stage), setting.cluster_of(stage), setting.precision
    is_training = stage in ("update_policy", "update_critic")
    micro = rank_seconds(passes.micro, cluster.device, precision, bound)
    update = rank_seconds(passes.per_update, cluster.device, precision, bound)
    m, busy = passes.num_microbatches, sum(micro.values(), start=0)
    links = _slowest_links(setting, stage, passes, is_training, bound)
    waiting = _idle_s(layout, busy, is_training) + _imbalance_s(setting, stage, passes, bound)
    exposed = links.hidden_s if bound == "high" else maximum(links.hidden_s - m * busy, 0)
    moved = _offloaded_bytes(setting, stage) / cluster.device.host_bytes_per_s if is_training else 0
    terms = {cause: micro[cause] * m + update[cause] for cause in micro}
    terms["network"] = links.wire_s + exposed + moved
    terms["latency"] += links.latency_s
    terms["dependency"] = waiting
    times = passes.num_updates
    return _Times({cause: seconds * times for cause, seconds in terms.items()}, links * times)


def _slowest_links(setting: Setting, stage: str, passes: RankPasses, is_training: bool, bound: Bound) -> LinkTime:
    """Collectives of one optimiser step (or of one pass over all sequences), of the pipeline rank kept longest."""
    layout, cluster = setting.layout_of(stage), setting.cluster_of(stage)
    shape = SpecShape(setting.spec_of(stage))
    b = setting.training.parameter_b if ROLE_OF_STAGE[stage] in TRAINED else setting.inference.parameter_b
    gradient_b = setting.training.gradient_b
    work = Work(passes.num_microbatches, passes.num_tokens_per_microbatch, b, b, gradient_b)
    found = []
    for rank in sorted({0, min(1, layout.pp - 1), layout.pp - 1}):
        traffic = training_traffic if is_training else inference_traffic
        found.append(link_time(traffic(shape, layout, work, rank), cluster, layout, bound))
    return max(found, key=lambda links: links.wire_s + links.latency_s + links.hidden_s)


def _idle_s(layout: Layout, micro_s: Number, is_training: bool) -> Number:
    """Idle time of a pipeline per optimiser step, from one microbatch's seconds of a whole rank.

    Forward, input gradients and weight gradients take a third each; a quarter and twice that under full recompute.
    """
    p, v = layout.pp, layout.stages_per_rank
    if p == 1:
        return 0
    if not is_training:
        return pipeline.forward_only_idle_s(p, micro_s)
    forward = micro_s / (4 if layout.recompute == "full" else 3)
    backward, weights = micro_s - forward, forward
    if layout.pp_schedule == "interleaved_1f1b":
        return pipeline.interleaved_idle_s(p, v, forward, backward)
    if layout.pp_schedule == "zero_bubble_v":
        return pipeline.zero_bubble_v_idle_s(p, forward)
    if layout.pp_schedule == "dual_pipe_v":
        return pipeline.dual_pipe_v_idle_s(p, backward, weights, micro_s)
    return pipeline.one_f_one_b_idle_s(p, forward, backward)


def _imbalance_s(setting: Setting, stage: str, passes: RankPasses, bound: Bound) -> Number:
    """What replicas wait for the one with the most tokens in an update, if the longest sequences are dealt out first:
    the longest over the mean load. high: dealt out at random, 1 + cv sqrt(2 ln r / n).
    """
    replicas, batch = setting.layout_of(stage).data_parallel, setting.batch
    if replicas == 1:
        return 0
    mean_load = passes.num_microbatches * passes.num_tokens_per_microbatch
    longest = batch.prompt_tokens + batch.lengths.expected_max(batch.num_sequences)
    share = maximum(longest / mean_load - 1, 0)
    if bound == "high":
        share = maximum(share, stage_costs.random_imbalance(batch, replicas, passes.num_updates))
    busy = sum(rank_seconds(passes.micro, setting.cluster_of(stage).device, setting.precision, bound).values(), start=0)
    return share * passes.num_microbatches * busy


def _offloaded_bytes(setting: Setting, stage: str) -> Number:
    """Bytes between device and host per update: the optimiser's state there and back; with `all` parameters in and
    gradients out as well.
    """
    layout = setting.layout_of(stage)
    if layout.offload == "none":
        return 0
    kept = replace(layout, offload="none")
    state = pass_cost(setting, stage, kept).memory
    moved = 2 * state["optimizer"]
    return moved if layout.offload == "optimizer" else moved + state["parameters"] + state["gradients"]
