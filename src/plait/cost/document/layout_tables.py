"""Tables of stages and of how one model is split: collectives, pipelines, strategies. Torch-free."""

from typing import Any

import sympy

from plait.cost import collectives, pipeline
from plait.cost.collectives import Transfer
from plait.cost.document.model_tables import EXAMPLE_MODEL, example_numbers
from plait.cost.document.stage_formulas import STAGES, symbolic_stage_table
from plait.cost.document.symbols import SYMBOLS, amount, fill
from plait.cost.document.table import Table, formula
from plait.cost.traffic.experts import ep_terms
from plait.cost.traffic.term import total
from plait.parallel.degrees import Layout

_S = SYMBOLS
WORK, DEPTH, ROUNDS = "W, operations of all devices", "D, dependent operations", "R, rounds that nothing hides"
FLOP, RANK_FLOP, SENT = "FLOP of the model, all devices", "FLOP of one device", "bytes sent per device"


def stage_table() -> Table:
    """Every stage on one device: what splitting starts from."""
    numbers, rows = example_numbers(), []
    for stage in STAGES:
        found = dict(symbolic_stage_table(stage, Layout()))
        if stage == "advantage":
            for way in ("group statistics", "GAE as a scan"):
                work, depth = found[f"W, {way}"], found[f"D, {way}"]
                example = (amount(fill(work, numbers)), amount(fill(depth, numbers)))
                rows.append((f"advantage ({way})", formula(work), formula(depth), *example, _ratio(work, depth)))
        elif stage == "score_verifier":
            least, most = found["seconds, at least"], found["seconds, at most"]
            rows.append((stage, f"{formula(least)} s at least", f"{formula(most)} s at most", "-", "-", "-"))
        elif stage == "sync_weights":
            rows.append((stage, "no arithmetic", "-", "-", "-", "-"))
        else:
            flop, work, depth = found[FLOP], found[WORK], found[DEPTH]
            example = (amount(fill(flop, numbers), "FLOP"), amount(fill(depth, numbers)))
            rows.append((stage, formula(flop), formula(depth), *example, _ratio(work, depth)))
    return Table(
        "Stage",
        f"All B = P G sequences of S prompt and T response tokens (s = S + T), one epoch in u optimiser steps. "
        f"Example: {EXAMPLE_MODEL}, 128 prompts x 8 samples, S = 512, T = 2,048, u = 4. FLOP are those in products; "
        "the last column is the average parallelism W / D with all other operations. A verifier's work is processor "
        "seconds: v_mean and v_max of one check, on a number of cores.",
        ("stage", "FLOP (operations for advantage)", "D", "FLOP, example", "D, example", "W / D"),
        rows,
        "Generation has a third of the update's products and two thousand times the depth of one pass: there is less "
        "to run at the same time in it than in any other stage, which is why it waits for memory, and for its longest "
        "answer.",
    )


def _ratio(work: Any, depth: Any) -> str:
    numbers = example_numbers()
    return amount(fill(work, numbers) / fill(depth, numbers))


def collective_table() -> Table:
    """What each collective costs one rank."""
    payload, ranks = sympy.Symbol("X", positive=True), _S["r"]
    log2 = sympy.Function("log2")(ranks)
    found: list[tuple[str, Transfer]] = [
        ("all-reduce, ring", collectives.ring_all_reduce(payload, ranks)),
        ("all-reduce, recursive doubling", collectives.recursive_doubling_all_reduce(payload, ranks)),
        ("all-reduce, halving and doubling", collectives.rabenseifner_all_reduce(payload, ranks)),
        ("reduce-scatter, ring", collectives.ring_reduce_scatter(payload, ranks)),
        ("all-gather, ring", collectives.ring_all_gather(payload, ranks)),
        ("all-gather, recursive doubling", collectives.recursive_all_gather(payload, ranks)),
        ("all-to-all, pairwise", collectives.pairwise_all_to_all(payload, ranks)),
        ("all-to-all, Bruck", collectives.bruck_all_to_all(payload, ranks)),
        ("broadcast, chain", collectives.chain_broadcast(payload, ranks)),
        ("point to point", collectives.point_to_point(payload)),
    ]
    rows = []
    for name, transfer in found:
        cells = []
        for value in (transfer.sent_bytes, transfer.num_messages, transfer.num_rounds):
            shown = sympy.sympify(value).replace(sympy.Piecewise, lambda first, *_: first[0])
            cells.append(formula(sympy.expand_log(shown).subs(sympy.log(ranks), log2 * sympy.log(2))))
        eight = fill(sympy.sympify(transfer.sent_bytes).subs(payload, 1), {"r": 8})
        rows.append((name, *cells, f"{eight:.3g} X", f"{fill(transfer.num_rounds, {'r': 8}):.0f}"))
    return Table(
        "Collectives",
        "X: bytes of the whole tensor (all-to-all: of one rank). r ranks; the example has 8. A round starts when the "
        "one before it has arrived, so each pays its latency.",
        ("collective", "bytes sent per rank", "messages", "rounds", "bytes, r = 8", "rounds, r = 8"),
        rows,
        "Rings send the fewest bytes and wait most often, trees the reverse: large gradients want the first, the small "
        "messages of decoding the second.",
    )


def pipeline_table() -> Table:
    """Idle time and live microbatches of each pipeline order."""
    p, v, m = _S["p"], _S["v"], _S["m"]
    forward, back, weight, pair = sympy.symbols("t_F t_B t_W t_FB", positive=True)
    idle = {
        "gpipe": pipeline.gpipe_idle_s(p, forward, back),
        "1f1b": pipeline.one_f_one_b_idle_s(p, forward, back),
        "interleaved_1f1b": pipeline.interleaved_idle_s(p, v, forward, back),
        "zero_bubble_v": pipeline.zero_bubble_v_idle_s(p, forward),
        "dual_pipe_v": pipeline.dual_pipe_v_idle_s(p, back, weight, pair),
    }
    values = {forward: 1, back: 2, weight: 1, pair: sympy.Rational(5, 2), p: 8, v: 2}
    rows = []
    for name, value in idle.items():
        live = pipeline.peak_live_microbatches(name, p, m, v)
        example = float(sympy.sympify(value).subs(values))
        numbers = example_numbers() | {"m": 32.0}
        rows.append((name, formula(value), formula(live), f"{example:g}", f"{fill(live, numbers):.3g}"))
    rows.append(("inference", formula(pipeline.forward_only_idle_s(p, forward)), "-", "7", "-"))
    return Table(
        "Pipelines",
        "p ranks, v stages on each, m >= 2 p microbatches. t_F, t_B: forward and whole backward of one microbatch on "
        "one rank; t_W: its weight gradients; t_FB: an overlapped pair. Example: p = 8, v = 2, m = 32, t_F = t_W = 1, "
        "t_B = 2, t_FB = 2.5. zero_bubble_v where t_F = t_B - t_W = t_W, until all ranks have ended.",
        ("order", "idle time of a rank", "live microbatches", "idle, example", "live, example"),
        rows,
        "No order changes the depth of a step; they differ in what a rank does while it would wait, and pay with "
        "messages (interleaved) or with live activations (gpipe).",
    )


STRATEGIES: dict[str, Layout] = {
    "one device": Layout(),
    "data parallel (dp)": Layout.parse("dp8"),
    "ZeRO-1": Layout.parse("fsdp8", zero=1),
    "ZeRO-2": Layout.parse("fsdp8", zero=2),
    "ZeRO-3 (fsdp)": Layout.parse("fsdp8"),
    "ZeRO-3 in replicas (dp2 fsdp4)": Layout.parse("dp2fsdp4"),
    "tensor (tp)": Layout.parse("tp8"),
    "tensor and sequence (tp, sp)": Layout.parse("tp8", sp=True),
    "pipeline (pp, 1f1b, inner rank)": Layout.parse("pp8"),
    "context, ring (cp, zero 0)": Layout.parse("cp8", zero=0),
    "context, Ulysses (cp, zero 0)": Layout.parse("cp8", zero=0, cp_kind="ulysses"),
}


def _numbers_of(layout: Layout) -> dict[str, float]:
    """The example's numbers with the degrees of a layout, one optimiser step of 256 sequences."""
    degrees = {"r": layout.data_parallel, "z": layout.dp_shard, "t": layout.tp, "c": layout.cp, "p": layout.pp}
    return example_numbers() | {"u": 1.0, "B": 256.0, "m": 32.0} | {name: float(d) for name, d in degrees.items()}


def _expert_row() -> tuple[str, ...]:
    """Experts of a mixture over the ranks that share one copy: what comes on top of ZeRO-3."""
    s, numbers = SYMBOLS, example_numbers() | {"u": 1.0, "B": 256.0, "m": 32.0}
    rows = s["B"] * s["s"] / (s["z"] * s["m"])
    mixture = {"num_experts": s["E"], "num_experts_per_token": s["K"], "hidden_size": s["D"]}
    terms = ep_terms(
        rows, s["e"], bytes_per_number=s["b"], num_layers=s["L"], m=s["m"], is_training=True, **mixture
    )  # fmt: skip
    moved = total(terms)
    sent, rounds = (formula(value) for value in (moved.sent_bytes, moved.num_rounds))
    example = (amount(fill(moved.sent_bytes, numbers), "B"), amount(fill(moved.num_rounds, numbers)))
    return ("experts (ep), on top of ZeRO-3", "`1/z`", sent, rounds, *example, "-", "-")


def strategy_table() -> Table:
    """One axis at a time: what one optimiser step costs a device."""
    rows: list[tuple[str, ...]] = []
    whole = dict(symbolic_stage_table("update_policy", Layout()))
    for name, layout in STRATEGIES.items():
        numbers = _numbers_of(layout)
        found = {q: sympy.sympify(e).subs(_S["u"], 1) for q, e in symbolic_stage_table("update_policy", layout)}
        share = sympy.simplify(found[RANK_FLOP] / whole[RANK_FLOP].subs(_S["u"], 1))
        state = found["memory: parameters"] + found["memory: gradients"] + found["memory: optimizer"]
        kept = found["memory: activations"]
        assert found[DEPTH] == whole[DEPTH].subs(_S["u"], 1), "no strategy changes depth"
        formulas = (formula(share), formula(found[SENT]), formula(found[ROUNDS]))
        values = [amount(fill(value, numbers), unit) for value, unit in ((found[SENT], "B"), (found[ROUNDS], ""))]
        held = [amount(fill(value, numbers), "B") for value in (state, kept)]
        rows.append((name, *formulas, *values, *held))
    rows.append(_expert_row())
    return Table(
        "Strategy",
        "One optimiser step on 8 devices of one axis, by ring collectives: the share of the products, bytes sent and "
        "rounds that nothing hides, per device; embedding and head are on other pipeline ranks. Rounds of overlappable "
        f"collectives (gradients, gathers of weights, ring hops) are left out. Example: {EXAMPLE_MODEL}, 256 "
        "sequences of 2,560 tokens in m = 32 microbatches of each replica; fp32 masters, gradients and moments (16 "
        "bytes per parameter), bf16 activations without recomputation; the last row sends tokens to the experts of "
        "Qwen3-30B-A3B. W and D are those of one device in every row.",
        (
            "strategy",
            "share of FLOP",
            "bytes sent",
            "rounds",
            "sent, example",
            "rounds, example",
            "state",
            "activations",
        ),
        rows,
        "Splitting one model divides work and memory and leaves W and D as they are; what is paid is bytes and rounds, "
        "and each axis pays for another thing: dp for gradients, ZeRO-3 for weights per microbatch, tp for activations "
        "per layer, ep for tokens per layer, pp for idle ranks.",
    )
