"""Symbols for the cost formulas, a decoder made of them, and how expressions are printed. Torch-free; needs sympy.

sympy is imported here and in this package only; torch depends on it, so it is installed wherever Plait is.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy

from plait.cost.model_spec import FeedForward, GroupedAttention, LatentAttention, LayerRun, ModelSpec

NAMES: dict[str, str] = {
    "V": "vocabulary",
    "D": "model width",
    "L": "layers",
    "N": "query heads",
    "M": "key/value heads",
    "H": "head size",
    "F": "feed-forward width",
    "E": "experts",
    "K": "experts per token",
    "F_e": "width of one expert",
    "F_s": "width of the shared experts",
    "r_q": "rank of latent queries",
    "r_kv": "rank of latent keys and values",
    "H_n": "part of a latent head without positions",
    "H_r": "part of a latent head with positions",
    "H_v": "size of a latent value",
    "B": "sequences of a step (P prompts x G samples)",
    "P": "prompts",
    "G": "samples per prompt",
    "S": "prompt tokens",
    "T": "response tokens",
    "n": "tokens (rows) of one pass",
    "s": "tokens of one sequence, s = S + T",
    "x": "keys that a query sees",
    "a": "sequences that decode together",
    "b": "bytes of a number",
    "u": "optimiser steps of a step",
    "m": "microbatches of a replica and optimiser step",
    "r": "data-parallel ranks",
    "z": "ranks that share one copy (ZeRO)",
    "t": "tensor-parallel ranks",
    "c": "context-parallel ranks",
    "p": "pipeline ranks",
    "v": "pipeline stages per rank",
    "e": "expert-parallel ranks",
    "A": "parameters",
}
"""What the letters mean, in the order in which they are listed."""

SYMBOLS: dict[str, sympy.Symbol] = {name: sympy.Symbol(name, positive=True, integer=True) for name in NAMES}


class lg(sympy.Function):
    """ceil(log2 x), the depth of a tree over x numbers: not below 0."""

    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, argument: Any) -> Any:
        """lg(1) = 0."""
        return sympy.Integer(0) if argument == 1 else None


def dense_spec(symbols: Mapping[str, Any] = SYMBOLS) -> ModelSpec:
    """A decoder with grouped-query attention and a gated feed-forward part, without biases, head not tied."""
    s = symbols
    attention = GroupedAttention(s["N"], s["M"], s["H"], s["H"])
    layers, feed_forward = (LayerRun(s["L"]),), FeedForward(s["F"])
    return ModelSpec("dense", s["V"], s["D"], layers, attention, feed_forward, None, False, 1 << 20)


def symbolic_spec(spec: ModelSpec) -> ModelSpec:
    """A model's structure with symbols for its sizes; every layer is full and, where the model has experts, sparse."""
    s = SYMBOLS
    attention: GroupedAttention | LatentAttention
    if isinstance(spec.attention, LatentAttention):
        query_rank = s["r_q"] if spec.attention.query_rank else None
        attention = LatentAttention(s["N"], query_rank, s["r_kv"], s["H_n"], s["H_r"], s["H_v"])
    else:
        attention = replace(spec.attention, num_heads=s["N"], num_kv_heads=s["M"], head_size=s["H"], rope_size=s["H"])
    experts = None
    if spec.experts is not None:
        shared = None if spec.experts.shared is None else replace(spec.experts.shared, width=s["F_s"])
        one = replace(spec.experts.expert, width=s["F_e"])
        experts = replace(spec.experts, num_experts=s["E"], num_experts_per_token=s["K"], expert=one, shared=shared)
    return replace(
        spec, vocab_size=s["V"], hidden_size=s["D"], layers=(LayerRun(s["L"], None, experts is not None),),
        attention=attention, feed_forward=replace(spec.feed_forward, width=s["F"]), experts=experts,
        num_learned_positions=0,
    )  # fmt: skip


def tidy(value: Any) -> Any:
    """An expression with trees written as lg, whole fractions, and without maxima that cannot matter."""
    expression = sympy.nsimplify(sympy.sympify(value), rational=True)

    def is_tree(part: Any) -> bool:
        return isinstance(part, sympy.ceiling) and part.args[0].has(sympy.log)

    def tree(part: Any) -> Any:
        argument = sympy.simplify(2 ** part.args[0])
        if isinstance(argument, sympy.Max) and 1 in argument.args:
            argument = sympy.Max(*(a for a in argument.args if a != 1))
        return lg(argument)

    return expression.replace(is_tree, tree)


def whole_parts(value: Any, degrees: tuple[str, ...] = ("t", "e")) -> Any:
    """As if these degrees divided what they split (heads, widths, experts): no rank holds a copy or a rest."""
    divided = {SYMBOLS[name] for name in degrees}

    def chosen(*arguments: Any) -> Any:
        parts = [argument for argument in arguments if argument.free_symbols & divided]
        return sympy.Max(*(parts or arguments))

    # A symbol stands for a degree above 1, which is the first case of every choice between one rank and several.
    return sympy.sympify(value).replace(sympy.Max, chosen).replace(sympy.Piecewise, lambda first, *_: first[0])


def show(value: Any) -> str:
    """One line of plain text, the shortest of a few forms: products by spaces, powers by ^."""
    plain = tidy(value)
    forms = (plain, sympy.factor_terms(plain), sympy.factor_terms(sympy.expand(plain)))
    text = min(map(str, forms), key=len).replace("**", "^").replace("*", " ")
    return text.replace("Max(", "max(").replace("Min(", "min(").replace("ceiling(", "ceil(")


def fill(value: Any, numbers: Mapping[str, float]) -> float:
    """The number that an expression has for these values of its symbols (trees evaluated, not approximated)."""
    expression = sympy.sympify(value)
    return float(expression.subs({SYMBOLS[name]: number for name, number in numbers.items()}))


def amount(number: float, unit: str = "") -> str:
    """Three digits and a prefix: 1.23 T."""
    if number == 0:
        return f"0 {unit}".strip()
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale:
            return f"{number / scale:.3g} {prefix}{unit}"
    return f"{number:.3g} {unit}".strip()
