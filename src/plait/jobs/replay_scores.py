"""The part of a replay that needs torch: weights of a policy version, scores along the axes, the sample again."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from plait.config import RunConfig
from plait.jobs.replay import OTHER_DTYPE, TRAINER, Regeneration, ReplayResult, Scored
from plait.jobs.replay_weights import ReplayedRun, masters_of, put, version_notes, weights_of
from plait.jobs.setup import LoadedModel, load, make_engine, resolve_model
from plait.models.load import Tokenizer
from plait.plan import Plan
from plait.roles.model import sequence_logprobs
from plait.rollout.scheduler import Request
from plait.stages.packing import TokenSequence, plan_microbatches
from plait.telemetry.samples import StoredSample


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
    run = ReplayedRun(run_dir, config, recipe_dir, say)
    weights = weights_of(run, version, rerun=rerun, instead="choose a sample of one of these versions")
    loaded = load(config.model, config.rollout.stop_tokens)
    masters = masters_of(weights, loaded.model)
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
        notes=(*weights.notes, *version_notes(run_dir)),
    )


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
    other = OTHER_DTYPE[dtype]
    model = load(config.model.model_copy(update={"compute_dtype": other})).model
    put(model, masters, "the policy")
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
