"""Memory said before it is taken, and what happens where it is not there."""

from pathlib import Path

import pytest

from plait.errors import ConfigError
from plait.jobs import check as check_module
from plait.jobs import machine
from plait.jobs.check import check_recipe
from plait.jobs.memory_room import memory_notes, room_violations
from plait.recipe import load_run_config

# 2 x 4 layers x 128 numbers x 128 slots x 256 tokens x 2 bytes.
STARTER_KV_BYTES = 2 * 4 * 128 * 128 * 256 * 2
GIB = 2**30


@pytest.fixture
def starter():
    return load_run_config("starter", ["model.compute_dtype=bfloat16"])


def test_check_states_slots_and_peak(starter):
    report = check_recipe("starter", ["model.compute_dtype=bfloat16"])
    assert report.number("kv_slots_bytes") == STARTER_KV_BYTES
    assert report.memory.peak_bytes > STARTER_KV_BYTES
    assert report.to_dict()["memory"]["peak_bytes"] == report.memory.peak_bytes


def test_slots_that_do_not_fit_are_refused_at_the_start(starter):
    """Half of the room: half of the 128 slots."""
    (violation,) = room_violations(starter, STARTER_KV_BYTES // 2)
    assert (violation.where, "64 or less" in violation.change) == ("rollout.num_slots", True)
    with pytest.raises(ConfigError, match=r"KV slots alone take 0\.06 GiB, and 0\.03 GiB are available"):
        memory_notes(starter, STARTER_KV_BYTES // 2)


def test_a_peak_that_does_not_fit_is_a_note(starter):
    notes = memory_notes(starter, 2 * STARTER_KV_BYTES)
    assert notes[0].startswith("memory: KV slots 0.06 GiB, predicted peak 0.")
    assert "predicted peak" in notes[1]
    assert "available" in notes[1]


def test_room_enough_or_unknown_says_no_more_than_the_sizes(starter):
    (note,) = memory_notes(starter, 64 * GIB)
    assert note.endswith("available 64.00 GiB")
    (note,) = memory_notes(starter, None)
    assert "available" not in note


def test_check_warns_for_this_machine_only(monkeypatch):
    monkeypatch.setattr(check_module, "available_memory_bytes", lambda: STARTER_KV_BYTES // 2)
    report = check_recipe("starter", ["model.compute_dtype=bfloat16"])
    assert report.is_valid
    assert "rollout.num_slots" in {warning.where for warning in report.warnings}


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux says it in /proc/meminfo")
def test_available_memory_is_of_this_machine_and_its_groups(monkeypatch):
    total = machine._meminfo_bytes("MemTotal")
    assert 0 < machine.available_memory_bytes() < total
    monkeypatch.setattr(machine, "_group_room_bytes", lambda: [3 * GIB, 12345])
    assert machine.available_memory_bytes() == 12345


def test_own_settings_of_compiled_products_win(monkeypatch):
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1024")
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    machine.forget_compiled_products()
    import os

    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "1024"
    assert os.environ["LRU_CACHE_CAPACITY"] == machine.KEPT_PRODUCTS
