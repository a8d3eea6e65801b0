"""Facts of the machine that more than one job asks for. Torch-free."""

import os
import sys


def usable_cores() -> int:
    """Cores that this process may use: a container may be given fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def share_the_cores() -> None:
    """Let OpenMP threads spin briefly, then sleep, while they wait for each other; call it before torch is imported.

    By default GNU's runtime spins for about 300,000 rounds. Where another program takes a core for a moment, every
    parallel region then waits until the spinning thread's time slice ends: beside one busy process a step of the main
    job took 33 s instead of 1.4 s, and 4 s with 10,000 rounds, which cost 8 % on an idle machine (docs/log.md).
    A person's own setting wins.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
