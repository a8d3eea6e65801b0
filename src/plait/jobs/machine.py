"""Facts of the machine that more than one job asks for. Torch-free."""

import os
import sys


def usable_cores() -> int:
    """Cores that this process may use: a container may be given fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
