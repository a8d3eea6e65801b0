"""What the starter model does by itself: share of samples that reason, and accuracy of either kind, per family.

    python benchmarks/starter_mixture.py [--model starter] [--prompts 256]

Held-out prompts of the recipe "starter" with an evaluation seed of their own, one sample each at temperature 1. The
last line is JSON.
"""

import argparse
import json
from pathlib import Path

from plait.jobs.sample import sample
from plait.jobs.step_metrics import has_reasoning
from plait.recipe import load_run_config


def main() -> None:
    """Sample, split by kind, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--prompts", type=int, default=512)
    arguments = parser.parse_args()
    config = load_run_config("starter", [f"evaluation.num_prompts={arguments.prompts}", "evaluation.seed=77"])
    samples = sample(config, model=arguments.model, num_prompts=arguments.prompts, num_samples=1, recipe_dir=Path.cwd())
    figures = {}
    for task in sorted({one.prompt.task for one in samples}):
        mine = [one for one in samples if one.prompt.task == task]
        kinds = {
            "steps": [one for one in mine if has_reasoning(one)],
            "at_once": [one for one in mine if not has_reasoning(one)],
        }
        figures[task] = {
            "samples": len(mine),
            "accuracy": _mean([one.reward == 1 for one in mine]),
            "reasoning_share": len(kinds["steps"]) / len(mine),
            **{f"accuracy_{kind}": _mean([one.reward == 1 for one in some]) for kind, some in kinds.items()},
            **{f"tokens_{kind}": _mean([one.num_response_tokens for one in some]) for kind, some in kinds.items()},
        }
        print(task, figures[task])
    print(json.dumps({"benchmark": "starter_mixture", "model": arguments.model, "tasks": figures}))


def _mean(values: list[float] | list[bool] | list[int]) -> float | None:
    return sum(values) / len(values) if values else None


if __name__ == "__main__":
    main()
