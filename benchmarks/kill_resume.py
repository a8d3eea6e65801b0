"""Runs that are killed with SIGKILL at random moments and resumed end bit for bit as the one that was never stopped.

    python benchmarks/kill_resume.py [--kills 50] [--seed 0] [--folder build/kill_resume]

A toy run (random model of 60k parameters, one thread, verifier of its own, a checkpoint after every second step) is
made once without interruption. Then runs of the same recipe are killed at seeded random moments, some of them
several times, and resumed until they are done; a run killed before its first checkpoint is started again. Compared
are the final weights and moments, the exported model and samples.jsonl byte for byte, and every metric that is no
time, rate or memory. The last line is JSON: kills, runs, and how many runs (equal_runs) and kills (equal) ended equal.

The runs are forked from a server that has imported torch already, and are ended by their own handles.
"""

import argparse
import json
import multiprocessing
import random
import shutil
import time
from dataclasses import asdict, dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from plait.config import RunConfig
from plait.jobs.train import resume, train
from plait.recipe import load_run_config
from plait.telemetry.checkpoint import CheckpointStore

LIMIT_S = 120.0
"""Bound of every wait for one run."""

TIMED_PREFIXES = ("time/", "time_s", "throughput/", "memory/", "eval/time_s")
VERIFIER = '''
def letters(samples):
    """Share of ASCII letters: dense, so that a random model has something to learn."""
    return [sum(c.isascii() and c.isalpha() for c in s.completion) / max(len(s.completion), 1) for s in samples]
'''
RECIPE = """
name = "toy"
model = {{ path = "{model}", compute_dtype = "{dtype}", num_threads = 1 }}
batch = {{ num_prompts_per_step = 4, num_samples_per_prompt = 4, num_tokens_per_microbatch = 512 }}
rollout = {{ max_prompt_tokens = 40, max_completion_tokens = 12 }}
optimizer = {{ learning_rate = 1e-2, schedule = "cosine", warmup_share = 0.3 }}
train = {{ num_steps = {steps} }}
evaluation = {{ num_prompts = 4, num_samples_per_prompt = 2, every_steps = 5 }}
checkpoint = {{ every_steps = 2 }}
[[tasks]]
source = "rows"
path = "rows.jsonl"
verifier = "kill_resume_verifier:letters"
"""


@dataclass
class Outcome:
    """restarts: runs killed before their first checkpoint. finished_first: kills that came too late to hit."""

    kills: int = 0
    runs: int = 0
    equal_runs: int = 0
    equal: int = 0
    restarts: int = 0
    finished_first: int = 0
    reference_s: float = 0.0
    differences: list[str] = field(default_factory=list)


def write_toy(folder: Path, model: Path, *, num_steps: int = 14, dtype: str = "bfloat16") -> RunConfig:
    """The toy recipe with its rows and verifier, in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"r{i}", "prompt": f"Say {i}", "answer": str(i)} for i in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "kill_resume_verifier.py").write_text(VERIFIER)
    recipe = folder / "toy.toml"
    recipe.write_text(RECIPE.format(model=model.resolve(), steps=num_steps, dtype=dtype))
    return load_run_config(str(recipe))


class Lab:
    """Starts, kills and resumes runs of one recipe as processes."""

    def __init__(self, folder: Path, config: RunConfig):
        self.folder, self._config = folder, config
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["plait.jobs.train", "transformers.models.qwen3.modeling_qwen3"])

    def start(self, run_dir: Path) -> BaseProcess:
        """A process that starts the recipe, or resumes it where run_dir has a checkpoint."""
        if self.has_checkpoint(run_dir):
            target, arguments = resume, {"run_dir": run_dir, "progress": False}
            process = self._context.Process(target=target, kwargs=arguments)
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            arguments = {"config": self._config, "run_dir": run_dir, "recipe_dir": self.folder, "progress": False}
            process = self._context.Process(target=train, kwargs=arguments)
        process.start()
        return process

    def has_checkpoint(self, run_dir: Path) -> bool:
        return (run_dir / "config.json").exists() and CheckpointStore(
            run_dir / "checkpoints", 2
        ).latest().newest is not None

    def finish(self, run_dir: Path) -> None:
        """Run to the end within LIMIT_S."""
        process = self.start(run_dir)
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join(LIMIT_S)
            raise TimeoutError(f"{run_dir} did not end within {LIMIT_S} s")
        assert process.exitcode == 0, f"{run_dir} ended with exit code {process.exitcode}"

    def kill_after(self, run_dir: Path, delay_s: float) -> bool:
        """Start or resume, and kill after delay_s; False if the run was done before."""
        process = self.start(run_dir)
        process.join(delay_s)
        if not process.is_alive():
            assert process.exitcode == 0, f"{run_dir} ended with exit code {process.exitcode}"
            return False
        process.kill()
        process.join(LIMIT_S)
        return True


def experiment(lab: Lab, num_kills: int, seed: int) -> Outcome:
    """Kill num_kills times at seeded moments; at most three times as many attempts."""
    draw, outcome = random.Random(seed), Outcome()
    whole = lab.folder / "whole"
    lab.finish(whole)
    started = time.perf_counter()
    shutil.rmtree(whole)
    lab.finish(whole)  # the second run meets a warm server, as all later ones do
    outcome.reference_s = time.perf_counter() - started
    attempts = 0
    while outcome.kills < num_kills:
        run_dir = lab.folder / f"run-{outcome.runs}"
        kills = 0
        for _ in range(draw.choice((1, 1, 2, 3))):
            attempts += 1
            assert attempts <= 3 * num_kills + 3, f"{attempts} attempts gave {outcome.kills} kills"
            if not lab.kill_after(run_dir, draw.uniform(0.0, outcome.reference_s)):
                outcome.finished_first += 1
                break
            kills += 1
            outcome.restarts += not lab.has_checkpoint(run_dir)
            if outcome.kills + kills == num_kills:
                break
        else:
            lab.finish(run_dir)
        if kills and not (run_dir / "summary.json").exists():
            lab.finish(run_dir)
        found = differences(whole, run_dir)
        outcome.kills += kills
        outcome.runs += 1
        outcome.equal_runs += not found
        outcome.equal += kills if not found else 0
        outcome.differences += [f"{run_dir.name}: {what}" for what in found]
        shutil.rmtree(run_dir)
    return outcome


def differences(whole: Path, other: Path) -> list[str]:
    """What is not equal, bit for bit."""
    newest = f"checkpoints/step-{_last_step(whole)}"
    files = [f"{newest}/policy.safetensors", f"{newest}/optimizer.safetensors", "model/model.safetensors"]
    found = [
        name
        for name in (*files, "samples.jsonl")
        if not (other / name).exists() or (whole / name).read_bytes() != (other / name).read_bytes()
    ]
    first, second = _metrics(whole), _metrics(other)
    if len(first) != len(second):
        return [*found, f"metrics.jsonl: {len(first)} and {len(second)} records"]
    keys = {key for a, b in zip(first, second, strict=True) for key in a.keys() | b.keys() if a.get(key) != b.get(key)}
    return [*found, *(f"metrics.jsonl: {key}" for key in sorted(keys))]


def _last_step(run_dir: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def _metrics(run_dir: Path) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if not key.startswith(TIMED_PREFIXES)} for record in records]


def main() -> None:
    """Run and report."""
    from random_models import print_figures, write_random_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("build/kill_resume"))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    model = write_random_model(folder / "model", "60k")
    outcome = experiment(Lab(folder, write_toy(folder, model)), arguments.kills, arguments.seed)
    for line in outcome.differences:
        print(f"differs: {line}")
    print(f"{outcome.kills} kills in {outcome.runs} runs, {outcome.equal_runs} of them ended as the one never stopped")
    print_figures({"benchmark": "kill_resume", "seed": arguments.seed, **asdict(outcome)})


if __name__ == "__main__":
    main()
