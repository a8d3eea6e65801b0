"""`plait sample`: prompts, completions, rewards and their parts side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from plait.batch import Sample
from plait.config import RunConfig
from plait.data.tasks import build_tasks
from plait.jobs.evaluate import with_model
from plait.jobs.setup import held_out, load, make_engine, make_stream
from plait.plan import Plan
from plait.rewards.extract import extract
from plait.rewards.scoring import open_scoring
from plait.stages.generate import generate
from plait.telemetry.samples import prompt_text

if TYPE_CHECKING:
    from rich.console import RenderableType


def sample(
    config: RunConfig,
    *,
    model: str | None = None,
    num_prompts: int = 4,
    num_samples: int = 1,
    recipe_dir: Path = Path(),
) -> list[Sample]:
    """Scored completions of held-out prompts, in the order of the prompts."""
    config = with_model(config, model)
    loaded = load(config.model, config.rollout.stop_tokens)
    mixture = build_tasks(config.tasks, run_seed=config.seed, eval_config=config.evaluation, recipe_dir=recipe_dir)
    prompts = held_out(mixture, make_stream(mixture, loaded.tokenizer, config), num_prompts)[:num_prompts]
    groups = generate(
        make_engine(loaded, Plan.from_config(config)),
        loaded.tokenizer,
        prompts,
        num_samples=num_samples,
        max_completion_tokens=config.evaluation.max_completion_tokens or config.rollout.max_completion_tokens,
        sampling=config.evaluation.sampling,
        seed_key=(config.seed, "sample"),
    )
    samples = [one for group in groups for one in group.samples]
    with open_scoring(config.verifiers, recipe_dir) as scorer:
        for one, verdict in zip(samples, scorer.score(samples), strict=True):
            one.verdict = verdict
    return samples


def render(samples: Sequence[Sample]) -> "RenderableType":
    """One row per sample; model output is shown as text, never as markup."""
    from rich.table import Table
    from rich.text import Text

    from plait.telemetry.progress import printable

    table = Table(show_lines=True)
    for heading in ("task", "prompt", "completion", "answer", "reward"):
        table.add_column(heading, overflow="fold")
    for one in samples:
        assert one.verdict is not None, f"sample {one.id} was not scored"
        verdict = one.verdict
        said = verdict.detail if verdict.is_scored else f"{verdict.kind}: {verdict.reason}"
        parts = "".join(f"\n{name} {value:g}" for name, value in verdict.parts.items())
        cut = "" if one.finish == "stop" else "\n(cut at the limit)"
        answer = extract(one.prompt.prefix + one.text).answer
        cells = (
            one.prompt.task,
            prompt_text(one.prompt),
            one.text + cut,
            "(none)" if answer is None else answer,
            f"{one.reward:g}\n{said}{parts}\n{one.num_response_tokens} tokens",
        )
        table.add_row(*(Text(printable(cell, "utf-8")) for cell in cells))
    return table
