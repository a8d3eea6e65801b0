"""`plait explain --symbolic`: the formulas, made by the same code that estimates, on symbols in place of numbers."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import sympy

from plait.cost import pipeline
from plait.cost.activations import layer_bytes, logits_bytes
from plait.cost.generation import decode_step
from plait.cost.layers import Division
from plait.cost.model_catalogue import find_model
from plait.cost.model_costs import backward, forward
from plait.cost.model_spec import Experts, FeedForward, GroupedAttention, LatentAttention, LayerRun, ModelSpec
from plait.cost.state import PRECISION_RECIPES, state_bytes
from plait.cost.tokens import TokenCounts, uniform_tokens
from plait.cost.traffic.context import ring_terms, ulysses_terms
from plait.cost.traffic.data import fsdp_terms
from plait.cost.traffic.experts import ep_terms
from plait.cost.traffic.tensor import tp_layer_terms
from plait.cost.traffic.term import total
from plait.jobs.explain_request import Request
from plait.parallel.degrees import Recompute

if TYPE_CHECKING:
    from rich.console import RenderableType

LEGEND = (
    "V vocabulary, D width, L layers, N query heads, M key/value heads, H head size, F feed-forward width, E experts, "
    "K per token; B sequences of s tokens, a active sequences of x tokens; b bytes of a number; t tp, c cp, z shard "
    "ranks, e ep, p pipeline ranks, v stages per rank, m microbatches; P parameters of one tp rank; lg x = ceil(log2 x)"
)


@dataclass(frozen=True, slots=True)
class Formula:
    """what: of one stage or strategy. quantity: with its unit. expression: as the code computes it."""

    what: str
    quantity: str
    expression: str


@dataclass(frozen=True, slots=True)
class Formulas:
    """The formulas for a model's kind of decoder."""

    model: str
    formulas: tuple[Formula, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        rows = [{"what": f.what, "quantity": f.quantity, "expression": f.expression} for f in self.formulas]
        return {"model": self.model, "legend": LEGEND, "formulas": rows}

    def render(self) -> "RenderableType":
        """One block per stage or strategy."""
        from rich.console import Group
        from rich.text import Text

        lines = [Text(f"Formulas for decoders like {self.model}"), Text(LEGEND, style="dim")]
        for what in dict.fromkeys(formula.what for formula in self.formulas):
            lines.append(Text(f"\n{what}", style="bold"))
            lines += [Text(f"  {f.quantity} = {f.expression}") for f in self.formulas if f.what == what]
        return Group(*lines)


def formulas(request: Request) -> Formulas:
    """For the kind of decoder that the request's model is: its attention, experts or none. Raises ConfigError."""
    spec = find_model(request.model)
    return Formulas(spec.name, tuple(_all(_symbolic(spec))))


def _symbols(names: str) -> Any:
    return sympy.symbols(names, positive=True, integer=True)


def _symbolic(spec: ModelSpec) -> ModelSpec:
    """The same structure with symbols for sizes; every layer sparse where the model has experts."""
    V, D, L, N, M, H, F, E, K = _symbols("V D L N M H F E K")
    attention: GroupedAttention | LatentAttention
    if isinstance(spec.attention, LatentAttention):
        q, r, n, o, w = _symbols("r_q r_kv H_nope H_rope H_v")
        attention = LatentAttention(N, q if spec.attention.query_rank else None, r, n, o, w)
    else:
        attention = replace(spec.attention, num_heads=N, num_kv_heads=M, head_size=H, rope_size=H)
    experts = None
    if spec.experts is not None:
        F_e, F_s = _symbols("F_e F_s")
        shared = None if spec.experts.shared is None else FeedForward(F_s)
        experts = Experts(E, K, FeedForward(F_e), shared)
    layers = (LayerRun(L, None, experts is not None),)
    feed_forward = replace(spec.feed_forward, width=F)
    return replace(
        spec, vocab_size=V, hidden_size=D, layers=layers, attention=attention, feed_forward=feed_forward,
        experts=experts, num_learned_positions=0,
    )  # fmt: skip


def shown(expression: Any) -> str:
    """ceiling(log(x) / log(2)) as lg(x), powers as ^."""
    lg = sympy.Function("lg")
    x = sympy.Wild("x")
    expression = sympy.sympify(expression).replace(sympy.ceiling(sympy.log(x) / sympy.log(2)), lg(x))
    return str(expression).replace("**", "^").replace("*", " ")


def _all(spec: ModelSpec) -> Iterator[Formula]:
    B, s = _symbols("B s")
    tokens = uniform_tokens(B, s)
    yield from _passes(spec, tokens)
    yield from _decoding(spec)
    yield from _memory(spec, tokens)
    yield from _traffic(spec, tokens)
    yield from _pipelines()


def _passes(spec: ModelSpec, tokens: TokenCounts) -> Iterator[Formula]:
    b = _symbols("b")
    once = forward(spec, tokens, b, with_logprobs=True)
    back = backward(spec, tokens, b, with_logprobs=True)
    yield Formula("forward pass (old_logprob, ref_logprob)", "FLOP", shown(sympy.expand(once.flop)))
    yield Formula("forward pass (old_logprob, ref_logprob)", "depth D", shown(once.depth))
    yield Formula("backward pass (update_policy)", "FLOP", shown(sympy.expand(back.flop)))
    yield Formula("backward pass (update_policy)", "depth D", shown(back.depth))


def _decoding(spec: ModelSpec) -> Iterator[Formula]:
    a, x, b = _symbols("a x b")
    step = decode_step(spec, a, x, weight_b=b, kv_b=b, b=b)
    name = "one decode step (generate)"
    yield Formula(name, "FLOP", shown(sympy.expand(step.flop)))
    yield Formula(name, "depth D", shown(step.depth))
    yield Formula(name, "bytes of weights read", shown(sympy.expand(step.weight_bytes)))
    yield Formula(name, "bytes of KV cache read and written", shown(sympy.expand(step.kv_bytes)))


def _memory(spec: ModelSpec, tokens: TokenCounts) -> Iterator[Formula]:
    b, t, c, z, x, P = _symbols("b t c z x P")
    division = Division(tp=t, cp=c)
    for zero in (0, 1, 2, 3):
        state = state_bytes(P, PRECISION_RECIPES["mixed_fp32_gradients"], zero=zero, shard=z)
        yield Formula(
            "state of one rank, bf16 with fp32 gradients and masters", f"bytes, ZeRO-{zero}", shown(state.total)
        )
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    for recompute in kinds:
        kept = layer_bytes(spec, spec.layers[0], tokens, b, division=division, recompute=recompute)
        yield Formula("activations of one layer", f"bytes, recompute {recompute}", shown(sympy.expand(kept.total)))
    logits = logits_bytes(spec, tokens.num_head_tokens, b, division)
    yield Formula("logits", "bytes", shown(logits))
    yield Formula("KV cache of one sequence", "bytes", shown(spec.kv_bytes(x, b, tp=t)))


def _traffic(spec: ModelSpec, tokens: TokenCounts) -> Iterator[Formula]:
    b, t, c, z, e, m, P, M, H, N, E, K = _symbols("b t c z e m P M H N E K")
    n, D, L = tokens.num_tokens, spec.hidden_size, spec.num_layers
    heads = {"num_kv_heads": M, "head_size": H, "bytes_per_number": b, "num_layers": L, "m": m, "is_training": True}
    strategies = {
        "ZeRO-3 of one optimiser step": fsdp_terms(2 * P, 4 * P, z, num_units=1, num_gathers=2 * m, num_scatters=m),
        "tensor parallelism of a training step": tp_layer_terms(n * D * b, t, num_layers=L, m=m, is_training=True),
        "ring attention of a training step": ring_terms(n, c, **heads),
        "Ulysses of a training step": ulysses_terms(n, c, num_heads=N, **heads),
    }
    if spec.experts is not None:
        strategies["expert parallelism of a training step"] = ep_terms(
            n, e, num_experts=E, num_experts_per_token=K, hidden_size=D, bytes_per_number=b, num_layers=L, m=m,
            is_training=True,
        )  # fmt: skip
    for name, terms in strategies.items():
        moved = total(terms)
        yield Formula(name, "bytes sent per device", shown(_over_several(moved.sent_bytes)))
        yield Formula(name, "rounds", shown(_over_several(moved.num_rounds)))


def _over_several(expression: Any) -> Any:
    """For more than one rank: a choice between one and several is taken as several."""
    several = expression.replace(sympy.Piecewise, lambda *choices: choices[0][0])
    return sympy.factor(several)


def _pipelines() -> Iterator[Formula]:
    p, v, F, B, W = sympy.symbols("p v F B W", positive=True)
    idle = {
        "gpipe, 1f1b": pipeline.one_f_one_b_idle_s(p, F, B),
        "interleaved_1f1b": pipeline.interleaved_idle_s(p, v, F, B),
        "zero_bubble_v": pipeline.zero_bubble_v_idle_s(p, F),
        "dual_pipe_v": pipeline.dual_pipe_v_idle_s(p, B, W, F + B),
    }
    for schedule, seconds in idle.items():
        yield Formula("idle time of a pipeline; F, B, W: seconds of a microbatch's passes", schedule, shown(seconds))
