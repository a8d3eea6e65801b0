"""Facts of the machine that more than one job asks for. Torch-free."""

import os
import sys
from pathlib import Path


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


KEPT_PRODUCTS = "128"
"""Compiled products that oneDNN, and torch's wrapper around it, each keep for their next use."""


def forget_compiled_products() -> None:
    """Keep few of the products that oneDNN compiles; call it before torch computes.

    It compiles a bfloat16 product for each shape and keeps the last 1,024, with their scratch memory. Attention over
    samples of other lengths has other shapes at every step, so that a run of the starter recipe grew from 0.74 to
    1.53 GiB over 60 steps. With 128 it is flat below 0.95 GiB at the same speed; 64 saved another 0.1 GiB and made
    updates take 6 % longer (docs/log.md). A person's own setting wins.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", KEPT_PRODUCTS)
    os.environ.setdefault("LRU_CACHE_CAPACITY", KEPT_PRODUCTS)


def available_memory_bytes() -> int | None:
    """Memory that this process can still take without swapping: of the machine and of its control groups, if any.

    None where the system does not say (outside Linux).
    """
    if sys.platform != "linux":
        return None
    free = [_meminfo_bytes("MemAvailable"), *_group_room_bytes()]
    return max(0, min(free))


def _meminfo_bytes(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/meminfo has no {name}, which every Linux since 3.14 has")


def _group_room_bytes() -> list[int]:
    """Limit minus use, of every control group (version 2) around this process that has a limit."""
    root, rooms = Path("/sys/fs/cgroup"), []
    own = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), "/")
    group = root / own.lstrip("/")
    for folder in (group, *group.parents):
        limit, use = folder / "memory.max", folder / "memory.current"
        if folder.is_relative_to(root) and limit.is_file() and limit.read_text().strip() != "max":
            cache = _stat_bytes(folder / "memory.stat", "inactive_file")  # the system gives it back when asked
            rooms.append(int(limit.read_text()) - int(use.read_text()) + cache)
    return rooms


def _stat_bytes(path: Path, name: str) -> int:
    return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.startswith(f"{name} ")), 0)
