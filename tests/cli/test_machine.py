"""`plait doctor` and the choice of dtype. These need torch."""

import pytest
import torch

from plait.jobs.doctor import Device, doctor
from plait.models import cpu_features
from plait.models.dtype import faster_dtype


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx512_bf16", "avx512f"}, "bfloat16"),
        ({"amx_bf16"}, "bfloat16"),
        ({"avx512f", "avx2"}, "float32"),
        (set(), "float32"),
    ],
)
def test_flags_decide_on_a_cpu(monkeypatch, flags, expected):
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: frozenset(flags))
    assert faster_dtype("cpu") == expected
    assert faster_dtype(torch.device("cpu")) == expected


@pytest.mark.parametrize(("supported", "expected"), [(True, "bfloat16"), (False, "float32")])
def test_hardware_decides_on_a_gpu(monkeypatch, supported, expected):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    assert faster_dtype("cuda") == expected


def device(float32: float, bfloat16: float, auto: str) -> Device:
    measured = "bfloat16" if bfloat16 > float32 else "float32"
    return Device("x", "cpu", 1, float32, bfloat16, auto, measured)


def test_a_tie_is_no_disagreement():
    assert device(1.0, 2.0, "bfloat16").agrees
    assert not device(1.0, 2.0, "float32").agrees
    assert device(1.0, 1.05, "float32").agrees


def test_doctor_looks_at_this_machine(monkeypatch):
    monkeypatch.setattr("plait.jobs.doctor._MEASURE_S", 0.01)
    monkeypatch.setattr("plait.jobs.doctor._MATRIX", 64)
    report = doctor()
    assert report.cores >= 1
    assert report.memory_bytes > 2**28
    assert report.versions["torch"] == torch.__version__
    assert report.devices[0].kind == "cpu"
    assert report.devices[0].float32_flop_per_s > 0
    assert report.can_run[0].startswith("plait train")
    assert report.to_dict()["devices"][0]["auto_dtype"] == faster_dtype("cpu")
    assert report.render() is not None
