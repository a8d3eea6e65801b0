"""`plait replay`: compute a stored sample again, and name what moves the difference.

Loads no torch before the run's files were read and the sample was found.
"""

import difflib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plait.config import RunConfig
from plait.errors import ConfigError, PlaitError
from plait.recipe import load_resolved_config, read_recipe
from plait.telemetry.gap import BANDS
from plait.telemetry.run_dir import CONFIG, SAMPLES
from plait.telemetry.samples import StoredSample, read_samples

if TYPE_CHECKING:
    from rich.console import RenderableType

OTHER_DTYPE = {"bfloat16": "float32", "float32": "bfloat16"}
TRAINER = "trainer"
"""The row that scores the sample as the run does; every other changes one thing of it."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The stored tokens scored again, teacher-forced.

    axis: `TRAINER`, "dtype", "batch shape" or "temperature". how: in words.
    mean, largest: |log-probability - stored rollout log-probability| over the tokens, in nats.
    worst_token: index of the token with the largest difference; worst_text: that token.
    moved: mean |log-probability - that of the trainer's row|: what this axis alone changes.
    """

    axis: str
    how: str
    dtype: str
    mean: float
    largest: float
    worst_token: int
    worst_text: str
    moved: float

    @property
    def is_in_band(self) -> bool:
        """Whether rounding in this dtype explains every difference."""
        return self.largest <= BANDS[self.dtype]


@dataclass(frozen=True, slots=True)
class Regeneration:
    """The sample generated again from its seed, alone. first_difference: index of the first other token, None if equal.

    stored, again: that token, "" where the text had ended. is_expected: whether `reason` makes it no surprise.
    """

    first_difference: int | None
    stored: str
    again: str
    is_expected: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay found. weights: where those of the policy version came from. left_out: axes that do not apply."""

    run_dir: Path
    sample_id: str
    step: int
    policy_version: int
    weights: str
    dtype: str
    temperature: float
    num_tokens: int
    scored: tuple[Scored, ...]
    left_out: tuple[str, ...]
    regeneration: Regeneration
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """One or two sentences: whether the difference is rounding, and which axis moves it most."""
        return verdict(self.scored)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "run_dir": str(self.run_dir),
            "band": BANDS[self.dtype],
            "is_in_band": self.scored[0].is_in_band,
            "verdict": self.verdict,
        }

    def render(self) -> "RenderableType":
        from plait.jobs.replay_report import render

        return render(self)


def replay(
    run_dir: Path, sample_id: str, *, rerun: bool = False, say: Callable[[str], None] = lambda text: None
) -> ReplayResult:
    """Score a stored sample of a run again in several ways, and generate it again.

    rerun: where no checkpoint of its policy version is kept, make the steps since an earlier one again, in a temporary
    folder. The run's own folder is only read. say: told what a re-run will cost before it starts.
    Raises ConfigError for a folder that is no run, an unknown sample, or weights that are not there.
    """
    config, recipe_dir = read_run(run_dir)
    stored = read_samples(run_dir / SAMPLES)
    sample = _find(run_dir, stored, sample_id)
    _check_tokens(sample)
    siblings = [other for other in stored if other.step == sample.step and other.id != sample.id and other.response_ids]
    from plait.jobs.replay_scores import replay_sample  # loads torch

    return replay_sample(run_dir, config, recipe_dir, sample, siblings, rerun=rerun, say=say)


def read_run(run_dir: Path) -> tuple[RunConfig, Path]:
    """The resolved configuration of a run, and the folder of its recipe."""
    path = run_dir / CONFIG
    data = read_recipe(path) if path.is_file() else {}
    # A model folder has a config.json too, and no batch in it.
    if "batch" not in data:
        raise ConfigError(f"{run_dir} is not a run: it has no {CONFIG} of one. Give the folder of a run")
    origin = read_recipe(run_dir / "run.json") if (run_dir / "run.json").is_file() else {}
    directory = Path(origin["recipe_dir"]) if "recipe_dir" in origin else run_dir.resolve()
    return load_resolved_config(data), directory


def _find(run_dir: Path, stored: Sequence[StoredSample], sample_id: str) -> StoredSample:
    by_id = {sample.id: sample for sample in stored}
    if sample_id in by_id:
        return by_id[sample_id]
    if not stored:
        raise ConfigError(
            f"{run_dir} stores no samples, so none can be replayed. "
            "Start a run with logging.samples_per_step above 0; every sample whose verifier failed is stored besides"
        )
    steps = sorted({sample.step for sample in stored})
    span = f"of step {steps[0]}" if len(steps) == 1 else f"of {len(steps)} steps from {steps[0]} to {steps[-1]}"
    near = difflib.get_close_matches(sample_id, by_id, 3, 0.6)
    named = near or [sample.id for sample in stored[:3]]
    listed = ", ".join(f'"{name}" (step {by_id[name].step})' for name in named)
    raise ConfigError(
        f'{run_dir} stores {len(stored)} samples {span}, and none of them has the id "{sample_id}". '
        f"{'Close to it' if near else 'The first'}: {listed}. "
        "logging.samples_per_step decides how many of a step are stored"
    )


def _check_tokens(sample: StoredSample) -> None:
    if not sample.response_ids:
        raise ConfigError(f'sample "{sample.id}" has no tokens, so there is nothing to score. Choose another one')
    if None in sample.rollout_logprobs:
        index = sample.rollout_logprobs.index(None)
        raise PlaitError(
            f'sample "{sample.id}": the engine\'s log-probability of token {index} was not finite when it was sampled, '
            f"so the weights of policy version {sample.versions[0][1]} were not usable. Replay a sample of an earlier "
            "step, and look at grad_norm and updates_skipped_nonfinite before this one"
        )
    if len(sample.versions) > 1:
        versions = ", ".join(str(version) for _, version in sample.versions)
        raise ConfigError(
            f'sample "{sample.id}" was sampled by policy versions {versions} in turn, and one set of weights cannot '
            "score it. Choose a sample of one version"
        )


def verdict(scored: Sequence[Scored]) -> str:
    """Whether rounding explains the difference; else which axis does, or that none does. scored[0] is the trainer's."""
    base, axes = scored[0], scored[1:]
    band = f"the band of {base.dtype}, {BANDS[base.dtype]:g}"
    most = max(axes, key=lambda row: row.moved)
    if most.moved == 0:
        moves = "No axis moves it"
    else:
        way = "closer to" if most.mean < base.mean else "further from"
        moves = (
            f"What moves it most is {most.axis} ({most.how}): by {most.moved:.2g} on average, {way} what was stored "
            f"(mean {most.mean:.2g})"
        )
    if base.is_in_band:
        return f"The difference is rounding: no token's is above {band}. {moves}."
    found = f"The difference is not rounding: the largest, {base.largest:.2g}, is above {band}."
    explaining = [row for row in axes if row.is_in_band]
    if explaining:
        best = min(explaining, key=lambda row: row.mean)
        return f"{found} {best.axis} explains it: {best.how} leaves {best.largest:.2g} at most. {moves}."
    return (
        f"{found} {', '.join(row.axis for row in axes)}: none of them explains it, so look at the weights: what is "
        f"scored here is not what sampled, or the model's code or files have changed since. {moves}."
    )
