"""Which type computes fastest on a device: decided by what the hardware says of itself, not by time."""

import torch

from plait.models.cpu_features import faster_cpu_dtype


def faster_dtype(device: torch.device | str) -> str:
    """What `compute_dtype = "auto"` means: "bfloat16" where the device has it in hardware, else "float32"."""
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return faster_cpu_dtype()
