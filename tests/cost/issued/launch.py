"""Starts the processes of one group, waits for all within a limit, and ends all of them if one fails."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SOURCE = HERE.parents[2] / "src"


def launch(folder, world, limit_s=150, only=()):
    """What each rank issued, per case: {case: [calls of rank 0, calls of rank 1, ...]}. only: names of cases."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(world):
            command = [sys.executable, str(HERE / "worker.py"), str(rank), str(world), str(folder), *only]
            with (folder / f"log-{rank}").open("w") as log:
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        end = time.monotonic() + limit_s
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll() not in (None, 0)]
            if failed or time.monotonic() > end:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=10)
    codes = [process.returncode for process in processes]
    if any(codes):
        first = min((c for c in codes if c > 0), default=None)
        rank = codes.index(first) if first is not None else 0
        raise AssertionError(f"exit codes {codes}; rank {rank}:\n" + (folder / f"log-{rank}").read_text()[-3000:])
    ranks = [json.loads((folder / f"issued-{rank}.json").read_text()) for rank in range(world)]
    return {case: [issued[case] for issued in ranks] for case in ranks[0]}
