"""The part of a replay that needs torch: weights of a policy version, scores along the axes, the sample again."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from plait.config import RunConfig
from plait.errors import ConfigError, PlaitError
from plait.jobs.replay import TRAINER, Regeneration, ReplayResult, Scored
from plait.jobs.setup import LoadedModel, load, make_engine, resolve_model
from plait.jobs.train import rerun as run_again
from plait.jobs.train import versions
from plait.models.load import Tokenizer
from plait.plan import Plan
from plait.recipe import read_recipe
from plait.roles.model import sequence_logprobs
from plait.rollout.scheduler import Request
from plait.stages.packing import TokenSequence, plan_microbatches
from plait.telemetry.checkpoint import CheckpointStore
from plait.telemetry.metrics import read_metrics
from plait.telemetry.progress import duration
from plait.telemetry.run_dir import CHECKPOINTS, METRICS_FILE, RunDir
from plait.telemetry.samples import StoredSample

_OTHER_DTYPE = {"bfloat16": "float32", "float32": "bfloat16"}
_DECIDED = ("learning_rate", "reward/mean", "tokens_generated", "entropy", "grad_norm")
"""Metrics that are equal where a step was made again exactly: what went in, what was sampled, what was learnt."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """fp32 masters by parameter name, None for those of the initial model; where they are from, in words."""

    masters: dict[str, Tensor] | None
    source: str
    notes: tuple[str, ...] = ()


def replay_sample(
    run_dir: Path,
    config: RunConfig,
    recipe_dir: Path,
    sample: StoredSample,
    siblings: Sequence[StoredSample],
    *,
    rerun: bool,
    say: Callable[[str], None],
) -> ReplayResult:
    """See `plait.jobs.replay.replay`. siblings: the other stored samples of its step."""
    config = config.model_copy(update={"model": resolve_model(config.model)})
    version = sample.versions[0][1]
    weights = _weights_of(run_dir, config, recipe_dir, version, rerun=rerun, say=say)
    loaded = load(config.model, config.rollout.stop_tokens)
    if weights.masters is None:
        # The masters of a run begin as the compute copy's values, whatever type the folder holds.
        masters = {name: parameter.detach().float() for name, parameter in loaded.model.named_parameters()}
    else:
        masters = weights.masters
        _put(loaded.model, masters, weights.source)
    scored, left_out = _scores(config, loaded, masters, sample, siblings)
    regeneration = _generate_again(config, loaded, sample, has_right_weights=scored[0].is_in_band)
    return ReplayResult(
        run_dir=run_dir,
        sample_id=sample.id,
        step=sample.step,
        policy_version=version,
        weights=weights.source,
        dtype=config.model.compute_dtype,
        temperature=config.rollout.sampling.temperature,
        num_tokens=len(sample.response_ids),
        scored=tuple(scored),
        left_out=tuple(left_out),
        regeneration=regeneration,
        notes=(*weights.notes, *_version_notes(run_dir)),
    )


def _weights_of(
    run_dir: Path, config: RunConfig, recipe_dir: Path, version: int, *, rerun: bool, say: Callable[[str], None]
) -> _Weights:
    """The weights that policy version `version` was; step k of a run published version k."""
    store = CheckpointStore(run_dir / CHECKPOINTS, config.checkpoint.keep)
    kept = {ref.step: ref.path for ref in store.complete()}
    if version in kept:
        return _Weights(store.load(kept[version]).tensors["policy"], f"checkpoint step-{version}")
    if version == 0:
        return _Weights(None, f"the initial model, {config.model.path}")
    start = max(step for step in (0, *kept) if step < version)
    origin = f"checkpoint step-{start}" if start else "the start"
    cost = _cost(run_dir, start, version)
    if not rerun:
        available = ", ".join(str(step) for step in sorted({0, *kept}))
        raise ConfigError(
            f"the weights of policy version {version} are not kept: {run_dir} has those of {available} (0 is the "
            f"initial model). Add --rerun to make {cost} again from {origin} in a temporary folder, choose a sample of "
            "one of these versions, or let the next run keep more: checkpoint.every_steps and checkpoint.keep"
        )
    say(f"making {cost} again from {origin}, in a temporary folder; {run_dir} is only read")
    checkpoint = store.load(kept[start]) if start else None
    with tempfile.TemporaryDirectory(prefix="plait-replay-") as root, RunDir.create(Path(root), "rerun") as folder:
        result = run_again(config, folder, recipe_dir, checkpoint, last_step=version)
        if result.steps != version:
            raise PlaitError(
                f"the re-run was stopped by {result.stopped} after step {result.steps} of {version}, so there is "
                "nothing to score with. Replay again to make it anew"
            )
        made = CheckpointStore(folder.checkpoints, keep=1).load(folder.checkpoints / f"step-{version}")
        notes = _differences(run_dir, folder.path, start + 1, version)
    return _Weights(made.tensors["policy"], f"{_steps(start + 1, version)} made again from {origin}", notes)


def _steps(first: int, last: int) -> str:
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _recorded(folder: Path) -> dict[int, dict[str, float]]:
    return {record["step"]: record for record in read_metrics(folder / METRICS_FILE) if record["kind"] == "train"}


def _cost(run_dir: Path, start: int, version: int) -> str:
    """Which steps a re-run makes, and how long they took the run."""
    records = _recorded(run_dir)
    times = [records[step]["time/step_s"] for step in range(start + 1, version + 1) if step in records]
    steps = _steps(start + 1, version)
    if not times:
        return steps
    mean_s = float(np.mean(times))
    number = version - start
    return f"{steps} ({number} x {mean_s:.2g} s as recorded, about {duration(number * mean_s)})"


def _differences(run_dir: Path, again: Path, first: int, last: int) -> tuple[str, ...]:
    """A note where the re-run did not do what the run had done; its weights are then not those that sampled."""
    recorded, made = _recorded(run_dir), _recorded(again)
    for step in range(first, last + 1):
        for name in _DECIDED:
            if step not in recorded or name not in recorded[step]:
                continue
            before, now = recorded[step][name], made[step].get(name)
            if before != now:
                return (
                    f"The re-run differs from the run from step {step} on ({name} {now}, recorded {before}), so its "
                    "weights are not exactly those that sampled. Steps are equal only on the same kind of machine with "
                    "the same packages, verifiers and number of threads, and where train.num_steps was not changed",
                )
    return ()


def _version_notes(run_dir: Path) -> list[str]:
    """What has another version now than when the run was started."""
    path = run_dir / "run.json"
    before = read_recipe(path)["versions"] if path.is_file() else {}
    now = versions()
    changed = [
        f"{name} {old} then, {now[name]} now" for name, old in before.items() if name in now and old != now[name]
    ]
    return [f"Versions differ from those of the run: {', '.join(changed)}"] if changed else []


@torch.no_grad()
def _put(model: PreTrainedModel, masters: dict[str, Tensor], source: str) -> None:
    """Derive the compute copy from masters, as the trainer does after each update."""
    parameters = dict(model.named_parameters())
    fits = masters.keys() == parameters.keys() and all(masters[name].shape == p.shape for name, p in parameters.items())
    if not fits:
        raise ConfigError(
            f"{source} holds other parameters than the model that the run names. Restore model.path as it was"
        )
    for name, parameter in parameters.items():
        parameter.copy_(masters[name])


def _sequence(sample: StoredSample) -> TokenSequence:
    ids = np.array([*sample.prompt_ids, *sample.response_ids], dtype=np.int64)
    return TokenSequence(ids, np.arange(len(ids)) >= len(sample.prompt_ids))


def _scores(
    config: RunConfig,
    loaded: LoadedModel,
    masters: dict[str, Tensor],
    sample: StoredSample,
    siblings: Sequence[StoredSample],
) -> tuple[list[Scored], list[str]]:
    """The trainer's row first, then one row per axis; and what was left out, with the reason."""
    dtype, temperature = config.model.compute_dtype, config.rollout.sampling.temperature
    max_tokens = config.batch.num_tokens_per_microbatch
    alone = [_sequence(sample)]
    batch = [*alone, *map(_sequence, siblings)]

    def logprobs(model: PreTrainedModel, sequences: list[TokenSequence], temperature: float) -> NDArray[np.float64]:
        scored = sequence_logprobs(model, sequences, temperature=temperature, max_tokens=max_tokens)
        return scored[0].double().cpu().numpy()

    base_R = logprobs(loaded.model, alone, temperature)

    def row(axis: str, how: str, logprobs_R: NDArray[np.float64], dtype: str = dtype) -> Scored:
        return _row(axis, how, dtype, logprobs_R, base_R, sample, loaded.tokenizer)

    rows, left_out = [row(TRAINER, f"{dtype}, alone, temperature {temperature:g}", base_R)], []
    other = _OTHER_DTYPE[dtype]
    model = load(config.model.model_copy(update={"compute_dtype": other})).model
    _put(model, masters, "the policy")
    rows.append(row("dtype", f"{other} instead of {dtype}", logprobs(model, alone, temperature), other))
    lengths = [len(sequence.ids_T) for sequence in batch]
    company = next(len(group) - 1 for group in plan_microbatches(lengths, max_tokens) if 0 in group)
    if company:
        how = f"packed with {company} other stored sample{'s' if company > 1 else ''} of the step"
        rows.append(row("batch shape", how, logprobs(loaded.model, batch, temperature)))
    else:
        left_out.append("Batch shape was left out: no other stored sample of the step fits into its microbatch.")
    if temperature == 1:
        left_out.append("Temperature was left out: the run sampled at 1.")
    else:
        how = f"temperature 1 instead of {temperature:g}"
        rows.append(row("temperature", how, logprobs(loaded.model, alone, 1.0)))
    return rows, left_out


def _row(
    axis: str,
    how: str,
    dtype: str,
    logprobs_R: NDArray[np.float64],
    base_R: NDArray[np.float64],
    sample: StoredSample,
    tokenizer: Tokenizer,
) -> Scored:
    difference_R = np.abs(logprobs_R - np.array(sample.rollout_logprobs, dtype=np.float64))
    worst = int(difference_R.argmax())
    return Scored(
        axis=axis,
        how=how,
        dtype=dtype,
        mean=float(difference_R.mean()),
        largest=float(difference_R[worst]),
        worst_token=worst,
        worst_text=_text(tokenizer, sample.response_ids[worst]),
        moved=float(np.abs(logprobs_R - base_R).mean()),
    )


def _text(tokenizer: Tokenizer, token: int) -> str:
    # Special tokens included: they are often the ones to look at.
    return tokenizer.backend.decode([token])


def _generate_again(
    config: RunConfig, loaded: LoadedModel, sample: StoredSample, *, has_right_weights: bool
) -> Regeneration:
    """Generate the sample from its seed with nothing beside it, and compare the tokens."""
    engine = make_engine(loaded, Plan.from_config(config))
    request = Request(sample.id, sample.prompt_ids, sample.seed, config.rollout.max_completion_tokens)
    (completion,) = engine.generate([request], config.rollout.sampling)
    stored, again = list(sample.response_ids), completion.token_ids_R.tolist()
    is_exact = config.model.compute_dtype == "float32"
    if stored == again:
        reason = "A seed decides a sample" if is_exact else "bfloat16 does not promise that across batch shapes"
        return Regeneration(None, "", "", True, reason)
    place = next(
        (i for i, (a, b) in enumerate(zip(stored, again, strict=False)) if a != b), min(len(stored), len(again))
    )
    if not has_right_weights:
        reason = "The scores above already differ by more than rounding, so other tokens follow from them"
    elif is_exact:
        reason = (
            "In float32 a sample does not depend on what is generated beside it; other packages, another number of "
            "threads, or a token whose draw lay within rounding of its neighbour's can do this"
        )
    else:
        reason = "In bfloat16 the batch shape changes rounding, and one other token changes all that follow"
    return Regeneration(
        first_difference=place,
        stored=_text(loaded.tokenizer, stored[place]) if place < len(stored) else "",
        again=_text(loaded.tokenizer, again[place]) if place < len(again) else "",
        is_expected=not (has_right_weights and is_exact),
        reason=reason,
    )
