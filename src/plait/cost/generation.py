"""Cost of generation: prefill, decode steps, KV memory, and the time of a whole rollout whose batch shrinks.

Torch-free. Source: arXiv 2608.27046, table 3 (its first decode equation leaves out a factor 2 that its closed form
has), with GQA, windows and experts; the integral over a shrinking batch is derived here and tested by simulation.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from plait.cost import operators as op
from plait.cost.arithmetic import Number, ceil, floor, log2, maximum, minimum
from plait.cost.layers import WHOLE, Division
from plait.cost.lengths import Lengths, any_alive
from plait.cost.model_costs import forward
from plait.cost.model_spec import ModelSpec
from plait.cost.operators import Cost
from plait.cost.state import local_parameters
from plait.cost.tokens import TokenCounts, attended_pairs, decode_tokens, uniform_tokens


def prefill(
    spec: ModelSpec, num_sequences: Number, prompt_tokens: Number, b: Number, division: Division = WHOLE
) -> Cost:
    """Prompts of S tokens, logits of the last position only: S L P + 2 L N H S (S + 1) + 2 D V each."""
    tokens = uniform_tokens(num_sequences, prompt_tokens, spec.windows, num_head_tokens=1)
    return forward(spec, tokens, b, division) + op.sampling(num_sequences, spec.vocab_size, b)


def summed_tree_depth(n: Number) -> Number:
    """Sum of ceil(log2 x) for x = 1 ... n: n k - 2^k + 1 with k = ceil(log2 n)."""
    k = ceil(log2(maximum(n, 1)))
    return n * k - 2**k + 1


def decode(
    spec: ModelSpec, prompt_tokens: Number, response_tokens: Number, b: Number, division: Division = WHOLE
) -> Cost:
    """All T - 1 decode steps of one sequence, after prefill gave the first token; bytes are those of a batch of one.

    Products: (T - 1) (L P + 2 D V) + 4 L N H [(T - 1) S + T (T - 1) / 2]; depth: the sum over steps, each one forward
    pass over a context one longer, and one draw.
    """
    steps = response_tokens - 1
    last = prompt_tokens + steps
    pairs = {w: attended_pairs(last, w) - attended_pairs(prompt_tokens, w) for w in spec.windows}
    tokens = TokenCounts(steps, steps, 1, pairs, is_decode=True)
    cost = forward(spec, tokens, b, division)
    # One step over a context of 1, then three reductions over the context in each layer and step.
    depth = forward(spec, replace(tokens, longest=1), b, division).depth * steps
    for layer in spec.layer_kinds:
        depth += 3 * layer.count * _tree_depths(prompt_tokens, last, layer.window)
    step = replace(cost, depth=depth)
    # Weights are read in every step; forward() has counted one read for all tokens together.
    weights = steps * weights_read(spec, 1, b, division) - weights_read(spec, steps, b, division)
    drawn = op.sampling(steps, spec.vocab_size, b)
    drawn = replace(drawn, depth=steps * op.sampling(1, spec.vocab_size, b).depth)
    read, products = step.read_bytes + weights, step.product_bytes + weights
    return replace(step, read_bytes=read, product_bytes=products) + drawn


def _tree_depths(first: Number, last: Number, window: int | None) -> Number:
    """Sum of ceil(log2 min(x, window)) for x = first + 1 ... last."""
    if window is None:
        return summed_tree_depth(last) - summed_tree_depth(first)
    below_last, below_first = minimum(last, window), minimum(first, window)
    full = (last - below_last) - (first - below_first)
    return summed_tree_depth(below_last) - summed_tree_depth(below_first) + full * op.tree_depth(window)


def weights_read(spec: ModelSpec, num_active: Number, b: Number, division: Division = WHOLE) -> Number:
    """Bytes of weights that one step of num_active tokens reads on one rank.

    All but the input embedding (a few rows), unless the head is the same matrix; of the experts those that the group
    of ranks choosing among them choose, on average.
    """
    local = local_parameters(spec, division)
    lookup = 0 if spec.is_tied and spec.has_head and spec.num_outputs is None else local.embedding
    total = local.total - lookup
    if spec.experts is None:
        return b * total
    group = num_active * division.experts / division.tp
    share = op.expected_experts(group, spec.experts.num_experts, spec.experts.num_experts_per_token)
    return b * (total - local.experts * (1 - share / spec.experts.num_experts))


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One decode step on one rank. weight_bytes, kv_bytes (read and written), other_bytes: traffic with memory.
    num_operators: launches.
    """

    flop: Number
    work: Number
    depth: Number
    weight_bytes: Number
    kv_bytes: Number
    other_bytes: Number
    num_operators: Number

    @property
    def hbm_bytes(self) -> Number:
        """All traffic."""
        return self.weight_bytes + self.kv_bytes + self.other_bytes


def decode_step(
    spec: ModelSpec,
    num_active: Number,
    context: Number,
    *,
    weight_b: Number = 2,
    kv_b: Number = 2,
    b: Number = 2,
    division: Division = WHOLE,
) -> DecodeStep:
    """One token for each of num_active sequences that see `context` keys (on average), on one rank.

    FLOP: a (L P + 2 D V) + 4 L N H sum x. Bytes: weights read, KV of all contexts read and one token's written,
    activations. weight_b, kv_b, b: bytes of a number in weights, cache and activations.
    """
    cost = forward(spec, decode_tokens(num_active, context, spec.windows), b, division)
    cost += op.sampling(num_active, spec.vocab_size, b)
    kv_per_b = num_active * (spec.kv_bytes(context, 1, tp=division.tp) + spec.kv_bytes(1, 1, tp=division.tp))
    weights = weights_read(spec, num_active, 1, division)
    read_kv = num_active * spec.kv_bytes(context, 1, tp=division.tp)
    other = cost.hbm_bytes - b * (weights + read_kv)
    return DecodeStep(cost.flop, cost.work, cost.depth, weight_b * weights, kv_b * kv_per_b, other, cost.num_operators)


def resident_context(prompt_tokens: Number, lengths: Lengths) -> Number:
    """Mean context of a slot that is refilled at once: S + E[T^2] / (2 E[T])."""
    return prompt_tokens + lengths.second_moment / (2 * lengths.mean)


def kv_slots(
    spec: ModelSpec, memory_bytes: Number, context: Number, b: Number = 2, *, tp: Number = 1, block: int = 16
) -> Number:
    """Sequences whose KV cache fits: memory / KV of one, its context rounded up to whole blocks.

    context: prompt + cap for an engine that reserves it, `resident_context` for one that hands out blocks as they fill.
    """
    whole = ceil(context / block) * block
    return floor(memory_bytes / spec.kv_bytes(whole, b, tp=tp))


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """seconds of all decode steps. num_steps: how many, on average. mean_active: sequences per step."""

    seconds: float
    num_steps: float
    mean_active: float


def rollout_time(
    step_s: Callable[[np.ndarray, np.ndarray], np.ndarray],
    num_sequences: float,
    prompt_tokens: float,
    lengths: Lengths,
    num_slots: float | None = None,
) -> RolloutTime:
    """Expected decode time of num_sequences on one replica, of which at most num_slots run at once.

    step_s: seconds of a step by active sequences and their mean context, for arrays. All at once: step t runs with
    probability p_t = 1 - (1 - S_t)^n, then with n S_t / p_t sequences on average, so T = sum p_t step_s(n S_t / p_t,
    S + t), exact where step_s is linear in them. With fewer slots than sequences: slots stay full until the last are
    admitted, at the context of a random moment; then the rest of those in the slots runs down (renewal theory).
    """
    if num_slots is None or num_slots >= num_sequences:
        # Prefill gave the first token: a response of T tokens takes T - 1 steps.
        steps = np.arange(1, lengths.cap)
        parts = [_running_down(step_s, lengths.survival_T[1:], num_sequences, prompt_tokens + steps)]
    else:
        rest, age = lengths.residual
        drain = _running_down(step_s, rest, num_slots, prompt_tokens + 1 + age + np.arange(lengths.cap))
        slot_steps = num_sequences * (lengths.mean - 1) - num_slots * float(rest.sum())
        full = max(slot_steps, 0.0) / num_slots
        each = step_s(np.array([float(num_slots)]), np.array([float(resident_context(prompt_tokens, lengths))]))
        parts = [(full * float(each[0]), full), drain]
    seconds, num_steps = (sum(part[i] for part in parts) for i in (0, 1))
    total = num_sequences * (lengths.mean - 1)
    return RolloutTime(seconds, num_steps, total / num_steps if num_steps else 0.0)


def _running_down(
    step_s: Callable[[np.ndarray, np.ndarray], np.ndarray],
    survival_T: np.ndarray,
    num_sequences: float,
    context_T: np.ndarray,
) -> tuple[float, float]:
    """(seconds, steps) until the last of num_sequences ends, none being admitted."""
    alive = any_alive(survival_T, num_sequences)
    is_possible = alive > 1e-12
    alive, survival, context = alive[is_possible], survival_T[is_possible], context_T[is_possible]
    seconds = alive * step_s(num_sequences * survival / alive, context.astype(float))
    return float(seconds.sum()), float(alive.sum())
