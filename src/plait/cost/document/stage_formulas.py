"""The formulas of one stage under one layout, as expressions: for `plait explain --symbolic` and the documentation.

Torch-free. The same functions as the estimates use, called with symbols: a decoder of the model's kind, sequences of
S + T tokens each (s = S + T), and a symbol for every degree of the layout that is above 1 (t for tp, c for cp, p for
pp, z for dp_shard, r for all data-parallel ranks). Degrees divide what they split; microbatches and minibatches are
equal.
"""

from dataclasses import dataclass
from typing import Any

import sympy

from plait.cost import operators as op
from plait.cost.activations import activation_bytes
from plait.cost.document.symbols import SYMBOLS, dense_spec, whole_parts
from plait.cost.generation import decode, decode_step, prefill
from plait.cost.layers import WHOLE, Division
from plait.cost.model_costs import backward, forward
from plait.cost.model_spec import ModelSpec
from plait.cost.operators import Cost
from plait.cost.state import PRECISION_RECIPES, PrecisionRecipe, local_parameters, rank_state
from plait.cost.tokens import TokenCounts, uniform_tokens
from plait.cost.traffic.context import ring_terms, ulysses_terms
from plait.cost.traffic.data import (
    ddp_terms,
    fsdp_terms,
    gathers_per_step,
    gradient_norm_terms,
    hsdp_terms,
    scatters_per_step,
)
from plait.cost.traffic.pipeline import pp_terms, pp_token_terms
from plait.cost.traffic.tensor import (
    replicated_gradient_terms,
    sp_layer_terms,
    tp_embedding_terms,
    tp_head_terms,
    tp_layer_terms,
    tp_logits_terms,
)
from plait.cost.traffic.term import Term, total
from plait.cost.verifier_time import verifier_least_s, verifier_most_s
from plait.parallel.degrees import Layout

Formulas = list[tuple[str, Any]]
"""(quantity with its unit, expression)."""

PASSES = ("old_logprob", "ref_logprob", "value", "score_reward", "update_policy", "update_critic")
STAGES = ("generate", "score_verifier", *PASSES, "advantage", "sync_weights")


@dataclass(frozen=True, slots=True)
class Degrees:
    """Symbols for the degrees of a layout that are above 1, and 1 for the others. r: dp_replicate x dp_shard.

    spec: the decoder, with symbols for its sizes.
    """

    layout: Layout
    t: Any
    c: Any
    p: Any
    z: Any
    r: Any
    spec: ModelSpec

    @classmethod
    def of(cls, layout: Layout, spec: ModelSpec | None = None) -> "Degrees":
        """Which degrees a layout has."""
        one = sympy.Integer(1)

        def symbol(name: str, degree: int) -> Any:
            return SYMBOLS[name] if degree > 1 else one

        shards = symbol("z", layout.dp_shard)
        replicas = SYMBOLS["r"] if layout.dp_replicate > 1 else shards
        return cls(layout, symbol("t", layout.tp), symbol("c", layout.cp), symbol("p", layout.pp), shards, replicas,
                   dense_spec() if spec is None else spec)  # fmt: skip

    @property
    def division(self) -> Division:
        """How a layer is divided."""
        return Division(tp=self.t, sp=self.layout.sp, cp=self.c)


def symbolic_stage_table(stage_name: str, layout: Layout, spec: ModelSpec | None = None) -> Formulas:
    """Work, depth, rounds, FLOP, bytes and memory of a stage as expressions in the letters of `symbols.NAMES`.

    spec: with symbols for sizes (`symbols.symbolic_spec`), else a dense decoder. Experts are not spread (ep 1).
    Raises ValueError for a stage that is not in STAGES.
    """
    if stage_name not in STAGES:
        raise ValueError(f'there are no formulas for the stage "{stage_name}"; known: {", ".join(STAGES)}')
    degrees = Degrees.of(layout, spec)
    if stage_name == "generate":
        found = _generate(degrees)
    elif stage_name == "advantage":
        found = _advantage()
    elif stage_name == "score_verifier":
        found = _verifier()
    elif stage_name == "sync_weights":
        found = _sync(degrees)
    else:
        found = _passes(stage_name, degrees)
    return [(quantity, whole_parts(value)) for quantity, value in found]


def _batch(num_head_tokens: Any) -> TokenCounts:
    s = SYMBOLS
    return uniform_tokens(s["B"], s["s"], num_head_tokens=num_head_tokens)


def _one_pass(stage: str, spec: ModelSpec, tokens: TokenCounts, degrees: Degrees | None) -> Cost:
    """Forward (and backward) over some tokens: whole (no degrees) or of one rank."""
    b, is_policy = SYMBOLS["b"], spec.num_outputs is None
    division = WHOLE if degrees is None else degrees.division
    cost = forward(spec, tokens, b, division, with_logprobs=is_policy)
    if stage in ("update_policy", "update_critic"):
        how = "none" if degrees is None else degrees.layout.recompute
        cost += backward(spec, tokens, b, division, recompute=how, with_logprobs=is_policy)
    return cost


def _passes(stage: str, degrees: Degrees) -> Formulas:
    """As `stage_costs` composes them, in expectation over equal sequences."""
    s, is_training = SYMBOLS, stage in ("update_policy", "update_critic")
    spec = degrees.spec if stage in ("old_logprob", "ref_logprob", "update_policy") else degrees.spec.with_scalar_head()
    tokens = _batch(1 if stage == "score_reward" else s["T"])
    updates = s["u"] if is_training else 1
    each = tokens * (sympy.Integer(1) / updates)
    whole = _one_pass(stage, spec, each, None)
    how = degrees.layout.recompute
    executed = _one_pass(stage, spec, each, Degrees.of(Layout(recompute=how)))
    rank = _one_pass(stage, spec, each * (1 / (degrees.r * s["m"])), degrees) * (s["m"] / degrees.p)
    if is_training:
        step = op.policy_loss(each.num_head_tokens) + op.clip(spec.num_parameters) + op.adam(spec.num_parameters)
        whole, executed = whole + step, executed + step
    terms = traffic_terms(degrees, is_training=is_training, has_vocabulary=spec.num_outputs is None)
    moved = total(terms)
    waited = total(term for term in terms if not term.is_overlappable)
    return [
        ("W, operations of all devices", executed.work * updates),
        ("D, dependent operations", executed.depth * updates),
        ("R, rounds that nothing hides", waited.num_rounds * updates),
        ("FLOP of the model, all devices", whole.flop * updates),
        ("FLOP of one device", rank.flop * updates),
        ("bytes sent per device", moved.sent_bytes * updates),
        ("bytes through device memory", rank.hbm_bytes * updates),
        *_memory(spec, degrees, is_training),
    ]


def _memory(spec: ModelSpec, degrees: Degrees, is_training: bool) -> Formulas:
    """Per device. A pipeline rank holds 1/p of the layers; the first one as many microbatches as there are ranks."""
    s, layout = SYMBOLS, degrees.layout
    recipe = PRECISION_RECIPES["fsdp2_fp32_masters" if is_training else "inference_bf16"]
    zero = 0 if layout.dp_shard * layout.cp == 1 else layout.zero
    state = rank_state(spec, recipe, degrees.division, zero=zero, dp_shard=degrees.z)
    micro = _batch(s["T"]) * (1 / (degrees.r * s["m"] * (s["u"] if is_training else 1)))
    kept = activation_bytes(spec, micro, s["b"], division=degrees.division, recompute=layout.recompute)
    found: Formulas = [("memory: parameters", state.parameters / degrees.p)]
    if is_training:
        found += [
            ("memory: gradients", state.gradients / degrees.p),
            ("memory: optimizer", state.optimizer / degrees.p),
            ("memory: activations", kept.layers),
        ]
    return [*found, ("memory: logits", kept.logits)]


def traffic_terms(degrees: Degrees, *, is_training: bool, has_vocabulary: bool = True) -> tuple[Term, ...]:
    """Collectives of one device (an inner pipeline rank) in one optimiser step or inference pass, with symbols.

    The same terms as `traffic.layout` puts together for numbers, of an inner pipeline rank, whose layers are 1/p of
    all; without a pipeline also of embedding and head.
    """
    s, layout = SYMBOLS, degrees.layout
    t, c, m = degrees.t, degrees.c, s["m"]
    num_layers = s["L"] / degrees.p
    updates = s["u"] if is_training else 1
    n = s["B"] * s["s"] / (degrees.r * m * updates)
    width = n / c * s["D"] * s["b"]
    terms: tuple[Term, ...] = ()
    if layout.tp > 1:
        terms += _tensor(degrees, num_layers, width, n / c, is_training, has_vocabulary)
    heads = {
        "num_kv_heads": s["M"] / t,
        "head_size": s["H"],
        "bytes_per_number": s["b"],
        "num_layers": num_layers,
        "m": m,
        "is_training": is_training,
        "num_recomputed": int(layout.recompute == "full"),
    }
    if layout.cp > 1 and layout.cp_kind == "ring":
        terms += ring_terms(n, c, **heads, bytes_per_gradient=4)
    elif layout.cp > 1:
        terms += ulysses_terms(n, c, num_heads=s["N"] / t, **heads)
    if layout.pp > 1:
        boundary = width / t if layout.sp else width
        terms += pp_terms(
            boundary,
            schedule=layout.pp_schedule,
            p=layout.pp,
            v=layout.stages_per_rank,
            m=m,
            rank=min(1, layout.pp - 1),
            is_training=is_training,
        )
    terms += _weights(degrees, num_layers, is_training)
    return tuple(term for term in terms if term.num_calls != 0)


def _tensor(
    degrees: Degrees, num_layers: Any, width: Any, rows: Any, is_training: bool, has_vocabulary: bool
) -> tuple[Term, ...]:
    t, m, layout = degrees.t, SYMBOLS["m"], degrees.layout
    common = {"num_layers": num_layers, "m": m, "is_training": is_training}
    is_full = layout.recompute == "full"
    terms = (
        sp_layer_terms(width, t, is_recomputed=is_full, **common)
        if layout.sp
        else tp_layer_terms(width, t, num_recomputed=int(is_full), **common)
    )
    if layout.sp and is_training:
        count = 2 * num_layers + int(layout.pp == 1)
        reduces = _scatters(degrees) if _is_sharded(degrees) else 1
        terms += replicated_gradient_terms(SYMBOLS["D"] * SYMBOLS["b"], count, t, num_reduces=reduces)
    if layout.pp == 1:
        terms += tp_embedding_terms(width, t, m=m, is_training=is_training, sp=layout.sp)
        if has_vocabulary:
            terms += tp_head_terms(width, rows, t, m=m, is_training=is_training, sp=layout.sp)
    return terms


def _is_sharded(degrees: Degrees) -> bool:
    return degrees.layout.zero > 0 and degrees.layout.shard_ranks > 1


def _scatters(degrees: Degrees) -> Any:
    return scatters_per_step(degrees.layout.zero, SYMBOLS["m"], is_once=degrees.layout.pp > 1)


def _weights(degrees: Degrees, num_layers: Any, is_training: bool) -> tuple[Term, ...]:
    """Gathers and reductions of weights and gradients: layers, and what is outside them where there is no pipeline."""
    layout, m, recipe = degrees.layout, SYMBOLS["m"], PRECISION_RECIPES["fsdp2_fp32_masters"]
    spec = degrees.spec
    local = local_parameters(spec, degrees.division)
    outside = local.embedding + local.head + spec.hidden_size
    layer = (local.total - outside) / SYMBOLS["L"]
    shards, copies = degrees.z * degrees.c, degrees.r / degrees.z
    if not _is_sharded(degrees):
        held = layer * num_layers + (outside if layout.pp == 1 else 0)
        return (
            ddp_terms(held * recipe.gradient_b, degrees.r * degrees.c)
            if is_training and degrees.r * degrees.c != 1
            else ()
        )
    terms: tuple[Term, ...] = ()
    for numbers, count, is_root in ((layer, num_layers, False), (outside, int(layout.pp == 1), True)):
        if is_training:
            gathers = gathers_per_step(layout.zero, m, is_root=is_root, is_kept_gathered=layout.pp > 1)
        else:
            gathers = 0 if layout.zero < 3 else (1 if layout.pp > 1 else m)
        terms += fsdp_terms(
            numbers * recipe.parameter_b,
            numbers * recipe.gradient_b,
            shards,
            num_units=count,
            num_gathers=gathers,
            num_scatters=_scatters(degrees) if is_training else 0,
        )
        if is_training and layout.dp_replicate > 1:
            terms += hsdp_terms(numbers * recipe.gradient_b, shards, copies, num_units=count)
    if is_training and layout.tp > 1:
        terms += gradient_norm_terms("dp_shard", shards) + gradient_norm_terms("tp", degrees.t)
    return terms


def _generate(degrees: Degrees) -> Formulas:
    """Prefill of every prompt, then T - 1 decode steps of all sequences at once; a replica holds all of its own."""
    s, b, spec = SYMBOLS, SYMBOLS["b"], degrees.spec
    first, after = prefill(spec, s["B"], s["S"], b), decode(spec, s["S"], s["T"], b)
    own, steps = s["B"] / degrees.r, s["T"] - 1
    division = Division(tp=degrees.t)
    # Every step's traffic is linear in its context, so the middle one stands for all.
    middle = decode_step(spec, own, s["S"] + s["T"] / 2, weight_b=b, kv_b=b, b=b, division=division)
    prompts = prefill(spec, own, s["S"], b, division)
    width = own * s["D"] * b
    terms: tuple[Term, ...] = ()
    if degrees.layout.tp > 1:
        num_layers = s["L"] / degrees.p
        terms += tp_layer_terms(width, degrees.t, num_layers=num_layers, m=1, is_training=False)
        terms += tp_embedding_terms(width, degrees.t, m=1, is_training=False, sp=False)
        terms += tp_logits_terms(own, s["V"], 4, degrees.t)
    if degrees.layout.pp > 1:
        terms += pp_terms(
            width, schedule="1f1b", p=degrees.layout.pp, v=1, m=1, rank=min(1, degrees.layout.pp - 1), is_training=False
        )
        terms += pp_token_terms(own, p=degrees.layout.pp, rank=0)
    moved = total(terms)
    return [
        ("W, operations of all devices", first.work + s["B"] * after.work),
        ("D, dependent operations", prefill(spec, 1, s["S"], b).depth + after.depth),
        ("R, rounds that nothing hides", steps * moved.num_rounds),
        ("FLOP of the model, all devices", first.flop + s["B"] * after.flop),
        ("FLOP of one device", (prompts.flop + steps * middle.flop) / degrees.p),
        ("bytes sent per device", steps * moved.sent_bytes),
        ("bytes through device memory", (prompts.hbm_bytes + steps * middle.hbm_bytes) / degrees.p),
        ("memory: parameters", b * local_parameters(spec, division).total / degrees.p),
        ("memory: kv_cache", own * spec.kv_bytes(s["s"], b, tp=degrees.t) / degrees.p),
    ]


def _advantage() -> Formulas:
    s = SYMBOLS
    group, scan = op.group_statistics(s["P"], s["G"]), op.gae(s["B"], s["T"])
    return [
        ("W, group statistics", group.work),
        ("D, group statistics", group.depth),
        ("W, GAE as a scan", scan.work),
        ("D, GAE as a scan", scan.depth),
    ]


def _verifier() -> Formulas:
    names = sympy.symbols("v_mean v_max cores", positive=True)
    mean, longest, cores = names
    return [
        ("seconds, at least", verifier_least_s(SYMBOLS["B"], cores, mean, longest)),
        ("seconds, at most", verifier_most_s(SYMBOLS["B"], cores, mean, longest)),
    ]


def _sync(degrees: Degrees) -> Formulas:
    recipe: PrecisionRecipe = PRECISION_RECIPES["inference_bf16"]
    needed = recipe.parameter_b * local_parameters(degrees.spec, Division(tp=degrees.t)).total / degrees.p
    return [
        ("W, operations of all devices", sympy.Integer(0)),
        ("D, dependent operations", sympy.Integer(0)),
        ("bytes received per device, at most", needed),
    ]
