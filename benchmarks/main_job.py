"""The main job on several seeds, and a control run with random rewards that must not improve.

    python benchmarks/main_job.py [--seeds 3] [--folder build/main_job]

Each run is a process of its own, as `make train` starts it. The last line is JSON: accuracy before and after, seconds
of the whole process, peak memory, per seed and for the control.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("build/main_job"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.folder, ignore_errors=True)
    runs = [run(arguments.folder, f"seed-{seed}", [f"seed={seed}"]) for seed in range(1, arguments.seeds + 1)]
    control = run(arguments.folder, "control", ["control.rewards=random"])
    for figures in (*runs, control):
        print(f"{figures['name']}: {figures['before']:.3f} -> {figures['after']:.3f} in {figures['wall_s']:.0f} s")
    print(
        json.dumps(
            {
                "benchmark": "main_job",
                "cores": len(os.sched_getaffinity(0)),
                "runs": runs,
                "control": control,
                "lowest_after": min(figures["after"] for figures in runs),
                "highest_before": max(figures["before"] for figures in runs),
                "longest_s": max(figures["wall_s"] for figures in runs),
            }
        )
    )


def run(folder: Path, name: str, overrides: list[str]) -> dict[str, float | str]:
    """One process; its figures."""
    command = [sys.executable, "-m", "plait", "train", "starter", "--run-dir", str(folder / name)]
    for override in overrides:
        command += ["--set", override]
    started = time.perf_counter()
    subprocess.run(command, check=True, timeout=1800)
    wall_s = time.perf_counter() - started
    summary = json.loads((folder / name / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    return {
        "name": name,
        "before": before["accuracy"],
        "after": after["accuracy"],
        "reasoning_before": before["reasoning_share"],
        "reasoning_after": after["reasoning_share"],
        "tokens_before": before["response_tokens_mean"],
        "tokens_after": after["response_tokens_mean"],
        "wall_s": wall_s,
        "peak_rss_bytes": summary["peak_rss_bytes"],
    }


if __name__ == "__main__":
    main()
