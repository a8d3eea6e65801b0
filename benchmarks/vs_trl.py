"""GRPO on the starter model: Plait against TRL's GRPOTrainer, in turns on the same machine.

    python benchmarks/vs_trl.py [--model starter] [--blocks 2] [--steps 15]
    python benchmarks/vs_trl.py --curves --steps 40 [--seeds 3]

Needs the extra "bench" (trl 1.16). Both sides train the same model on the same prompts in the same order (token ids are
compared), with 8 prompts x 8 samples a step, at most 128 (--cap) new tokens, the same end tokens, temperature 1, the
same verifier, group-mean baseline without scaling, token-mean loss, no KL, one AdamW update a step at the recipe's
rate.

A block is a process of its own: TRL, ours, TRL, ours, ... The first steps of each block are dropped as warm-up. A
step lasts from the end of the one before to its own end, with everything that happens between. Tokens trained are all
sampled completion tokens of a step, on both sides: all of them enter the step's loss normaliser (Plait passes those
of groups without signal through no backward pass, because their gradient is zero). Tokens per second are sums over a
block's steps; `ratio` is the median block of ours over the median block of TRL in its fastest variant, which
is found first, in one short block per variant. The last line is JSON.

--curves: reward at equal numbers of samples on both sides, mean and spread (standard deviation) over seeds.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.config import RunConfig
from plait.recipe import load_run_config, recipe_directory

RECIPE = "starter"
PROMPTS, SAMPLES = 8, 8
BLOCK_LIMIT_S = 900.0

VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16 autocast": {"bf16": True},
    "bfloat16 weights": {"model_init_kwargs": {"dtype": "bfloat16"}},
    "float32, 4 microbatches": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
    "float32, continuous batching": {"use_transformers_continuous_batching": True},
}
"""What is tried on TRL's side, each on top of `settings_of_trl`; masters are fp32 in all but "bfloat16 weights"."""

OURS = ("batch.num_tokens_per_microbatch=4096",)
"""On our side: one to two microbatches a step. With 2,048 (the recipe's) steps took 6 % longer, with 8,192 1 %
(docs/log.md)."""

EXACT_VARIANTS = ("float32", "float32, 4 microbatches", "float32, continuous batching", "bfloat16 autocast")
"""Those with fp32 masters, as Plait's: only these may be compared with it. bf16 weights lose small updates."""


@dataclass(frozen=True)
class Setting:
    """What both sides share: the model and the most new tokens per sample."""

    model: str
    cap: int


def overrides(setting: Setting, num_steps: int, seed: int) -> list[str]:
    """The settings of both sides on top of the recipe."""
    return [
        f"model.path={setting.model}",
        f"seed={seed}",
        f"batch.num_prompts_per_step={PROMPTS}",
        f"batch.num_samples_per_prompt={SAMPLES}",
        f"rollout.max_completion_tokens={setting.cap}",
        "optimizer.warmup_share=0",
        f"train.num_steps={num_steps}",
        "evaluation.at_start=false",
        "evaluation.at_end=false",
    ]


Record = dict[str, float]
"""Of one step: end_s (its end, on the block's clock), tokens, reward."""


def run_ours(setting: Setting, num_steps: int, seed: int) -> list[Record]:
    """A block of `plait train`, read from its metrics."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "run"
        command = [sys.executable, "-m", "plait", "train", RECIPE, "--run-dir", str(folder)]
        for override in [*overrides(setting, num_steps, seed), *OURS]:
            command += ["--set", override]
        subprocess.run(command, check=True, timeout=BLOCK_LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {"end_s": r["time_s"], "tokens": r["tokens_generated"], "reward": r["reward/mean"]}
        for r in records
        if r["kind"] == "train"
    ]


def run_trl(setting: Setting, num_steps: int, seed: int, variant: str) -> list[Record]:
    """A block of TRL in a process of its own."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "records.json"
        command = [sys.executable, __file__, "--trl-block", str(out), "--variant", variant, "--model", setting.model]
        command += ["--cap", str(setting.cap), "--steps", str(num_steps), "--seed", str(seed)]
        done = subprocess.run(
            command, timeout=BLOCK_LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise RuntimeError(f'TRL, "{variant}": {done.stderr[-2000:]}')
        return json.loads(out.read_text())


def settings_of_trl(config: RunConfig, folder: str) -> dict[str, Any]:
    """TRL's arguments for the recipe, with everything off that only costs time."""
    optimizer = config.optimizer
    return {
        "output_dir": folder,
        "use_cpu": True,
        "bf16": False,
        "seed": config.seed,
        "max_steps": config.train.num_steps,
        "per_device_train_batch_size": PROMPTS * SAMPLES,
        "gradient_accumulation_steps": 1,
        "num_generations": SAMPLES,
        "max_completion_length": config.rollout.max_completion_tokens,
        "temperature": config.rollout.sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "shuffle_dataset": False,
        "beta": 0.0,
        "epsilon": config.algorithm.clip_low,
        "scale_rewards": {"none": "none", "group_std": "group", "batch_std": "batch"}[config.algorithm.scale],
        "loss_type": "dapo",  # the sum over all tokens of the step by their number: token-mean
        "learning_rate": optimizer.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "logging_steps": 1_000_000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def trl_block(setting: Setting, num_steps: int, seed: int, variant: str) -> list[Record]:
    """Train with TRL in this process."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from plait.data.tasks import build_tasks
    from plait.jobs.machine import usable_cores
    from plait.models.folder import model_folder
    from plait.models.load import load_tokenizer

    torch.set_num_threads(usable_cores())
    config, recipe_dir = load_run_config(RECIPE, overrides(setting, num_steps, seed)), recipe_directory(RECIPE)
    tokenizer = load_tokenizer(setting.model, config.rollout.stop_tokens)
    mixture = build_tasks(config.tasks, run_seed=seed, eval_config=config.evaluation, recipe_dir=recipe_dir)
    prompts = [mixture.prompt(n) for n in range(num_steps * PROMPTS)]
    rows = [
        {"prompt": [{"role": m.role, "content": m.content} for m in prompt.messages], "number": n}
        for n, prompt in enumerate(prompts)
    ]
    records: list[Record] = []
    reward = make_reward(prompts, tokenizer, recipe_dir, records)

    class Clock(TrainerCallback):
        def on_step_end(self, *arguments: Any, **more: Any) -> None:
            records[-1]["end_s"] = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(**{**settings_of_trl(config, folder), **VARIANTS[variant]})
        trainer = GRPOTrainer(
            model=str(model_folder(setting.model)),
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer.backend,
            callbacks=[Clock()],
        )
        check_equal_inputs(trainer, tokenizer, prompts, rows)
        trainer.train()
    assert len(records) == num_steps, f"TRL made {len(records)} steps, expected {num_steps}"
    return records


def make_reward(prompts: Sequence[Any], tokenizer: Any, recipe_dir: Path, records: list[Record]) -> Any:
    """TRL's reward function: our verifier, and a record of the step."""
    import numpy as np

    from plait.batch import Sample
    from plait.rewards.verifier import Scorer

    scorer = Scorer(recipe_dir)

    def reward(number: list[int], completion_ids: list[list[int]], **ignored: Any) -> list[float]:
        samples = []
        for index, (n, ids) in enumerate(zip(number, completion_ids, strict=True)):
            length = len(ids)
            samples.append(
                Sample(
                    id=f"{prompts[n].id}#{index}",
                    prompt=prompts[n],
                    prompt_ids=(),
                    response_ids_R=np.array(ids, dtype=np.int32),
                    rollout_logprobs_R=np.zeros(length, dtype=np.float32),
                    versions_R=np.zeros(length, dtype=np.int32),
                    response_mask_R=np.ones(length, dtype=bool),
                    finish="stop" if ids and ids[-1] in tokenizer.end_token_ids else "length",
                    seed=0,
                    text=tokenizer.decode(ids),
                )
            )
        for sample, verdict in zip(samples, scorer.score(samples), strict=True):
            sample.verdict = verdict
        rewards = [sample.reward for sample in samples]
        records.append({"tokens": sum(map(len, completion_ids)), "reward": statistics.mean(rewards)})
        return rewards

    return reward


def check_equal_inputs(trainer: Any, tokenizer: Any, prompts: Sequence[Any], rows: Sequence[dict[str, Any]]) -> None:
    """Prompts must reach the model as the same ids on both sides, and the same tokens must end a completion."""
    theirs = trainer._tokenize_prompts([row["prompt"] for row in rows])[0]
    ours = [list(tokenizer.encode_prompt(prompt)) for prompt in prompts]
    assert [list(ids) for ids in theirs] == ours, "the prompts' token ids differ between TRL and Plait"
    assert set(trainer.eos_token_ids) == set(tokenizer.end_token_ids), (
        f"TRL ends at {trainer.eos_token_ids}, Plait at {tokenizer.end_token_ids}"
    )


def block_figures(records: Sequence[Record], warmup: int) -> dict[str, float]:
    """Seconds per step (median) and tokens per second of a block without its first steps."""
    seconds = [later["end_s"] - earlier["end_s"] for earlier, later in itertools.pairwise(records)][warmup - 1 :]
    tokens = [record["tokens"] for record in records[warmup:]]
    return {
        "step_s": statistics.median(seconds),
        "tokens_per_s": sum(tokens) / sum(seconds),
        "completion_tokens_mean": sum(tokens) / len(tokens) / (PROMPTS * SAMPLES),
    }


def find_fastest(setting: Setting, steps: int, warmup: int, seed: int) -> tuple[str, dict[str, float | str]]:
    """The fastest variant with fp32 masters, and what each came to (tokens per second, or why it does not run)."""
    rates: dict[str, float | str] = {}
    for variant in VARIANTS:
        try:
            rates[variant] = block_figures(run_trl(setting, steps, seed, variant), warmup)["tokens_per_s"]
            print(f"TRL, {variant}: {rates[variant]:.0f} tokens/s", flush=True)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            rates[variant] = str(error).splitlines()[-1][-300:]
            print(f"TRL, {variant}: does not run: {rates[variant]}", flush=True)
    ran = {name: rate for name, rate in rates.items() if isinstance(rate, float) and name in EXACT_VARIANTS}
    return max(ran, key=lambda name: ran[name]), rates


def compare_speed(setting: Setting, arguments: argparse.Namespace) -> dict[str, Any]:
    """Blocks in turns."""
    fastest, rates = arguments.variant, {}
    if not fastest:
        fastest, rates = find_fastest(setting, arguments.warmup + 4, arguments.warmup, arguments.seed)
    blocks: dict[str, list[dict[str, float]]] = {"trl": [], "ours": []}
    for number in range(arguments.blocks):
        trl = run_trl(setting, arguments.steps, arguments.seed + number, fastest)
        ours = run_ours(setting, arguments.steps, arguments.seed + number)
        for side, records in (("trl", trl), ("ours", ours)):
            blocks[side].append(block_figures(records, arguments.warmup))
            print(side, {name: round(value, 2) for name, value in blocks[side][-1].items()}, flush=True)
    medians = {
        side: {name: statistics.median(block[name] for block in found) for name in found[0]}
        for side, found in blocks.items()
    }
    return {
        "ratio": medians["ours"]["tokens_per_s"] / medians["trl"]["tokens_per_s"],
        **{f"{side}_{name}": value for side, found in medians.items() for name, value in found.items()},
        "share_of_cap": {side: found["completion_tokens_mean"] / setting.cap for side, found in medians.items()},
        "trl_variant": fastest,
        "trl_variants_tokens_per_s": rates,
        "blocks": blocks,
    }


def compare_curves(setting: Setting, arguments: argparse.Namespace) -> dict[str, Any]:
    """Reward at equal numbers of samples, over seeds; in windows of a fifth of the run."""
    variant = arguments.variant or "float32"
    rewards: dict[str, list[list[float]]] = {"trl": [], "ours": []}
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        for side in ("trl", "ours"):
            is_trl = side == "trl"
            records = (
                run_trl(setting, arguments.steps, seed, variant) if is_trl else run_ours(setting, arguments.steps, seed)
            )
            rewards[side].append([record["reward"] for record in records])
            print(
                f"{side}, seed {seed}: first {rewards[side][-1][0]:.3f}, last {rewards[side][-1][-1]:.3f}", flush=True
            )
    window = max(1, arguments.steps // 5)
    curve = []
    for start in range(0, arguments.steps - window + 1, window):
        point: dict[str, float] = {"num_samples": (start + window) * PROMPTS * SAMPLES}
        for side, runs in rewards.items():
            means = [statistics.mean(run[start : start + window]) for run in runs]
            point[f"{side}_reward"] = statistics.mean(means)
            point[f"{side}_spread"] = statistics.stdev(means) if len(means) > 1 else 0.0
        curve.append(point)
        print({name: round(value, 3) for name, value in point.items()}, flush=True)
    last = curve[-1]
    return {"curve": curve, "last_difference": last["ours_reward"] - last["trl_reward"], "trl_variant": variant}


def main() -> None:
    """Run and report."""
    from random_models import cores, print_figures

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--cap", type=int, default=92, help="most new tokens per sample")
    parser.add_argument("--blocks", type=int, default=2, help="blocks per side")
    parser.add_argument("--steps", type=int, default=15, help="steps per block")
    parser.add_argument("--warmup", type=int, default=3, help="steps dropped at the start of a block")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=3, help="with --curves")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--variant", choices=list(VARIANTS), help="of TRL; without it the fastest is found first")
    parser.add_argument("--trl-block", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    setting = Setting(arguments.model, arguments.cap)
    if arguments.trl_block is not None:
        records = trl_block(setting, arguments.steps, arguments.seed, arguments.variant)
        arguments.trl_block.write_text(json.dumps(records))
        return
    compare = compare_curves if arguments.curves else compare_speed
    print_figures({"benchmark": "vs_trl", "cores": cores(), **compare(setting, arguments)})


if __name__ == "__main__":
    main()
