"""Generation's estimate: prefill, then decode steps of a batch that shrinks, in as many slots as memory has room for.

Torch-free. Causes of seconds are those of a rollout whose sequences are all of mean length; what the real distribution
of lengths adds (weights are read until the longest has ended) is dependency.
"""

from dataclasses import dataclass, replace

import numpy as np

from plait.cost import stage_costs
from plait.cost.arithmetic import Number, ceil, floor, maximum, minimum
from plait.cost.cluster import Bound
from plait.cost.generation import decode_step, prefill, resident_context, rollout_time
from plait.cost.layers import Division
from plait.cost.link_times import LinkTime, link_time
from plait.cost.setting import Setting
from plait.cost.spec_tensors import SpecShape
from plait.cost.stage_estimate import StageEstimate
from plait.cost.stage_times import (
    BOUNDS,
    COLLECTIVE_BUFFER_BYTES,
    Pieces,
    bottleneck_of,
    memory_terms,
    rank_seconds,
    rates,
)
from plait.cost.state import local_parameters
from plait.cost.traffic.layout import Work, decode_traffic, inference_traffic
from plait.parallel.degrees import Layout

KV_BLOCK = 16
"""Tokens of a cache block, in which engines hand out memory (vLLM's default)."""


def whole_weights(layout: Layout) -> Layout:
    """The layout while an engine runs: weights are gathered over dp_shard; tp and ep stay."""
    return replace(layout, zero=1) if layout.dp_shard > 1 else layout


def fitting_slots(setting: Setting, resident: Number) -> float:
    """Sequences of one replica that memory has room for beside weights and what stays there; may be 0."""
    batch, spec, layout = setting.batch, setting.models["policy"], setting.layout_of("generate")
    b, division = setting.inference.parameter_b, Division.of(layout)
    weights = b * local_parameters(spec, division).total
    buffers = COLLECTIVE_BUFFER_BYTES if layout.world_size > 1 else 0
    context = resident_context(batch.prompt_tokens, batch.lengths)
    logits = spec.output_share(division.tp) * (b + 16)
    free = maximum(setting.usable_bytes("generate") - weights - buffers - resident, 0)
    # A slot needs its cache and its logits.
    cache = spec.kv_bytes(ceil(context / KV_BLOCK) * KV_BLOCK, b, tp=division.tp)
    return float(floor(free / (cache + logits)))


def num_slots(setting: Setting, resident: Number) -> float:
    """Sequences that one replica generates at once: its own, or as many as there is memory for (at least 1)."""
    batch, layout = setting.batch, setting.layout_of("generate")
    own = max(batch.num_sequences / layout.data_parallel, 1)
    if setting.num_slots is not None:
        return float(minimum(own, setting.num_slots))
    return max(min(own, fitting_slots(setting, resident)), 1.0)


@dataclass(frozen=True, slots=True)
class _Rollout:
    """One replica's generation under one bound."""

    setting: Setting
    slots: float
    bound: Bound

    @property
    def own(self) -> float:
        layout = self.setting.layout_of("generate")
        return max(self.setting.batch.num_sequences / layout.data_parallel, 1)

    def step(self, active: Number, context: Number) -> tuple[dict[str, Number], LinkTime]:
        """Seconds by cause of one decode step, and its collectives."""
        setting, spec = self.setting, self.setting.models["policy"]
        layout, cluster = setting.layout_of("generate"), setting.cluster_of("generate")
        b = setting.inference.parameter_b
        done = decode_step(spec, active, context, weight_b=b, kv_b=b, b=b, division=Division.of(layout))
        flop_per_s, bytes_per_s = rates(cluster.device, setting.precision, self.bound)
        compute, traffic = done.flop / flop_per_s, (done.weight_bytes + done.kv_bytes) / bytes_per_s
        beyond = traffic if self.bound == "high" else maximum(traffic - compute, 0)
        terms = decode_traffic(SpecShape(spec), layout, active, activation_bytes=b)
        links = link_time(terms, cluster, layout, self.bound)
        launches = done.num_operators * cluster.device.op_latency_s.at(self.bound)
        return {
            "compute": compute,
            "memory": beyond + done.other_bytes / bytes_per_s,
            "network": links.wire_s,
            "latency": launches + links.latency_s,
        }, links

    def step_s(self, active: np.ndarray, context: np.ndarray) -> np.ndarray:
        terms, _ = self.step(active, context)
        return np.asarray(sum(terms.values()))

    def decode_s(self) -> float:
        batch = self.setting.batch
        return rollout_time(self.step_s, self.own, batch.prompt_tokens, batch.lengths, self.slots).seconds

    def equal_steps(self) -> float:
        """Decode steps if every response had the mean length, in full slots."""
        return self.own / self.slots * (self.setting.batch.lengths.mean - 1)

    def prefill(self) -> tuple[dict[str, Number], LinkTime]:
        """Seconds by cause of all prompts, and the collectives."""
        setting, batch, spec = self.setting, self.setting.batch, self.setting.models["policy"]
        layout, cluster = setting.layout_of("generate"), setting.cluster_of("generate")
        count = self.own / (batch.num_samples_per_prompt if setting.shares_prefixes else 1)
        b = setting.inference.parameter_b
        cost = prefill(spec, count, batch.prompt_tokens, b, Division.of(layout))
        terms = rank_seconds(cost, cluster.device, setting.precision, self.bound)
        work = Work(1, count * batch.prompt_tokens, b, b)
        links = link_time(inference_traffic(SpecShape(spec), whole_weights(layout), work), cluster, layout, self.bound)
        return {**terms, "network": links.wire_s + links.hidden_s, "latency": terms["latency"] + links.latency_s}, links


def generate_memory(setting: Setting, resident: Number) -> dict[str, Number]:
    """Memory of generation by term, without its seconds: whole weights, cache and logits of as many slots as fit."""
    spec, layout, b = setting.models["policy"], setting.layout_of("generate"), setting.inference.parameter_b
    division, slots = Division.of(layout), num_slots(setting, resident)
    context = resident_context(setting.batch.prompt_tokens, setting.batch.lengths)
    counted = {
        "parameters": b * local_parameters(spec, division).total,
        "kv_cache": slots * spec.kv_bytes(context, b, tp=division.tp),
        "logits": slots * spec.output_share(division.tp) * (b + 16),
    }
    return memory_terms(counted, layout.world_size)


def estimate_generate(setting: Setting, resident: Number, pieces: Pieces) -> StageEstimate:
    """generate: its layout has replicas, tp and ep; pp and cp are an assertion."""
    layout, batch, spec = setting.layout_of("generate"), setting.batch, setting.models["policy"]
    assert layout.pp == 1 and layout.cp == 1, "generation has neither pipeline nor context parallelism"  # noqa: PT018
    slots = num_slots(setting, resident)
    if setting.num_slots is None and fitting_slots(setting, resident) < 1:
        # It does not fit; its times are those it would have with room for all.
        slots = max(batch.num_sequences / layout.data_parallel, 1.0)
    b = setting.inference.parameter_b
    cost = stage_costs.generate(
        spec, batch, layout, num_slots=slots, shares_prefixes=setting.shares_prefixes, b=b, weight_b=b, kv_b=b
    )
    totals: dict[Bound, float] = {}
    for bound in BOUNDS:
        rollout = _Rollout(setting, slots, bound)
        first, first_links = rollout.prefill()
        totals[bound] = float(sum(first.values())) + rollout.decode_s()
        if bound == "typical":
            context = batch.prompt_tokens + (batch.lengths.mean + 1) / 2
            each, links = rollout.step(slots, context)
            terms = {cause: first[cause] + rollout.equal_steps() * each[cause] for cause in each}
            sent = first_links.sent_bytes + rollout.equal_steps() * links.sent_bytes
            longest = batch.lengths.expected_max(batch.num_sequences)
            rounds = first_links.num_rounds + (longest - 1) * links.num_rounds
    terms["dependency"] = max(totals["typical"] - sum(terms.values()), 0.0)
    return StageEstimate(
        name="generate",
        work_op=cost.work,
        depth_op=cost.depth,
        num_rounds=rounds,
        flop=cost.flop,
        sent_bytes=sent,
        hbm_bytes=cost.rank_hbm_bytes,
        terms_s=terms,
        time_s=totals["typical"],
        low_s=totals["low"],
        high_s=totals["high"],
        bottleneck=bottleneck_of(terms),
        num_devices=layout.world_size,
        memory=memory_terms(cost.memory, layout.world_size),
        granularity=pieces.granularity,
        num_pieces=pieces.count,
    )
