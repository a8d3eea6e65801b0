"""Which type computes fastest on a device: decided by what the hardware says of itself, not by time."""

import platform
from pathlib import Path

import torch

_CPU_FLAGS = ("avx512_bf16", "amx_bf16")
"""Processor features with which bf16 matrix products beat fp32 ones."""


def cpu_flags() -> frozenset[str]:
    """Feature flags of the processor as Linux names them; empty where there is no /proc/cpuinfo."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or not cpuinfo.exists():
        return frozenset()
    for line in cpuinfo.read_text().splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def bf16_flags() -> tuple[str, ...]:
    """Those of the processor's flags that make bf16 fast."""
    return tuple(flag for flag in _CPU_FLAGS if flag in cpu_flags())


def faster_dtype(device: torch.device | str) -> str:
    """What `compute_dtype = "auto"` means: "bfloat16" where the device has it in hardware, else "float32"."""
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if bf16_flags() else "float32"
