"""`plait sft`: supervised warm-up, the same packing and optimiser as the RL update with a next-token loss."""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from plait.config import SftConfig
from plait.data.supervised import SupervisedRow, supervised_rows
from plait.data.tasks import build_tasks
from plait.errors import ConfigError, DataError, NonFiniteError
from plait.jobs.setup import resolve_model
from plait.models.load import Tokenizer, export, load_model, load_tokenizer
from plait.models.optimizer import learning_rate
from plait.roles.model import TokenScores
from plait.roles.policy import Policy
from plait.rules import check_config
from plait.stages.packing import Microbatch, TokenSequence

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True, slots=True)
class SftResult:
    """losses: mean loss per completion token (nats) of the first and of the last tenth of the updates."""

    model_dir: Path
    num_updates: int
    first_loss: float
    last_loss: float
    num_tokens: int
    seconds: float

    def render(self) -> "RenderableType":
        from rich.text import Text

        return Text(
            f"{self.num_updates} updates on {self.num_tokens} tokens in {self.seconds:.0f} s; "
            f"loss per completion token {self.first_loss:.3f} -> {self.last_loss:.3f} nats\nModel: {self.model_dir}"
        )


def sft(
    config: SftConfig, *, out_dir: Path | None = None, recipe_dir: Path = Path(), progress: bool = True
) -> SftResult:
    """Train on completions and write a transformers folder to out_dir (default runs/<name>/model)."""
    check_config(config)
    folder = out_dir or Path("runs") / config.name / "model"
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f'"{folder}" is not empty. Name another folder with --out, or remove it')
    settings = resolve_model(config.model)
    torch.set_num_threads(settings.num_threads)
    tokenizer = load_tokenizer(settings.path)
    dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[settings.compute_dtype]
    seed = config.seed if config.model.from_scratch else None
    model = load_model(settings.path, dtype=dtype, device=settings.device, from_scratch_seed=seed)
    policy = Policy(model, config.optimizer)
    started = time.perf_counter()
    losses, num_tokens = _train(policy, tokenizer, config, recipe_dir, progress)
    # Written beside its place and moved: a folder that exists is a whole model.
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    export(model, tokenizer, partial)
    (partial / "sft.json").write_text(json.dumps(config.model_dump(mode="json"), indent=2) + "\n")
    if folder.exists():
        folder.rmdir()
    partial.rename(folder)
    tenth = max(1, len(losses) // 10)
    return SftResult(
        model_dir=folder,
        num_updates=len(losses),
        first_loss=float(np.mean(losses[:tenth])),
        last_loss=float(np.mean(losses[-tenth:])),
        num_tokens=num_tokens,
        seconds=time.perf_counter() - started,
    )


def _train(
    policy: Policy, tokenizer: Tokenizer, config: SftConfig, recipe_dir: Path, progress: bool
) -> tuple[list[float], int]:
    mixture = None
    if config.tasks:
        mixture = build_tasks(config.tasks, run_seed=config.seed, eval_config=config.evaluation, recipe_dir=recipe_dir)
    rows = supervised_rows(config, mixture)
    size, num_updates = config.train.num_sequences_per_update, config.train.num_updates
    losses: list[float] = []
    num_tokens = 0
    last_shown = time.perf_counter()
    for update in range(num_updates):
        batch = [to_sequence(rows.row(update * size + i), tokenizer, config.max_sequence_tokens) for i in range(size)]
        num_tokens += sum(len(sequence.ids_T) for sequence in batch)
        losses.append(_update(policy, batch, config, update))
        if progress and (time.perf_counter() - last_shown > 5 or update == num_updates - 1):
            last_shown = time.perf_counter()
            print(f"update {update + 1}/{num_updates}  loss {np.mean(losses[-20:]):.4f}", flush=True)
    return losses, num_tokens


def _update(policy: Policy, batch: Sequence[TokenSequence], config: SftConfig, update: int) -> float:
    """One update on the mean over all completion tokens of the batch; returns that loss."""
    num_loss_tokens = sum(int(sequence.loss_mask_T.sum()) for sequence in batch)
    total = 0.0

    def loss_of(microbatch: Microbatch, scores: TokenScores) -> torch.Tensor:
        nonlocal total
        loss = -scores.logprobs_R.sum() / num_loss_tokens
        total += float(loss.detach())
        return loss

    policy.train_pass(policy.split(batch, config.train.num_tokens_per_microbatch), loss_of, temperature=1.0)
    result = policy.apply(learning_rate(config.optimizer, update, config.train.num_updates))
    if result.nonfinite is not None:
        raise NonFiniteError(
            f"update {update + 1}: the gradient of {result.nonfinite} is not finite. Lower optimizer.learning_rate"
        )
    return total


def to_sequence(row: SupervisedRow, tokenizer: Tokenizer, max_tokens: int) -> TokenSequence:
    """Prompt, completion and the end token; the loss is on the latter two."""
    prompt = tokenizer.encode_prompt(row.prompt)
    ids = np.array([*prompt, *tokenizer.encode_answer(row.completion)], dtype=np.int64)
    if len(ids) > max_tokens:
        raise DataError(
            f"row {row.prompt.id} has {len(ids)} tokens, more than max_sequence_tokens {max_tokens}. "
            "Raise it, or shorten the row; rows are never cut"
        )
    return TokenSequence(ids, np.arange(len(ids)) >= len(prompt))
