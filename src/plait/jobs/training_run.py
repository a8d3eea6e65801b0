"""One training run: its folder, logs, checkpoints and evaluations around an executor."""

import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from safetensors import SafetensorError

from plait.algorithms.settings import step_graph
from plait.batch import Sample
from plait.config import RunConfig
from plait.data.stream import EncodedPrompt
from plait.errors import NonFiniteError, PlaitError
from plait.executor.inline import InlineExecutor, Parts
from plait.executor.step_state import StepState
from plait.jobs.evaluate import EvaluationResult, run_evaluation
from plait.jobs.kept_batch import batch_of
from plait.jobs.step_metrics import step_metrics
from plait.jobs.stop import StopRequest
from plait.plan import Plan
from plait.schedules.sync import sync
from plait.telemetry.alarm_log import AlarmLog
from plait.telemetry.bad_batches import MAX_KEPT, BadBatches
from plait.telemetry.checkpoint import Checkpoint, CheckpointStore
from plait.telemetry.files import describe_free_space, partial_path
from plait.telemetry.metrics import MetricsLog, hints_for
from plait.telemetry.progress import Progress
from plait.telemetry.run_dir import RunDir
from plait.telemetry.samples import SamplesLog


@dataclass(frozen=True, slots=True)
class Logs:
    """Where a run writes."""

    folder: RunDir
    metrics: MetricsLog
    samples: SamplesLog
    alarms: AlarmLog
    bad_batches: BadBatches
    checkpoints: CheckpointStore
    progress: Progress


@dataclass(slots=True)
class Position:
    """How far a run has come; saved in every checkpoint. seconds: of training so far, over all sessions."""

    step: int = 0
    seconds: float = 0.0
    tokens_generated: int = 0
    tokens_trained: int = 0
    num_failed: int = 0
    num_dropped: int = 0
    first: dict[str, Any] | None = None
    latest: dict[str, Any] | None = None
    latest_step: int = -1


class TrainingRun:
    """Drives the schedule and does what is due after each step."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        parts: Parts,
        logs: Logs,
        held_out: Sequence[EncodedPrompt],
        stop: StopRequest,
    ):
        self._config, self._parts, self._logs = config, parts, logs
        self._held_out, self._stop = held_out, stop
        self._hints: set[str] = set()
        self._kept_step = 0
        self._stage_seconds: dict[str, float] = parts.trace.seconds_per_stage()
        self._last_saved = -1
        self._resumed_at_s = time.perf_counter()
        self.position = Position()
        self._executor = InlineExecutor(
            config,
            plan,
            step_graph(config),
            parts,
            should_stop=self._should_stop,
            on_step_end=self._on_step_end,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from a checkpoint: weights, moments, cursor, controller, position. Its tensors are given up."""
        self._parts.workers.restore(checkpoint.tensors, checkpoint.folder, checkpoint.step)
        # The callers hold the checkpoint to the end of the run, and weights and moments would be there twice.
        checkpoint.tensors.clear()
        state = checkpoint.state
        if "kl_coefficient" in state:  # checkpoints of earlier versions have none: it never changed there
            self._executor.kl_coefficient = state["kl_coefficient"]
        self.position = Position(**state["position"])
        self._parts.stream.cursor = state["cursor"]
        self._last_saved = self.position.step

    def run(self, until: int | None = None, *, kept_step: int = 0) -> None:
        """Evaluate, train, evaluate, save, export; returns early where a stop was asked for.

        until: stop after this step, saved, as if it had been asked for there; None for the whole run.
        kept_step: keep the batch of this step, finite or not.
        """
        self._kept_step = kept_step
        if self._config.evaluation.at_start and self.position.step == 0:
            self._evaluate()
        self._stop.start_step()
        first = self.position.step + 1
        try:
            sync(self._executor, first_step=first, last_step=until or self._config.train.num_steps)
        except NonFiniteError:
            self._keep_batch(self._executor.state)
            raise
        if not self.is_finished:
            self._save()
            return
        if self._config.evaluation.at_end and self.position.latest_step != self.position.step:
            self._evaluate()
        self._save()
        self._mark_best()
        self._export()

    @property
    def is_finished(self) -> bool:
        return self.position.step >= self._config.train.num_steps

    @property
    def seconds(self) -> float:
        """Of all sessions so far."""
        return self.position.seconds + time.perf_counter() - self._resumed_at_s

    def _should_stop(self) -> bool:
        return bool(self._stop.reason)

    def _on_step_end(self, state: StepState) -> None:
        self._stop.end_step()
        assert state.tally is not None, f"step {state.step} ended without an update"
        totals = self._parts.trace.seconds_per_stage()
        spent = {stage: total - self._stage_seconds.get(stage, 0.0) for stage, total in totals.items()}
        stages = {stage.name: spent[stage.name] for stage in self._executor.graph.stages}
        metrics = step_metrics(
            state,
            stages | {"step": time.perf_counter() - state.started_s},
            algorithm=self._config.algorithm,
            compute_dtype=self._config.model.compute_dtype,
            policy_version=self._parts.workers.version,
            num_dropped=self._parts.stream.num_dropped - self.position.num_dropped,
        )
        position = self.position
        position.step = state.step
        position.tokens_generated += int(metrics["tokens_generated"]) if "tokens_generated" in metrics else 0
        position.tokens_trained += int(metrics["tokens_trained"])
        position.num_dropped = self._parts.stream.num_dropped
        self._log(state, metrics, stages)
        self._do_what_is_due()
        self._stage_seconds = self._parts.trace.seconds_per_stage()
        self._stop.start_step()

    def _log(self, state: StepState, metrics: dict[str, float], stages: dict[str, float]) -> None:
        self._logs.metrics.log(state.step, metrics)
        samples = [sample for group in state.sampled for sample in group.samples]
        failed = [s for s in samples if s.verdict is not None and s.verdict.kind == "failed"]
        self.position.num_failed += len(failed)
        if failed and failed[0].verdict is not None:
            self._logs.progress.note(
                f"step {state.step}: the verifier failed on {len(failed)} of {len(samples)} samples, "
                f"first on {failed[0].id}: {failed[0].verdict.reason}"
            )
        tallies = {"policy": state.tally, "critic": state.critic_tally}
        nonfinite = {role: tally for role, tally in tallies.items() if tally is not None and tally.nonfinite_in}
        if nonfinite:
            self._keep_batch(state)
        elif state.step == self._kept_step:
            self._logs.bad_batches.keep(batch_of(state))
        # All of a step whose update failed: they are what has to be looked into.
        chosen = _spread(samples, len(samples) if nonfinite else self._config.logging.samples_per_step)
        self._logs.samples.write(state.step, {s.id: s for s in (*chosen, *failed)}.values())
        name = chosen[0].id if chosen else "ID"
        for onset in self._logs.alarms.see(state.step, metrics, run=self._logs.folder.path, sample=name):
            self._logs.progress.note(f"ALARM {onset}")
        for hint in hints_for(metrics, self._hints):
            self._logs.progress.note(hint)
        self._logs.progress.step(state.step, metrics, stages, metrics["time/step_s"])

    def _keep_batch(self, state: StepState) -> None:
        path = self._logs.bad_batches.keep(batch_of(state))
        tallies = {"policy": state.tally, "critic": state.critic_tally}
        places = [f"{t.nonfinite_in} of the {role}" for role, t in tallies.items() if t is not None and t.nonfinite_in]
        where = f", first in {' and '.join(places)}" if places else ""
        self._logs.progress.note(
            f"step {state.step}: an update whose gradient is not finite{where}, was not applied. Its batch is kept in "
            f"{path} (the newest {MAX_KEPT} are). See where it begins: plait replay {self._logs.folder.path} --batch "
            f"{state.step}"
        )

    def _do_what_is_due(self) -> None:
        step, config = self.position.step, self._config
        is_last = step == config.train.num_steps
        if config.evaluation.every_steps and step % config.evaluation.every_steps == 0 and not is_last:
            self._evaluate()
        # The last step is saved after the evaluation at the end: a checkpoint without it, resumed, would make it twice.
        if config.checkpoint.every_steps and step % config.checkpoint.every_steps == 0 and not is_last:
            self._save()
        self._mark_best()

    def _evaluate(self) -> None:
        step = self.position.step
        if "sync_weights" not in self._executor.graph:
            self._executor.sync_weights(step)  # such a step samples nothing, so that only an evaluation needs it
        with self._parts.trace.span("evaluate", step=step):
            result = run_evaluation(
                self._parts.workers, self._parts.tokenizer, self._parts.evaluation_scorer, self._held_out, self._config
            )
        self._logs.metrics.log(step, result.metrics(), kind="eval")
        self._logs.progress.note(f"evaluation after step {step}: accuracy {result}, {result.seconds:.1f} s")
        self.position.latest, self.position.latest_step = result.to_dict(), step
        if step == 0:
            self.position.first = self.position.latest

    def _mark_best(self) -> None:
        """Keep the checkpoint of the best evaluation; one is written where the best step has none."""
        if self.position.latest is None or self.position.latest_step != self.position.step or self.position.step == 0:
            return
        accuracy = float(self.position.latest["accuracy"])
        best = self._logs.checkpoints.best()
        if best is None or accuracy > best.accuracy:
            self._save()
            self._logs.checkpoints.mark_best(self.position.step, accuracy)

    def _export(self) -> None:
        """The model's folder, whole or not there; a folder of an earlier end of this run is replaced."""
        target = self._logs.folder.model
        partial = partial_path(target)
        try:
            self._parts.workers.export(self._parts.tokenizer, partial)
            if target.exists():
                shutil.rmtree(target)
            os.rename(partial, target)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise PlaitError(
                f"{target}: the trained model cannot be written: {error}. {describe_free_space(target.parent)} "
                "Make room or give write permission, then resume: the last checkpoint has it."
            ) from error

    def _save(self) -> None:
        """A checkpoint of this step, unless there is one."""
        step = self.position.step
        if self._last_saved == step:
            return
        saved = asdict(self.position) | {"seconds": self.seconds}
        with self._parts.trace.span("checkpoint", step=step):
            self._logs.checkpoints.save(
                step,
                self._parts.workers.state(),
                {
                    "position": saved,
                    "cursor": self._parts.stream.cursor,
                    "kl_coefficient": self._executor.kl_coefficient,
                    "config": self._config.model_dump(mode="json"),
                },
                self._parts.workers.save_shards,
            )
        self._last_saved = step
        self._parts.trace.write(self._logs.folder.trace)


def _spread(samples: Sequence[Sample], count: int) -> list[Sample]:
    """`count` samples, evenly spaced within the tasks, so that every task shows in its share."""
    if count >= len(samples):
        return list(samples)
    by_task = sorted(samples, key=lambda sample: sample.prompt.task)
    return [by_task[i * len(samples) // count] for i in range(count)]


def results_of(position: Position) -> tuple[EvaluationResult | None, EvaluationResult | None]:
    """The evaluations before step 1 and after the last step, where they were made."""
    before = None if position.first is None else EvaluationResult(**position.first)
    has_after = position.latest is not None and position.latest_step == position.step and position.step > 0
    return before, EvaluationResult(**position.latest) if has_after and position.latest is not None else None
