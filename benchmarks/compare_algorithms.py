"""PPO, GRPO, RLOO, DAPO, GSPO and CISPO on the starter recipe, over several seeds, and a plot of their curves.

    python benchmarks/compare_algorithms.py [--seeds 3] [--steps 40] [--folder build/algorithms] [--plot FILE.svg]

Each run is a process of its own on one thread; a run whose summary is in the folder already is not made again. All
have the recipe's prompts, samples and learning rate, and two updates per step: with the recipe's one every ratio is 1
and no clip binds. PPO has the lambdas and the critic's rate of the recipe starter_ppo; every other factor is that of
the named algorithm, the scale too, which the recipe sets. The last line is JSON: accuracy before and after per run,
and mean and spread over the seeds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from curves import draw

from plait.algorithms.named import named_algorithm

ALGORITHMS = ("ppo", "grpo", "rloo", "dapo", "gspo", "cispo")
_PPO = (
    "algorithm.returns.lambda_policy=1.0",
    "algorithm.returns.lambda_critic=1.0",
    "algorithm.critic.learning_rate=3e-4",
)


def main() -> None:
    """Run what is missing, draw, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=Path("build/algorithms"))
    parser.add_argument("--plot", type=Path)
    arguments = parser.parse_args()
    runs = [
        run(arguments.folder, algorithm, seed, arguments.steps)
        for seed in range(1, arguments.seeds + 1)
        for algorithm in ALGORITHMS
    ]
    rows = {algorithm: summarised([r for r in runs if r["algorithm"] == algorithm]) for algorithm in ALGORITHMS}
    for algorithm, row in rows.items():
        print(
            f"{algorithm:6} {row['before_mean']:.3f} -> {row['after_mean']:.3f} "
            f"({row['after_lowest']:.3f} to {row['after_highest']:.3f}) in {row['wall_s_mean']:.0f} s"
        )
    if arguments.plot is not None:
        title = f"Training accuracy, mean of {arguments.seeds} seeds and of 3 steps"
        arguments.plot.write_text(draw(title, {name: curve(runs, name) for name in ALGORITHMS}), encoding="utf-8")
    print(json.dumps({"benchmark": "compare_algorithms", "steps": arguments.steps, "algorithms": rows, "runs": runs}))


def run(folder: Path, algorithm: str, seed: int, num_steps: int) -> dict[str, Any]:
    """One process, unless it has run; its figures."""
    run_dir = folder / f"{algorithm}-{seed}"
    if not (run_dir / "summary.json").exists():
        overrides = [
            *(f"algorithm.name={algorithm}", f"algorithm.scale={named_algorithm(algorithm).settings['scale']}"),
            *(f"seed={seed}", f"train.num_steps={num_steps}", "model.num_threads=1"),
            *("batch.num_sequences_per_minibatch=64", *(_PPO if algorithm == "ppo" else ())),
        ]
        command = [sys.executable, "-m", "plait", "train", "starter", "--run-dir", str(run_dir)]
        for override in overrides:
            command += ["--set", override]
        started = time.perf_counter()
        subprocess.run(command, check=True, timeout=3600, env=os.environ | {"OMP_NUM_THREADS": "1"})
        (run_dir / "wall_s.txt").write_text(str(time.perf_counter() - started))
    summary = json.loads((run_dir / "summary.json").read_text())
    before, after = summary["before"], summary["after"]
    return {
        "algorithm": algorithm,
        "seed": seed,
        "before": before["accuracy"],
        "after": after["accuracy"],
        "reasoning_after": after["reasoning_share"],
        "tokens_after": after["response_tokens_mean"],
        "tokens_generated": summary["tokens_generated"],
        "wall_s": float((run_dir / "wall_s.txt").read_text()),
        "curve": [line["accuracy"] for line in _metrics(run_dir) if line["kind"] == "train"],
    }


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def summarised(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Means and extremes over the seeds of one algorithm."""
    after = [figures["after"] for figures in runs]
    return {
        "before_mean": statistics.mean(figures["before"] for figures in runs),
        "after_mean": statistics.mean(after),
        "after_lowest": min(after),
        "after_highest": max(after),
        "reasoning_after_mean": statistics.mean(figures["reasoning_after"] for figures in runs),
        "tokens_after_mean": statistics.mean(figures["tokens_after"] for figures in runs),
        "tokens_generated_mean": statistics.mean(figures["tokens_generated"] for figures in runs),
        "wall_s_mean": statistics.mean(figures["wall_s"] for figures in runs),
    }


def curve(runs: list[dict[str, Any]], algorithm: str) -> list[float]:
    """Accuracy of the samples of each step: mean over the seeds, then over the step and its neighbours."""
    curves = [figures["curve"] for figures in runs if figures["algorithm"] == algorithm]
    means = [statistics.mean(step) for step in zip(*curves, strict=True)]
    return [statistics.mean(means[max(0, i - 1) : i + 2]) for i in range(len(means))]


if __name__ == "__main__":
    main()
