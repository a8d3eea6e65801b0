"""What fits, and what would: field cases, and changes tried against the changed setting itself."""

import pytest

from plait.cost.activations import logits_tensor_bytes
from plait.cost.fit import GIB, states_violation
from plait.cost.model_catalogue import find_model
from plait.cost.state import PRECISION_RECIPES
from plait.jobs.explain import explain
from plait.jobs.explain_request import Request


def test_n44_logits_of_one_microbatch():
    spec = find_model("Qwen3-8B")
    assert spec.vocab_size == 151_936
    assert logits_tensor_bytes(spec, 32_768, 4) == 19_914_555_392
    assert logits_tensor_bytes(spec, 32_768, 2) == 9_957_277_696
    assert logits_tensor_bytes(spec, 32_768, 4) / GIB == pytest.approx(18.546875, abs=1e-4)
    assert logits_tensor_bytes(spec, 32_768, 4, chunk=1024) / GIB == pytest.approx(0.57958984, abs=1e-4)


def test_c30_states_alone_are_more_than_one_card():
    recipe = PRECISION_RECIPES["fp32"]
    found = states_violation("update_policy", 7.6e9, recipe, 1, 80e9)
    assert found is not None
    assert found.rule == "states alone need 121.6e9 bytes (7.60e9 parameters x 16), more than one card of 80e9"
    for suggestion in ("2 cards", "60.8e9 each before activations", "LoRA", "offload the optimizer"):
        assert suggestion in found.change
    assert states_violation("update_policy", 7.6e9, recipe, 2, 80e9) is None


def test_c30_as_a_person_asks_it():
    report = explain(Request("Qwen2.5-7B", "1xH100", plan="dp1"))
    assert not report.fits
    rules = {violation.where: violation.rule for violation in report.violations}
    assert "121.8e9 bytes" in rules["memory.update_policy"]
    assert "one card of 80e9" in rules["memory.update_policy"]


def test_changes_come_to_what_they_say():
    # Every change that is offered for the 70B model, asked for as a plan of its own.
    batch = {"prompts": 64, "samples_per_prompt": 8, "prompt_tokens": 256, "response_tokens": 1024}
    request = Request("Llama-3.1-70B", "4x8xH100", plan="fsdp8tp4:sp", max_response_tokens=4096, **batch)
    report = explain(request)
    line = next(line for line in report.stages if line.estimate.name == "update_policy")
    assert not line.fits
    plans = {
        "recompute selective": ("fsdp8tp4:sp:selective", "4x8xH100"),
        "recompute full": ("fsdp8tp4:sp:full", "4x8xH100"),
        "policy as fsdp4tp8:sp": ("fsdp4tp8:sp", "4x8xH100"),
        "offload optimizer": ("fsdp8tp4:sp:offload_optimizer", "4x8xH100"),
        "policy as fsdp16tp4:sp": ("fsdp16tp4:sp", "8x8xH100"),
    }
    offered = {change.what: change for change in line.changes}
    assert set(plans) <= set(offered)
    for what, (plan, cluster) in plans.items():
        changed = explain(Request("Llama-3.1-70B", cluster, plan=plan, max_response_tokens=4096, **batch))
        found = next(line for line in changed.stages if line.estimate.name == "update_policy")
        assert found.num_bytes == pytest.approx(offered[what].num_bytes), what
        assert found.fits
    # A full table needs no offer.
    assert all(not line.changes for line in report.stages if line.fits)


def test_an_engine_without_room_is_offered_room():
    report = explain(Request("Llama-3.1-70B", "4x8xH100", plan="fsdp8tp4:sp:full", algorithm="ppo", prompts=64))
    line = next(line for line in report.stages if line.estimate.name == "generate")
    assert not line.fits
    assert any(change.what.startswith("generate as dp4tp8") and change.fits for change in line.changes)
    assert any(change.what.startswith("offload the policy's optimizer") and change.fits for change in line.changes)
    # What does not fit is shown, with the times it would have; so a plan can be judged before it is changed.
    assert report.step.time_s > 0
