"""Tables of one model on one device: operators, layers, passes. Torch-free."""

from typing import Any

from plait.cost import operators as op
from plait.cost.activations import layer_bytes
from plait.cost.document.symbols import SYMBOLS, amount, dense_spec, fill
from plait.cost.document.table import Table, formula
from plait.cost.generation import decode, decode_step, prefill, resident_context
from plait.cost.layers import layer_backward, layer_forward, layer_recompute
from plait.cost.lengths import constant_length
from plait.cost.model_catalogue import find_model
from plait.cost.model_costs import backward, forward
from plait.cost.model_spec import Experts, FeedForward, GroupedAttention, LayerRun, ModelSpec
from plait.cost.operators import AttentionShape, Cost
from plait.cost.tokens import uniform_tokens

_S = SYMBOLS
EXAMPLE_MODEL = "Qwen3-8B"


def example_numbers() -> dict[str, float]:
    """Values of the letters: the example model, and a step of 128 prompts x 8 samples of 512 + 2,048 tokens."""
    spec = find_model(EXAMPLE_MODEL)
    mixture = find_model("Qwen3-30B-A3B")
    attention, experts = spec.attention, mixture.experts
    assert isinstance(attention, GroupedAttention)
    assert experts is not None
    numbers = {
        "V": spec.vocab_size, "D": spec.hidden_size, "L": spec.num_layers, "F": spec.feed_forward.width,
        "N": attention.num_heads, "M": attention.num_kv_heads, "H": attention.head_size,
        "E": experts.num_experts, "K": experts.num_experts_per_token, "F_e": experts.expert.width,
        "B": 1024, "P": 128, "G": 8, "S": 512, "T": 2048, "s": 2560, "n": 8192, "x": 2560, "a": 128, "b": 2,
        "u": 4, "m": 4, "r": 8, "z": 8, "t": 8, "c": 8, "p": 8, "v": 2, "e": 8, "A": spec.num_parameters,
    }  # fmt: skip
    return {name: float(number) for name, number in numbers.items()}


def _cost_row(name: str, cost: Cost, numbers: dict[str, float]) -> tuple[str, ...]:
    work, traffic = fill(cost.work, numbers), fill(cost.hbm_bytes, numbers)
    intensity = f"{work / traffic:.3g}" if traffic else "-"
    depth = f"{fill(cost.depth, numbers):.0f}"
    return (name, formula(cost.work), formula(cost.depth), formula(cost.hbm_bytes), amount(work), depth, intensity)


def operator_table() -> Table:
    """Every operator, forward, and the backward ones that differ."""
    n, d, f, b = _S["n"], _S["D"], _S["F"], _S["b"]
    x, a, s, heads = _S["x"], _S["a"], _S["s"], _S["N"]
    size, keys = _S["H"], 2 * _S["M"] * _S["H"]

    def core(pairs: Any, queries: Any, cached: Any, longest: Any) -> AttentionShape:
        return AttentionShape(pairs, queries, cached, longest, heads, size, size, keys)

    sequence, decoding = core(s * (s + 1) / 2, s, s, s), core(a * x, a, a * x, x)
    costs = {
        "linear y = x A (D to F)": op.linear(n, d, f, b),
        "linear dx": op.linear_input_gradient(n, d, f, b),
        "linear dA": op.linear_weight_gradient(n, d, f, b),
        "RMS norm": op.rms_norm(n, d, b),
        "RMS norm, backward": op.rms_norm_backward(n, d, b),
        "softmax over x": op.softmax(n, x, b),
        "attention core, one causal sequence": op.attention_core(sequence, b),
        "attention core, backward (fused)": op.attention_core_backward(sequence, b),
        "attention core, one decode step": op.attention_core(decoding, b),
        "rotary positions": op.rope(n, (heads + _S["M"]) * size, b),
        "silu(gate) up": op.gated_activation(n, f, b),
        "residual": op.residual(n, d, b),
        "embedding": op.embedding(n, d, b),
        "routing to K of E experts": op.routing(n, _S["E"], _S["K"], b),
        "weighted sum of K experts": op.expert_combination(n, d, _S["K"], b),
        "log-softmax over V": op.log_softmax(n, _S["V"], b),
        "sampling a token each": op.sampling(a, _S["V"], b),
        "policy loss": op.policy_loss(n),
        "gradient norm and clipping": op.clip(_S["A"]),
        "AdamW": op.adam(_S["A"]),
        "group statistics": op.group_statistics(_S["P"], _S["G"]),
        "GAE as a scan": op.gae(_S["B"], _S["T"]),
    }
    numbers = example_numbers()
    return Table(
        "Operator",
        f"n rows. Example: {EXAMPLE_MODEL}, n = 8,192 tokens, b = 2; one sequence of s = 2,560; a = 128 sequences that "
        "decode over x = 2,560 keys; experts of Qwen3-30B-A3B.",
        ("operator", "W", "D", "bytes through memory", "W, example", "D, example", "W per byte"),
        [_cost_row(name, cost, numbers) for name, cost in costs.items()],
        "Every operator is shallow (its depth is a logarithm), so what tells them apart is work per byte: products of "
        "many rows and attention over whole sequences are limited by arithmetic, everything else by memory bandwidth.",
    )


def _mixture(symbols: dict[str, Any]) -> ModelSpec:
    experts = Experts(symbols["E"], symbols["K"], FeedForward(symbols["F_e"]))
    attention = GroupedAttention(symbols["N"], symbols["M"], symbols["H"], symbols["H"])
    layers, unused = (LayerRun(symbols["L"], is_sparse=True),), FeedForward(symbols["F"])
    return ModelSpec("mixture", symbols["V"], symbols["D"], layers, attention, unused, experts, False, 1 << 20)


def layer_table() -> Table:
    """One layer over one sequence of s tokens."""
    b, tokens, dense, sparse = _S["b"], uniform_tokens(1, _S["s"]), LayerRun(1), LayerRun(1, is_sparse=True)
    spec, mixture, numbers = dense_spec(), _mixture(SYMBOLS), example_numbers()
    rows = []
    for name, cost, kept in (
        ("dense, forward", layer_forward(spec, dense, tokens, b), layer_bytes(spec, dense, tokens, b).total),
        ("dense, backward", layer_backward(spec, dense, tokens, b), 0),
        ("recomputed, selective", layer_recompute(spec, dense, tokens, b, "selective"),
         layer_bytes(spec, dense, tokens, b, recompute="selective").total),
        ("recomputed, full", layer_recompute(spec, dense, tokens, b, "full"),
         layer_bytes(spec, dense, tokens, b, recompute="full").total),
        ("K of E experts, forward", layer_forward(mixture, sparse, tokens, b),
         layer_bytes(mixture, sparse, tokens, b).total),
        ("K of E experts, backward", layer_backward(mixture, sparse, tokens, b), 0),
    ):  # fmt: skip
        shown = (formula(cost.flop), formula(cost.depth), formula(kept))
        example = (amount(fill(cost.flop, numbers), "FLOP"), f"{fill(cost.depth, numbers):.0f}")
        rows.append((name, *shown, *example, amount(fill(kept, numbers), "B")))
    return Table(
        "Layer",
        "One layer, one causal sequence of s tokens, fused attention. The example mixes the experts of Qwen3-30B-A3B "
        f"into {EXAMPLE_MODEL}'s widths. Kept: activations for the backward pass.",
        ("layer", "FLOP", "D", "kept bytes", "FLOP, example", "D, example", "kept, example"),
        rows,
        "With experts, products follow the K that a token passes and parameters the E that exist; computing a layer "
        "again costs at most one more forward pass (a third of forward and backward) and keeps its input only.",
    )


def model_table() -> Table:
    """Passes of the whole model and what it holds."""
    b, numbers, spec = _S["b"], example_numbers(), dense_spec()
    one = uniform_tokens(1, _S["s"])
    step = decode_step(spec, _S["a"], _S["x"], weight_b=b, kv_b=b, b=b)
    quantities: list[tuple[str, Any, str]] = [
        ("parameters", spec.num_parameters, ""),
        ("forward, one sequence of s", forward(spec, one, b).flop, "FLOP"),
        ("forward, depth", forward(spec, one, b).depth, ""),
        ("backward, one sequence of s", backward(spec, one, b).flop, "FLOP"),
        ("backward, depth", backward(spec, one, b).depth, ""),
        ("prefill of S tokens", prefill(spec, 1, _S["S"], b).flop, "FLOP"),
        ("decode of T tokens", decode(spec, _S["S"], _S["T"], b).flop, "FLOP"),
        ("decode of T tokens, depth", decode(spec, _S["S"], _S["T"], b).depth, ""),
        ("decode step of a sequences", step.flop, "FLOP"),
        ("decode step, weights read", step.weight_bytes, "B"),
        ("decode step, KV cache read and written", step.kv_bytes, "B"),
        ("KV cache per token", spec.kv_bytes_per_token(b), "B"),
    ]
    rows = [(name, formula(value), amount(fill(value, numbers), unit)) for name, value, unit in quantities]
    context = resident_context(512, constant_length(2048))
    return Table(
        "Model",
        f"Example: {EXAMPLE_MODEL} (its norms of queries and keys left out), S = 512, T = 2,048, a = 128 sequences "
        f"over x = 2,560 keys. A slot that is refilled at once holds {context:,.0f} tokens on average (S + E[T^2] / "
        "2 E[T]).",
        ("quantity", "formula", "example"),
        rows,
        "Generating a token costs the products of one forward pass but reads all weights for it, and T tokens are T "
        "passes deep: decoding is the one part whose depth grows with the answer.",
    )
