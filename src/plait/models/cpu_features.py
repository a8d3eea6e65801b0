"""What the processor says of itself. Torch-free."""

import platform
from pathlib import Path

_BF16_FLAGS = ("avx512_bf16", "amx_bf16")
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
    flags = cpu_flags()
    return tuple(flag for flag in _BF16_FLAGS if flag in flags)


def faster_cpu_dtype() -> str:
    """What `compute_dtype = "auto"` means on a CPU: "bfloat16" where it is in hardware, else "float32"."""
    return "bfloat16" if bf16_flags() else "float32"
