"""`plait replay --batch`: make the update of a step again, and say where it stops being finite.

Loads no torch before the run's files were read and the step was found.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from plait.errors import ConfigError
from plait.jobs.replay import read_run
from plait.telemetry.bad_batches import BadBatches
from plait.telemetry.metrics import read_metrics
from plait.telemetry.run_dir import BAD_BATCHES, METRICS_FILE, to_plain

if TYPE_CHECKING:
    from rich.console import RenderableType

Kind = Literal[
    "weights",
    "advantage",
    "old log-probability",
    "reference log-probability",
    "value",
    "return",
    "activation",
    "logits",
    "log-probability",
    "ratio",
    "loss",
    "gradient of the loss",
    "gradient of an activation",
    "gradient of a parameter",
    "summed gradient of a parameter",
    "gradient norm",
]
"""Tensors of an update, in the order in which they are computed."""

_BOUND = "bound what the verifier returns to a small range, for example 0 to 1"
_SMALLER_STEPS = "start again with a lower optimizer.learning_rate, or some optimizer.weight_decay"
_ON_THE_WAY_BACK = f"It overflows on the way back: {_BOUND}; if the scores are small already, {_SMALLER_STEPS}"

ADVICE: dict[Kind, str] = {
    "weights": f"The weights hold it already; {_SMALLER_STEPS}",
    "advantage": f"Look at this sample's score: {_BOUND}",
    "old log-probability": "The weights before the update gave this token no probability or no number: see docs/gap.md",
    "reference log-probability": "The reference cannot score this token: it may be a model of another vocabulary",
    "value": f"The critic's weights have grown: {_SMALLER_STEPS}",
    "return": f"Look at this sample's score and the critic's values: {_BOUND}",
    "activation": f"The weights have grown, or this layer overflows: {_SMALLER_STEPS}",
    "logits": f"The head overflows: {_SMALLER_STEPS}",
    "log-probability": "The trainer gives a sampled token no probability: engine and trainer disagree, see docs/gap.md",
    "ratio": "The policy has moved too far within the step: fewer updates per step (batch.num_epochs_per_step, "
    "batch.num_sequences_per_minibatch) or a lower optimizer.learning_rate",
    "loss": f"Sums and weights overflow: {_BOUND}, and look at the coefficients",
    "gradient of the loss": f"The loss is finite, its slope is not: {_BOUND}",
    "gradient of an activation": _ON_THE_WAY_BACK,
    "gradient of a parameter": _ON_THE_WAY_BACK,
    "summed gradient of a parameter": f"Every sample alone is finite, and their sum is not: {_BOUND}",
    "gradient norm": f"Every gradient is finite, and the sum of their squares is not: {_BOUND}; the samples that pull "
    "most are above",
}
"""What to try, by where the first value that is not finite was met."""

_WIDER = "model.compute_dtype float32 computes this update without it"
_ELSEWHERE = (
    "What made it so is not in what was kept: a hook or code of the user that is not here, other packages, or the "
    "hardware. Resume the run, and see whether it comes again at the same step"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The first value that is not finite. name: of the module, parameter or nothing. value: "nan", "inf", "-inf".

    sample_id: "" where it belongs to no single sample. place: "response token 3", with its text, or "".
    """

    kind: Kind
    name: str
    sample_id: str
    place: str
    value: str

    def __str__(self) -> str:
        what = f"{self.kind} {self.name}" if self.name else self.kind
        of = f' of sample "{self.sample_id}"' if self.sample_id else ""
        at = f" at {self.place}" if self.place else ""
        return f"{what}{of}{at} is {self.value}"


@dataclass(frozen=True, slots=True)
class SampleGradient:
    """What one sample adds to the update, alone. advantage: the largest in size; None where the loss is of pairs.

    grad_norm: fp32, before clipping.
    """

    sample_id: str
    num_tokens: int
    advantage: float | None
    grad_norm: float
    first: Finding | None


@dataclass(frozen=True, slots=True)
class UpdateAgain:
    """The update in one dtype. losses: of its microbatches. grad_norm: of their sum, before clipping.

    samples: by their gradient's norm, those that are not finite first.
    """

    dtype: str
    losses: tuple[float, ...]
    grad_norm: float
    first: Finding | None
    samples: tuple[SampleGradient, ...]

    @property
    def num_nonfinite(self) -> int:
        """Samples in which something is not finite."""
        return sum(sample.first is not None for sample in self.samples)


@dataclass(frozen=True, slots=True)
class BatchReplay:
    """What a replay of an update found.

    update: number within the step, from 1. weights: where those before the step came from. batch: kept or made again.
    recorded: norms that the run had noted, one per update that had gradients. runs: the run's dtype, then the other.
    """

    run_dir: Path
    step: int
    update: int
    num_updates: int
    weights: str
    batch: str
    recorded: tuple[str, ...]
    runs: tuple[UpdateAgain, UpdateAgain]
    notes: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """One to three sentences: where it begins, whether the dtype matters, what to try."""
        was_finite = all(norm not in ("nan", "inf", "-inf") for norm in self.recorded)
        return verdict(self.runs, was_finite=was_finite and bool(self.recorded))

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = to_plain(asdict(self) | {"run_dir": str(self.run_dir), "verdict": self.verdict})
        return plain

    def render(self) -> "RenderableType":
        from plait.jobs.replay_batch_report import render

        return render(self)


def replay_batch(
    run_dir: Path, step: int, *, rerun: bool = False, say: Callable[[str], None] = lambda text: None
) -> BatchReplay:
    """Make the update of a step again, in the run's dtype and in the other one.

    rerun: where the step's batch or the weights before it are not kept, make the steps since an earlier checkpoint
    again, in a temporary folder. The run's own folder is only read. say: told what that will cost before it starts.
    Raises ConfigError for a folder that is no run, a step that it has not made, or what is not kept.
    """
    config, recipe_dir = read_run(run_dir)
    batches = BadBatches(run_dir / BAD_BATCHES)
    kept = batches.load(step) if step in batches.steps() else None
    if kept is None:
        made = [record["step"] for record in read_metrics(run_dir / METRICS_FILE) if record["kind"] == "train"]
        if step not in made:
            span = f"steps {made[0]} to {made[-1]}" if made else "no step yet"
            raise ConfigError(f"{run_dir} has made {span}, so there is no update of step {step}. Choose one of these")
    from plait.jobs.replay_update import replay_update  # loads torch

    return replay_update(run_dir, config, recipe_dir, step, kept, rerun=rerun, say=say)


def verdict(runs: Sequence[UpdateAgain], *, was_finite: bool) -> str:
    """Where the update stops being finite and what to try. runs: the run's dtype, then the other one."""
    run, other = runs
    if run.first is None:
        where, also = f"{run.dtype} and in {other.dtype}", ""
        if other.first is not None:
            where, also = run.dtype, f" In {other.dtype} the {other.first}."
        if was_finite:
            return f"Every value is finite in {where}, as it was in the run.{also}"
        return f"Every value is finite in {where}, although it was not in the run.{also} {_ELSEWHERE}."
    advice = ADVICE[run.first.kind]
    if other.first is None:
        begins = f"In {other.dtype} every value is finite"
        advice = f"{_WIDER}. {advice}" if other.dtype == "float32" else advice
    elif str(other.first) == str(run.first):
        begins = f"In {other.dtype} it is the same"
    else:
        begins = f"In {other.dtype} the first is another: {other.first}"
    return f"First value that is not finite in {run.dtype}: {run.first}. {begins}. Next: {advice}."
