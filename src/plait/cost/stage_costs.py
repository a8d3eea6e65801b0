"""Work, depth, traffic with memory and memory of every stage of a step, on one layout. Torch-free.

Communication (bytes, messages, rounds) is counted elsewhere and composed with this. Source: arXiv 2608.27046, table 4,
per sequence length instead of an average, with lengths as a distribution.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from plait.cost import operators as op
from plait.cost.activations import ActivationBytes, activation_bytes
from plait.cost.arithmetic import Number, ceil, log2, maximum, minimum
from plait.cost.generation import decode, decode_step, prefill, resident_context, rollout_time
from plait.cost.layers import WHOLE, Division
from plait.cost.lengths import Lengths
from plait.cost.model_costs import backward, forward
from plait.cost.model_spec import ModelSpec
from plait.cost.operators import Cost, Implementation
from plait.cost.pipeline import peak_live_microbatches
from plait.cost.state import PRECISION_RECIPES, PrecisionRecipe, StateBytes, largest_unit, local_parameters, rank_state
from plait.cost.tokens import TokenCounts, expected_tokens
from plait.parallel.degrees import Layout
from plait.parallel.pipeline_orders import stages_of_rank


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step works on. prompt_tokens: of one prompt, on average. lengths: of responses.

    num_sequences_per_minibatch: of one optimiser step, all of the step if None.
    """

    num_prompts: int
    num_samples_per_prompt: int
    prompt_tokens: float
    lengths: Lengths
    num_tokens_per_microbatch: int
    num_sequences_per_minibatch: int | None = None
    num_epochs: int = 1

    @property
    def num_sequences(self) -> int:
        """Prompts x samples of each."""
        return self.num_prompts * self.num_samples_per_prompt

    @property
    def num_updates(self) -> float:
        """Optimiser steps: epochs x sequences / sequences of a minibatch."""
        each = self.num_sequences if self.num_sequences_per_minibatch is None else self.num_sequences_per_minibatch
        return self.num_epochs * self.num_sequences / each

    def tokens(self, spec: ModelSpec) -> TokenCounts:
        """One pass over all sequences: logits for responses; the longest as expected of so many."""
        longest = self.prompt_tokens + self.lengths.expected_max(self.num_sequences)
        return expected_tokens(self.num_sequences, self.prompt_tokens, self.lengths.expect, longest, spec.windows)


@dataclass(frozen=True, slots=True)
class RankPasses:
    """What the busiest rank does in a stage that passes sequences through a model.

    micro: one microbatch, forward (and backward), of num_tokens_per_microbatch of one replica. per_update: what comes
    once per optimiser step. All of it num_updates times, one after the other.
    """

    micro: Cost
    per_update: Cost
    num_microbatches: Number
    num_updates: Number
    num_tokens_per_microbatch: Number

    @property
    def total(self) -> Cost:
        """Of the whole stage."""
        return (self.micro * self.num_microbatches + self.per_update) * self.num_updates


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage of one step, without communication.

    work, flop: operations and those in products, of all ranks together. depth: the longest chain of operations.
    rank_flop, rank_hbm_bytes: of the busiest rank. memory: term -> bytes of the rank that needs most.
    passes: what these consist of, where a stage passes sequences through a model. cpu_s, longest_cpu_s: processor
    seconds of a host stage, all together and of its longest piece.
    """

    stage: str
    work: Number
    depth: Number
    flop: Number
    rank_flop: Number
    rank_hbm_bytes: Number
    memory: Mapping[str, Number]
    passes: RankPasses | None = None
    cpu_s: Number = 0
    longest_cpu_s: Number = 0

    @property
    def memory_bytes(self) -> Number:
        """All terms."""
        return sum(self.memory.values(), start=0)


def expected_rounds(pass_rates: np.ndarray, num_samples_per_prompt: int) -> float:
    """How often dynamic sampling generates a group until it has one with different rewards, on average:
    1 / (1 - E[q^G + (1 - q)^G]) for pass rates q of prompts.
    """
    equal = pass_rates**num_samples_per_prompt + (1 - pass_rates) ** num_samples_per_prompt
    return float(1 / (1 - equal.mean()))


def random_imbalance(batch: StepBatch, num_replicas: Number, num_updates: Number) -> Number:
    """How much more than the mean the busiest of r replicas has, if sequences are dealt out at random: about
    cv sqrt(2 ln r / n) for n sequences per replica and update, cv of prompt and response together.
    """
    lengths = batch.lengths
    deviation = maximum(lengths.second_moment - lengths.mean**2, 0) ** 0.5
    each = batch.num_sequences * batch.num_epochs / num_updates / num_replicas
    return deviation / (batch.prompt_tokens + lengths.mean) * (2 * log2(num_replicas) * math.log(2) / each) ** 0.5


def generate(
    spec: ModelSpec,
    batch: StepBatch,
    layout: Layout = Layout(),
    *,
    num_slots: Number | None = None,
    shares_prefixes: bool = False,
    b: Number = 2,
    weight_b: Number = 2,
    kv_b: Number = 2,
) -> StageCost:
    """Prefill of every prompt (once per group if prefixes are shared), then decoding in slots.

    num_slots: of one replica, all its sequences if None. Depth is that of the longest response expected of all.
    """
    lengths, division, prompt = batch.lengths, Division.of(layout), batch.prompt_tokens
    num_prefills = batch.num_prompts if shares_prefixes else batch.num_sequences
    own = batch.num_sequences / layout.data_parallel
    slots = own if num_slots is None else minimum(own, num_slots)
    longest = lengths.expected_max(batch.num_sequences)

    def both(part: Division) -> tuple[Cost, Number, Number]:
        first = prefill(spec, num_prefills, prompt, b, part)
        after = decode(spec, prompt, np.arange(1.0, lengths.cap + 1), b, part)
        flop = first.flop + batch.num_sequences * lengths.expect(lambda _: after.flop)
        return first, flop, first.work + batch.num_sequences * lengths.expect(lambda _: after.work)

    _, flop, work = both(WHOLE)
    first, rank_flop, _ = both(division)

    def step_bytes(active: np.ndarray, context: np.ndarray) -> np.ndarray:
        step = decode_step(spec, active, context, weight_b=weight_b, kv_b=kv_b, b=b, division=division)
        return np.asarray(step.hbm_bytes)

    traffic = rollout_time(step_bytes, float(own), prompt, lengths, float(slots)).seconds
    context = resident_context(prompt, lengths)
    return StageCost(
        stage="generate",
        work=work,
        depth=prefill(spec, 1, prompt, b).depth + decode(spec, prompt, longest, b).depth,
        flop=flop,
        rank_flop=rank_flop / layout.data_parallel / layout.pp,
        rank_hbm_bytes=(first.hbm_bytes / layout.data_parallel + traffic) / layout.pp,
        memory={
            "parameters": weight_b * local_parameters(spec, division).total / layout.pp,
            "kv_cache": slots * spec.kv_bytes(context, kv_b, tp=division.tp) / layout.pp,
            "logits": slots * spec.output_share(division.tp) * (b + 16),
        },
    )


def _passes(
    stage: str,
    spec: ModelSpec,
    batch: StepBatch,
    layout: Layout,
    *,
    is_training: bool,
    recipe: PrecisionRecipe,
    implementation: Implementation,
    head_tokens: Number | None,
    logits_chunk: Number | None,
) -> StageCost:
    """Forward (and backward) passes over all sequences, in microbatches."""
    tokens = batch.tokens(spec)
    if head_tokens is not None:
        tokens = replace(tokens, num_head_tokens=head_tokens)
    repeats = batch.num_epochs if is_training else 1
    num_updates = batch.num_updates if is_training else 1
    b, is_policy = recipe.parameter_b, spec.num_outputs is None
    # A sequence is not divided: with more replicas than sequences some have one, and others none.
    num_sequences = batch.num_sequences * repeats / num_updates
    each = tokens * (repeats / num_updates * maximum(1 / layout.data_parallel, 1 / num_sequences))
    num_microbatches = ceil(each.num_tokens / batch.num_tokens_per_microbatch)
    micro = each * (1 / num_microbatches)

    def one_pass(part: ModelSpec, of: TokenCounts, division: Division) -> Cost:
        cost = forward(part, of, b, division, implementation, with_logprobs=is_policy)
        if is_training:
            how = layout.recompute
            cost += backward(part, of, b, division, implementation, recompute=how, with_logprobs=is_policy)
        return cost

    whole = one_pass(spec, tokens * (repeats / num_updates), WHOLE)
    if is_training:
        whole += op.policy_loss(tokens.num_head_tokens * (repeats / num_updates))
        whole += op.clip(spec.num_parameters) + op.adam(spec.num_parameters)
    memory: dict[str, Number] = {}
    rank = RankPasses(Cost(), Cost(), num_microbatches, num_updates, micro.num_tokens)
    division = Division.of(layout)
    for index in range(layout.pp):
        part = pipeline_rank(spec, layout, index)
        found = replace(rank, micro=one_pass(part, micro, division), per_update=Cost())
        state = rank_state(part, recipe, division, zero=layout.zero, dp_shard=layout.dp_shard)
        if is_training:
            owned = state.optimizer / recipe.optimizer_b
            # The optimiser reads gradient, masters and moments, and writes all but the gradient.
            step = op.adam(owned, 2 * recipe.optimizer_b + recipe.gradient_b + recipe.parameter_b)
            found = replace(found, per_update=op.clip(owned, recipe.gradient_b) + step)
        kept = activation_bytes(
            part, micro, b, division=division, implementation=implementation, recompute=layout.recompute,
            logits_chunk=logits_chunk,
        )  # fmt: skip
        if layout.offload == "all":
            # Units pass through the device: one at work and the next, whatever ZeRO stage holds them.
            unit = recipe.parameter_b * largest_unit(part, division)
            state = replace(state, parameters=0, gradients=0, gathered=maximum(state.gathered, 2 * unit))
        terms = _rank_memory(part, micro, b, layout, state, kept, is_training, _held(layout, index, num_microbatches))
        if found.total.flop > rank.total.flop:
            rank = found
        if sum(terms.values(), start=0) > sum(memory.values(), start=0):
            memory = terms
    return StageCost(
        stage, whole.work * num_updates, whole.depth * num_updates, whole.flop * num_updates, rank.total.flop,
        rank.total.hbm_bytes, memory, passes=rank,
    )  # fmt: skip


def pipeline_rank(spec: ModelSpec, layout: Layout, rank: int) -> ModelSpec:
    """All that one pipeline rank holds: its stages' layers, and the embedding or the head where they hold it."""
    if layout.pp == 1:
        return spec
    stages = stages_of_rank(layout.pp_schedule, rank, layout.pp, layout.stages_per_rank)
    parts = [spec.pipeline_stage(stage, layout.num_stages) for stage in stages]
    return replace(
        spec,
        layers=tuple(run for part in parts for run in part.layers),
        has_embedding=any(part.has_embedding for part in parts),
        has_head=any(part.has_head for part in parts),
    )


def _held(layout: Layout, rank: int, num_microbatches: Number) -> Number:
    """Microbatches whose activations a pipeline rank holds at once: of 1F1B the first rank as many as there are ranks,
    the last one; of other schedules as the most loaded rank.
    """
    if layout.pp == 1:
        return 1
    if layout.pp_schedule == "1f1b":
        return minimum(num_microbatches, layout.pp - rank)
    most = peak_live_microbatches(layout.pp_schedule, layout.pp, num_microbatches, layout.stages_per_rank)
    return minimum(num_microbatches, most)


def _rank_memory(
    part: ModelSpec,
    micro: TokenCounts,
    b: Number,
    layout: Layout,
    state: StateBytes,
    kept: ActivationBytes,
    is_training: bool,
    held: Number,
) -> dict[str, Number]:
    """Device memory of one rank by term; what is offloaded waits in host memory."""
    terms: dict[str, Number] = {"parameters": state.parameters, "gathered": state.gathered}
    if is_training:
        terms |= {"gradients": state.gradients}
        terms |= {"optimizer": state.optimizer if layout.offload == "none" else 0}
        terms |= {"activations": held * (kept.layers + kept.outside)}
        # The larger of the two: they are never there at once.
        moment = "logits" if kept.logits >= kept.working else "recomputed layer"
        return terms | {moment: kept.peak - kept.layers - kept.outside}
    width = 4 * part.hidden_size + 3 * part.feed_forward.width
    working = b * micro.num_tokens / Division.of(layout).between * width
    return terms | {"working": working, "logits": kept.logits}


def log_probabilities(
    stage: str,
    spec: ModelSpec,
    batch: StepBatch,
    layout: Layout = Layout(),
    *,
    recipe: PrecisionRecipe = PRECISION_RECIPES["inference_bf16"],
    implementation: Implementation = "fused",
    logits_chunk: Number | None = None,
) -> StageCost:
    """old_logprob or ref_logprob: one forward pass, logits for response tokens."""
    return _passes(
        stage, spec, batch, layout, is_training=False, recipe=recipe, implementation=implementation, head_tokens=None,
        logits_chunk=logits_chunk,
    )  # fmt: skip


def value(
    spec: ModelSpec,
    batch: StepBatch,
    layout: Layout = Layout(),
    *,
    recipe: PrecisionRecipe = PRECISION_RECIPES["inference_bf16"],
    implementation: Implementation = "fused",
) -> StageCost:
    """The critic's forward pass: 2 D more per token instead of a vocabulary."""
    return _passes(
        "value", spec.with_scalar_head(), batch, layout, is_training=False, recipe=recipe,
        implementation=implementation, head_tokens=None, logits_chunk=None,
    )  # fmt: skip


def score_reward(
    spec: ModelSpec,
    batch: StepBatch,
    layout: Layout = Layout(),
    *,
    recipe: PrecisionRecipe = PRECISION_RECIPES["inference_bf16"],
    implementation: Implementation = "fused",
) -> StageCost:
    """The reward model's forward pass: one number per sequence."""
    return _passes(
        "score_reward", spec.with_scalar_head(), batch, layout, is_training=False, recipe=recipe,
        implementation=implementation, head_tokens=batch.num_sequences, logits_chunk=None,
    )  # fmt: skip


def update(
    stage: str,
    spec: ModelSpec,
    batch: StepBatch,
    layout: Layout = Layout(),
    *,
    recipe: PrecisionRecipe = PRECISION_RECIPES["fsdp2_fp32_masters"],
    implementation: Implementation = "fused",
    logits_chunk: Number | None = None,
) -> StageCost:
    """update_policy, or update_critic with a critic's spec (`with_scalar_head`): all epochs and minibatches.

    Optimiser steps follow each other, so they multiply depth; microbatches only add up.
    """
    return _passes(
        stage, spec, batch, layout, is_training=True, recipe=recipe, implementation=implementation, head_tokens=None,
        logits_chunk=logits_chunk,
    )  # fmt: skip


def advantage(batch: StepBatch, *, uses_values: bool = False) -> StageCost:
    """Group statistics, or GAE over each response; on the host, next to nothing."""
    tokens = batch.num_sequences * batch.lengths.mean
    if uses_values:
        longest = batch.lengths.expected_max(batch.num_sequences)
        cost = replace(op.gae(batch.num_sequences, batch.lengths.mean), depth=op.gae(1, longest).depth)
    else:
        cost = op.group_statistics(batch.num_prompts, batch.num_samples_per_prompt)
    # Rewards or advantages, values, returns and masks: four numbers per token.
    return StageCost("advantage", cost.work, cost.depth, 0, 0, cost.hbm_bytes, {"host": 16 * tokens})


def score_verifier(batch: StepBatch, seconds: Lengths | float, *, resolution_s: float = 1.0) -> StageCost:
    """Programs that check answers: processor seconds of all, and of the longest expected of all.

    seconds: of one check, or their distribution in units of resolution_s. Time on c cores lies between the larger of
    cpu_s / c and longest_cpu_s, and their sum.
    """
    if isinstance(seconds, Lengths):
        mean, longest = seconds.mean * resolution_s, seconds.expected_max(batch.num_sequences) * resolution_s
    else:
        mean = longest = seconds
    cpu_s = batch.num_sequences * mean
    return StageCost("score_verifier", 0, 0, 0, 0, 0, {}, cpu_s=cpu_s, longest_cpu_s=longest)
