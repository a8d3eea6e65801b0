"""The generated page is on disk as it is generated; formulas of stages against the numbers that estimates use."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import sympy

from plait.cost import stage_costs
from plait.cost.document.__main__ import document
from plait.cost.document.stage_formulas import STAGES, Degrees, symbolic_stage_table, traffic_terms
from plait.cost.document.symbols import SYMBOLS, amount, dense_spec, fill, lg, show, whole_parts
from plait.cost.layers import Division
from plait.cost.lengths import constant_length
from plait.cost.parameter_tensors import DecoderShape
from plait.cost.stage_costs import StepBatch
from plait.cost.state import PRECISION_RECIPES, rank_state
from plait.cost.traffic.layout import Work, decode_traffic, inference_traffic, training_traffic
from plait.cost.traffic.term import by_name
from plait.parallel.degrees import Layout

ROOT = Path(__file__).parents[3]
SIZES = {"V": 512, "D": 64, "L": 8, "N": 16, "M": 8, "H": 16, "F": 256}
STEP = {"B": 32, "P": 8, "G": 4, "S": 24, "T": 40, "s": 64, "b": 2, "u": 2, "m": 2}
SPEC = dense_spec(SIZES)


def numbers_of(layout):
    degrees = {"r": layout.data_parallel, "z": layout.dp_shard, "t": layout.tp, "c": layout.cp, "p": layout.pp}
    return {**SIZES, **STEP, **degrees}


def test_the_page_on_disk_is_the_generated_one():
    """After a change of a formula: make docs."""
    assert (ROOT / "docs" / "parallelism.md").read_text() == document()


def test_the_page_has_every_level_and_no_leftovers():
    page = (ROOT / "docs" / "parallelism.md").read_text()
    for level in ("Operator", "Layer", "Model", "Stage", "Strategy", "Step"):
        assert f"\n### {level}\n" in page
    assert page.count("**Insight.**") == page.count("\n### ")
    # Nothing of sympy's own spelling, and rows as long as their headers.
    assert not re.search(r"ceiling|Piecewise|log\(|\*\*\w+\*\*\w|nan|zoo", page)


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("dp4", {}),
        ("fsdp4", {"zero": 1}),
        ("fsdp4", {"zero": 2}),
        ("fsdp4", {}),
        ("dp2fsdp4", {}),
        ("tp4", {}),
        ("tp4", {"sp": True}),
        ("tp2", {"sp": True, "recompute": "full"}),
        ("tp2", {"recompute": "full"}),
        ("cp4", {"zero": 0}),
        ("cp4", {"zero": 0, "cp_kind": "ulysses"}),
        ("fsdp2tp2", {}),
        ("fsdp2tp2cp2", {}),
        ("pp4", {}),
        ("pp4", {"pp_schedule": "interleaved_1f1b"}),
        ("fsdp2pp4", {}),
    ],
)
def test_symbols_count_the_collectives_that_numbers_count(text, settings):
    layout = Layout.parse(text, **settings)
    numbers = numbers_of(layout)
    shape = DecoderShape(8, 64, 16, 8, 16, 256, 512)
    tokens = STEP["B"] * STEP["s"] // (layout.data_parallel * STEP["m"])
    for is_training in (True, False):
        updates = STEP["u"] if is_training else 1
        work = Work(STEP["m"], tokens // updates, activation_bytes=2, parameter_bytes=2, gradient_bytes=4)
        count = training_traffic if is_training else inference_traffic
        # One number for all norms of a rank, or one for each tensor, is of no weight here.
        expected = by_name(count(shape, layout, work, min(1, layout.pp - 1)))
        found = by_name(traffic_terms(Degrees.of(layout), is_training=is_training))
        expected.pop("grad_norm_all_reduce", None)
        found.pop("grad_norm_all_reduce", None)
        assert set(found) == set(expected)
        for name, transfer in expected.items():
            for part in ("sent_bytes", "num_messages", "num_rounds"):
                value = fill(whole_parts(getattr(found[name], part)), numbers)
                assert value == pytest.approx(float(getattr(transfer, part))), (name, part)


BATCH = StepBatch(8, 4, 24, constant_length(40), num_tokens_per_microbatch=512, num_sequences_per_minibatch=16)


@pytest.mark.parametrize("stage", ["generate", "old_logprob", "ref_logprob", "value", "score_reward", "update_policy",
                                   "update_critic"])  # fmt: skip
def test_stages_have_the_work_and_depth_that_estimates_use(stage):
    expected = {
        "generate": lambda: stage_costs.generate(SPEC, BATCH),
        "old_logprob": lambda: stage_costs.log_probabilities("old_logprob", SPEC, BATCH),
        "ref_logprob": lambda: stage_costs.log_probabilities("ref_logprob", SPEC, BATCH),
        "value": lambda: stage_costs.value(SPEC, BATCH),
        "score_reward": lambda: stage_costs.score_reward(SPEC, BATCH),
        "update_policy": lambda: stage_costs.update("update_policy", SPEC, BATCH),
        "update_critic": lambda: stage_costs.update("update_critic", SPEC.with_scalar_head(), BATCH),
    }[stage]()
    found = dict(symbolic_stage_table(stage, Layout()))
    numbers = numbers_of(Layout())
    for quantity, value in (
        ("W, operations of all devices", expected.work),
        ("D, dependent operations", expected.depth),
        ("FLOP of the model, all devices", expected.flop),
        ("FLOP of one device", expected.rank_flop),
    ):
        assert fill(found[quantity], numbers) == pytest.approx(float(value)), quantity


@pytest.mark.parametrize("text", ["dp4", "fsdp4", "fsdp2tp2", "tp4", "fsdp2cp2"])
def test_ranks_share_the_products(text):
    layout = Layout.parse(text)
    for stage in ("old_logprob", "update_policy"):
        found, numbers = dict(symbolic_stage_table(stage, layout)), numbers_of(layout)
        whole = fill(found["FLOP of the model, all devices"], numbers)
        assert fill(found["FLOP of one device"], numbers) * layout.world_size == pytest.approx(whole)


def test_memory_is_that_of_the_state_formulas():
    for text in ("fsdp4", "tp2", "fsdp2tp2"):
        layout = Layout.parse(text)
        found, numbers = dict(symbolic_stage_table("update_policy", layout)), numbers_of(layout)
        division, recipe = Division(tp=layout.tp), PRECISION_RECIPES["fsdp2_fp32_masters"]
        state = rank_state(SPEC, recipe, division, zero=3, dp_shard=layout.dp_shard)
        for term, size in (("parameters", state.parameters), ("gradients", state.gradients),
                           ("optimizer", state.optimizer)):  # fmt: skip
            assert fill(found[f"memory: {term}"], numbers) == pytest.approx(float(size)), term


def test_rounds_of_generation_are_those_of_its_steps():
    layout = Layout.parse("tp4")
    found = dict(symbolic_stage_table("generate", layout))
    shape = DecoderShape(8, 64, 16, 8, 16, 256, 512)
    step = decode_traffic(shape, layout, STEP["B"])
    rounds = sum(term.transfer().num_rounds for term in step)
    assert fill(found["R, rounds that nothing hides"], numbers_of(layout)) == (STEP["T"] - 1) * rounds


def test_every_stage_has_formulas_and_others_are_refused():
    for stage in STAGES:
        assert symbolic_stage_table(stage, Layout.parse("fsdp2"))
    with pytest.raises(ValueError, match=r'"training".*generate'):
        symbolic_stage_table("training", Layout())


def test_printing():
    D, n = SYMBOLS["D"], SYMBOLS["n"]
    assert show(2 * D**2 * n + 3.5) == "2 D^2 n + 7/2"
    assert show(sympy.ceiling(sympy.log(D) / sympy.log(2)) + 1) == "lg(D) + 1"
    assert lg(1) == 0
    assert whole_parts(sympy.Max(1, D / SYMBOLS["t"])) == D / SYMBOLS["t"]
    assert (amount(0, "B"), amount(1234, "B"), amount(12.5)) == ("0 B", "1.23 kB", "12.5")
    # The depth is evaluated, not approximated: 5 rows make a tree of 3 levels.
    assert fill(sympy.ceiling(sympy.log(n) / sympy.log(2)), {"n": 5}) == 3


def test_sympy_loads_only_for_documentation():
    code = "import sys, plait.cost.composition.step; assert 'sympy' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, plait.cost.document.stage_formulas; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
