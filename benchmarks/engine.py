"""Generated tokens per second: Plait's engine against transformers' `generate` and `generate_batch`, in turns.

    python benchmarks/engine.py [--model starter] [--rounds 3] [--only starter|50m]

256 sequences (32 prompts x 8 samples, temperature 1) go through 64 slots; `generate` takes them in batches of 64,
left-padded; `generate_batch` (transformers' continuous batching) holds 64 requests at a time.
Two models: the starter, which ends its completions itself (at most --cap new tokens, of which it uses about 40 %);
and a random Qwen3 of 50M parameters, which does not, so each request has a limit of its own, drawn once (log-normal,
mean about 40 % of the cap, cut at the cap) and equal on all sides; a batch of `generate` runs to its longest and only
tokens within the limits count. Every side runs once in each dtype as warm-up and keeps its faster one; then the sides
take turns, and medians over the rounds are compared.
The last line is JSON: `ratio` (engine over `generate`) and `ratio_batch` (over `generate_batch`; null with the reason
where that does not run) for the starter, `ratio_50m` and `ratio_batch_50m` for the other.
"""

import argparse
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from plait.config import SamplingConfig
from plait.data.tasks import build_tasks
from plait.jobs.machine import usable_cores
from plait.models.folder import model_folder
from plait.models.load import Tokenizer, load_model, load_tokenizer
from plait.recipe import load_run_config, recipe_directory
from plait.rollout.engine import Engine
from plait.rollout.scheduler import Request

RECIPE = "starter"
PROMPTS, SAMPLES, SLOTS = 32, 8, 64
MEAN_SHARE = 0.4
DTYPES = ("float32", "bfloat16")
WAIT_S = 300.0
NO_TOKEN = -1
"""An end token that is never sampled."""


@dataclass(frozen=True)
class Work:
    """What is to be generated. limits: new tokens of each prompt. end_ids: empty where nothing ends early."""

    folder: Path
    pad_id: int
    end_ids: tuple[int, ...]
    prompts: list[tuple[int, ...]]
    limits: list[int]
    cap: int


Side = Callable[[], int]
"""Generates everything once; returns the tokens that count."""


def work_for(folder: Path, tokenizer: Tokenizer, cap: int, *, has_end: bool) -> Work:
    """The recipe's first prompts, each as often as it has samples."""
    config = load_run_config(RECIPE, [f"model.path={folder}"])
    mixture = build_tasks(config.tasks, run_seed=1, eval_config=config.evaluation, recipe_dir=recipe_directory(RECIPE))
    distinct = [tokenizer.encode_prompt(mixture.prompt(n)) for n in range(PROMPTS)]
    prompts = [ids for ids in distinct for _ in range(SAMPLES)]
    limits = [cap] * len(prompts) if has_end else drawn_limits(len(prompts), cap)
    end_ids = tokenizer.end_token_ids if has_end else ()
    return Work(folder, tokenizer.backend.pad_token_id, end_ids, prompts, limits, cap)


def drawn_limits(count: int, cap: int) -> list[int]:
    """Lengths with a tail: log-normal (sigma 0.7), cut at the cap, mean about MEAN_SHARE of it."""
    draw = random.Random(0)
    return [min(cap, max(1, round(draw.lognormvariate(0, 0.7) * cap * MEAN_SHARE * 0.85))) for _ in range(count)]


def engine_side(work: Work, dtype: torch.dtype) -> Side:
    model = load_model(str(work.folder), dtype=dtype, device="cpu")
    longest = max(map(len, work.prompts)) + work.cap
    engine = Engine(model, end_token_ids=work.end_ids or (NO_TOKEN,), num_slots=SLOTS, max_sequence_tokens=longest)
    requests = [
        Request(str(n), ids, n, limit) for n, (ids, limit) in enumerate(zip(work.prompts, work.limits, strict=True))
    ]

    def run() -> int:
        return sum(len(c.token_ids_R) for c in engine.generate(requests, SamplingConfig()))

    return run


def plain_model(work: Work, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """The model as transformers runs it."""
    model = AutoModelForCausalLM.from_pretrained(work.folder, dtype=dtype, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = list(work.end_ids) or None
    model.config.eos_token_id = list(work.end_ids) or None
    return model


def settings(work: Work, max_new_tokens: int) -> dict[str, Any]:
    return {
        "max_new_tokens": max_new_tokens,
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": work.pad_id,
        "eos_token_id": list(work.end_ids) or None,
    }


def generate_side(work: Work, dtype: torch.dtype) -> Side:
    model = plain_model(work, dtype, "sdpa")

    def run() -> int:
        total = 0
        for start in range(0, len(work.prompts), SLOTS):
            prompts, limits = work.prompts[start : start + SLOTS], work.limits[start : start + SLOTS]
            longest = max(map(len, prompts))
            ids = torch.tensor([[work.pad_id] * (longest - len(p)) + list(p) for p in prompts])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
            with torch.inference_mode():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=mask,
                    generation_config=GenerationConfig(**settings(work, max(limits)), disable_compile=True),
                )
            total += sum(
                count(row, limit, work.end_ids) for row, limit in zip(out[:, longest:].tolist(), limits, strict=True)
            )
        return total

    return run


def count(ids: Sequence[int], limit: int, end_ids: tuple[int, ...]) -> int:
    """Tokens up to the first end token, it included, and within the limit."""
    for number, token in enumerate(ids[:limit], start=1):
        if token in end_ids:
            return number
    return min(len(ids), limit)


def batch_side(work: Work, dtype: torch.dtype) -> Side:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = plain_model(work, dtype, "sdpa")
    config = GenerationConfig(**settings(work, work.cap))
    longest = max(map(len, work.prompts)) + work.cap
    batching = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=SLOTS * -(-longest // 32) + SLOTS,
        max_batch_tokens=SLOTS * 8,
        max_requests_per_batch=SLOTS,
        seed=0,
    )

    def run() -> int:
        total, left, deadline = 0, len(work.prompts), time.monotonic() + WAIT_S
        with model.continuous_batching_context_manager(
            generation_config=config, continuous_batching_config=batching, block=True, timeout=WAIT_S
        ) as manager:
            for prompt, limit in zip(work.prompts, work.limits, strict=True):
                manager.add_request(list(prompt), max_new_tokens=limit)
            while left:
                assert time.monotonic() < deadline, f"{left} requests were not done after {WAIT_S} s"
                result = manager.get_result(timeout=1.0)
                if result is None:
                    assert manager.is_running(), "its thread ended before the requests were done"
                elif result.is_finished():
                    assert result.error is None, f"a request failed: {result.error}"
                    total, left = total + len(result.generated_tokens), left - 1
        return total

    return run


SIDES: dict[str, Callable[[Work, torch.dtype], Side]] = {
    "engine": engine_side,
    "generate": generate_side,
    "generate_batch": batch_side,
}


def bounded(run: Side) -> tuple[int, float]:
    """(tokens, seconds), within WAIT_S; RuntimeError with the reason where it does not run.

    In the main thread, as a user calls it: in a second thread the engine ran 1.6 times slower
    on the machine of docs/log.md.
    """
    signal.signal(signal.SIGALRM, _too_late)
    signal.setitimer(signal.ITIMER_REAL, WAIT_S)
    try:
        started = time.perf_counter()
        tokens = run()
        return tokens, time.perf_counter() - started
    except Exception as error:
        # Whatever stops a peer is what the benchmark reports about it.
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _too_late(*ignored: Any) -> None:
    raise TimeoutError(f"not done after {WAIT_S} s")


def compare(work: Work, rounds: int) -> dict[str, Any]:
    """Warm up, choose each side's dtype, then take turns."""
    chosen: dict[str, Side] = {}
    figures: dict[str, Any] = {}
    for name, make in SIDES.items():
        runs: dict[str, tuple[float, Side]] = {}
        for dtype in DTYPES:
            try:
                run = make(work, getattr(torch, dtype))
                bounded(run)
                tokens, seconds = bounded(run)
            except RuntimeError as error:
                figures[f"{name}_does_not_run_{dtype}"] = str(error)[-300:]
                print(f"{name}, {dtype}: does not run: {error}", flush=True)
                continue
            runs[dtype] = (tokens / seconds, run)
            print(f"{name}, {dtype}: {tokens / seconds:.0f} tokens/s", flush=True)
        if runs:
            best = max(runs, key=lambda dtype: runs[dtype][0])
            chosen[name], figures[f"{name}_dtype"] = runs[best][1], best
    rates: dict[str, list[float]] = {name: [] for name in chosen}
    lengths: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(rounds):
        for name, run in chosen.items():
            tokens, seconds = bounded(run)
            rates[name].append(tokens / seconds)
            lengths[name].append(tokens / len(work.prompts))
    for name in chosen:
        figures[f"{name}_tokens_per_s"] = statistics.median(rates[name])
        figures[f"{name}_mean_length"] = statistics.median(lengths[name])
        figures[f"{name}_share_of_cap"] = figures[f"{name}_mean_length"] / work.cap
        print(f"{name}: {figures[f'{name}_tokens_per_s']:.0f} tokens/s", flush=True)
    for peer, key in (("generate", "ratio"), ("generate_batch", "ratio_batch")):
        is_there = peer in chosen
        figures[key] = statistics.median(rates["engine"]) / statistics.median(rates[peer]) if is_there else None
    return figures


def main() -> None:
    """Run and report."""
    from random_models import cores, print_figures, write_random_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="starter")
    parser.add_argument(
        "--cap", type=int, default=72, help="most new tokens per sequence of the starter, which writes 30 on average"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["starter", "50m"])
    arguments = parser.parse_args()
    torch.set_num_threads(usable_cores())
    folder = model_folder(arguments.model)
    figures: dict[str, Any] = {"benchmark": "engine", "cores": cores()}
    if arguments.only != "50m":
        starter = compare(work_for(folder, load_tokenizer(str(folder)), arguments.cap, has_end=True), arguments.rounds)
        figures |= {"ratio": starter["ratio"], "ratio_batch": starter["ratio_batch"], "starter": starter}
    if arguments.only != "starter":
        with tempfile.TemporaryDirectory() as temporary:
            large = write_random_model(Path(temporary), "50m", str(folder))
            big = compare(work_for(large, load_tokenizer(str(large)), 128, has_end=False), arguments.rounds)
        figures |= {"ratio_50m": big["ratio"], "ratio_batch_50m": big["ratio_batch"], "50m": big}
    print_figures(figures)


if __name__ == "__main__":
    main()
