"""Facts of the machine that more than one job asks for. Torch-free."""

import os
import sys


def usable_cores() -> int:
    """Cores that this process may use: a container may be given fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_the_cores() -> None:
    """Let OpenMP threads sleep, not spin, while they wait for each other; to be called before torch is imported.

    Spinning gains a few percent on an idle machine. Where another program takes a core for a moment, every parallel
    region waits until the spinning thread's time slice ends: the main job then ran 6 times slower (docs/log.md).
    A person's own setting wins.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
