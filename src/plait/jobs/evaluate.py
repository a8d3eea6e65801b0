"""`plait eval` and the evaluations inside a run: held-out prompts, own sampling, every row, an interval."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from plait.batch import Group, Sample
from plait.config import RunConfig
from plait.data.stream import EncodedPrompt
from plait.data.tasks import build_tasks
from plait.jobs.setup import held_out, load, make_engine, make_stream, resolve_model
from plait.jobs.step_metrics import has_reasoning
from plait.models.load import Tokenizer
from plait.plan import Plan
from plait.rewards.scoring import Scoring, open_scoring
from plait.rollout.engine import Engine
from plait.stages.generate import generate
from plait.telemetry.stats import bootstrap_interval, pass_at_k

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """Accuracy is the share of samples whose score is 1; low and high bound its 95 % interval over prompts."""

    accuracy: float
    accuracy_low: float
    accuracy_high: float
    accuracy_by_task: dict[str, float]
    pass_at_k: float
    samples_per_prompt: int
    reasoning_share: float
    response_tokens_mean: float
    response_tokens_mean_correct: float | None
    truncated_share: float
    failed_share: float
    num_prompts: int
    num_samples: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Under the names of the metrics log."""
        return {
            "eval/accuracy": self.accuracy,
            "eval/accuracy_low": self.accuracy_low,
            "eval/accuracy_high": self.accuracy_high,
            "eval/pass_at_k": self.pass_at_k,
            "eval/reasoning_share": self.reasoning_share,
            "eval/response_tokens_mean": self.response_tokens_mean,
            "eval/truncated_share": self.truncated_share,
            "eval/num_prompts": self.num_prompts,
            "eval/num_samples": self.num_samples,
            "eval/time_s": self.seconds,
            **{f"eval/accuracy/{task}": value for task, value in self.accuracy_by_task.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.accuracy:.1%} ({self.accuracy_low:.1%} to {self.accuracy_high:.1%})"

    def render(self) -> "RenderableType":
        from rich.table import Table

        table = Table(title="Evaluation", show_header=False)
        rows = [
            ("accuracy (95 % interval)", str(self)),
            *((f"accuracy, {task}", f"{value:.1%}") for task, value in self.accuracy_by_task.items()),
            (f"pass@{self.samples_per_prompt}", f"{self.pass_at_k:.1%}"),
            ("samples that reason", f"{self.reasoning_share:.1%}"),
            ("mean length", f"{self.response_tokens_mean:.1f} tokens"),
            ("cut at the limit", f"{self.truncated_share:.1%}"),
            ("verifier failed", f"{self.failed_share:.1%}"),
            ("prompts x samples", f"{self.num_prompts} x {self.samples_per_prompt}"),
            ("seconds", f"{self.seconds:.1f}"),
        ]
        for row in rows:
            table.add_row(*row)
        return table


def run_evaluation(
    engine: Engine, tokenizer: Tokenizer, scorer: Scoring, prompts: Sequence[EncodedPrompt], config: RunConfig
) -> EvaluationResult:
    """Sample and score every held-out prompt with the weights that the engine holds."""
    settings, started = config.evaluation, time.perf_counter()
    groups = generate(
        engine,
        tokenizer,
        prompts,
        num_samples=settings.num_samples_per_prompt,
        max_completion_tokens=settings.max_completion_tokens or config.rollout.max_completion_tokens,
        sampling=settings.sampling,
        seed_key=(settings.seed, "evaluation"),
    )
    samples = [sample for group in groups for sample in group.samples]
    for sample, verdict in zip(samples, scorer.score(samples), strict=True):
        sample.verdict = verdict
    return summarise(groups, seconds=time.perf_counter() - started, seed=settings.seed)


def summarise(groups: Sequence[Group], *, seconds: float, seed: int) -> EvaluationResult:
    """The figures of an evaluation from its scored groups."""
    samples = [sample for group in groups for sample in group.samples]
    correct = [[float(sample.score == 1) for sample in group.samples] for group in groups]
    size = len(groups[0].samples)
    low, high = bootstrap_interval(correct, seed=seed)
    solved = [s.num_response_tokens for s in samples if s.score == 1]
    return EvaluationResult(
        accuracy=float(np.mean(correct)),
        accuracy_low=low,
        accuracy_high=high,
        accuracy_by_task=_by_task(samples),
        pass_at_k=float(np.mean([pass_at_k(size, int(sum(scores)), size) for scores in correct])),
        samples_per_prompt=size,
        reasoning_share=float(np.mean([has_reasoning(sample) for sample in samples])),
        response_tokens_mean=float(np.mean([sample.num_response_tokens for sample in samples])),
        response_tokens_mean_correct=float(np.mean(solved)) if solved else None,
        truncated_share=float(np.mean([sample.finish == "length" for sample in samples])),
        failed_share=float(np.mean([s.verdict is not None and s.verdict.kind == "failed" for s in samples])),
        num_prompts=len(groups),
        num_samples=len(samples),
        seconds=seconds,
    )


def _by_task(samples: Sequence[Sample]) -> dict[str, float]:
    tasks = sorted({sample.prompt.task for sample in samples})
    return {task: float(np.mean([s.score == 1 for s in samples if s.prompt.task == task])) for task in tasks}


def model_of(path: str) -> str:
    """The model folder of a run, or the path itself."""
    exported = Path(path) / "model"
    return str(exported) if (exported / "config.json").exists() else path


def with_model(config: RunConfig, model: str | None) -> RunConfig:
    """The recipe with another model (a folder or a run) in place of its own, every "auto" resolved."""
    settings = config.model if model is None else config.model.model_copy(update={"path": model_of(model)})
    return config.model_copy(update={"model": resolve_model(settings)})


def evaluate(config: RunConfig, *, model: str | None = None, recipe_dir: Path = Path()) -> EvaluationResult:
    """Evaluate a model folder, a finished run or the recipe's own model on the recipe's held-out prompts."""
    config = with_model(config, model)
    loaded = load(config.model, config.rollout.stop_tokens)
    mixture = build_tasks(config.tasks, run_seed=config.seed, eval_config=config.evaluation, recipe_dir=recipe_dir)
    stream = make_stream(mixture, loaded.tokenizer, config)
    prompts = held_out(mixture, stream, config.evaluation.num_prompts)
    engine = make_engine(loaded, Plan.from_config(config))
    with open_scoring(config.verifiers, recipe_dir) as scorer:
        return run_evaluation(engine, loaded.tokenizer, scorer, prompts, config)
