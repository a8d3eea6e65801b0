"""One process, one pool: pieces run when a schedule waits for them."""

import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from plait.batch import Group
from plait.config import RunConfig
from plait.data.stream import PromptStream
from plait.errors import NoSignalError
from plait.executor.protocol import Piece
from plait.models.load import Tokenizer
from plait.plan import Plan
from plait.rewards.breaker import CircuitBreaker
from plait.rewards.scoring import Scoring
from plait.roles.policy import Policy
from plait.rollout.engine import Engine
from plait.stages.advantage import group_advantages
from plait.stages.generate import generate
from plait.stages.graph import StepGraph
from plait.stages.logprob import group_logprobs, group_rollout_logprobs
from plait.stages.update import UpdateInputs, UpdateSettings, UpdateTally, update_policy
from plait.telemetry.trace import Trace
from plait.weight_sync.in_process import publish


@dataclass(slots=True)
class StepState:
    """Everything that the stages of one step have written so far."""

    step: int
    policy_version: int
    sampled: list[Group] = field(default_factory=list)
    """Every group sampled in this step, those without signal included."""
    groups: list[Group] = field(default_factory=list)
    """The groups that the step trains on."""
    unscored: list[Group] = field(default_factory=list)
    num_rounds: int = 0
    advantages: dict[str, float] = field(default_factory=dict)
    old_logprobs: dict[str, Tensor] | None = None
    ref_logprobs: dict[str, Tensor] | None = None
    tally: UpdateTally | None = None
    started_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Parts:
    """The roles and services of a run, assembled by the job that starts it."""

    policy: Policy
    reference: PreTrainedModel | None
    engine: Engine
    tokenizer: Tokenizer
    scorer: Scoring
    breaker: CircuitBreaker
    evaluation_scorer: Scoring
    """Judges by the real verifiers, also in a control run."""
    stream: PromptStream
    trace: Trace


class InlineExecutor:
    """Implements `plait.executor.protocol.Executor` in one process.

    should_stop: asked before each step. on_step_end: told the finished StepState.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        graph: StepGraph,
        parts: Parts,
        *,
        should_stop: Callable[[], bool],
        on_step_end: Callable[[StepState], None],
    ):
        self.graph = graph
        self._config, self._parts = config, parts
        self._should_stop, self._on_step_end = should_stop, on_step_end
        self._queue: list[Piece] = []
        self._state = StepState(0, parts.engine.version)
        self._update_settings = update_settings(config, plan)
        self._run: dict[str, Callable[[StepState], None]] = {
            "generate": self._generate,
            "score_verifier": self._score,
            "advantage": self._advantage,
            "old_logprob": self._old_logprob,
            "ref_logprob": self._ref_logprob,
            "update_policy": self._update,
        }
        unknown = {stage.name for stage in graph.stages} - self._run.keys() - {"sync_weights"}
        assert not unknown, f"the graph has stages that this executor does not know: {sorted(unknown)}"

    @property
    def state(self) -> StepState:
        """Of the open step, or of the last one."""
        return self._state

    def begin_step(self, step: int) -> bool:
        if self._should_stop():
            return False
        self._state = StepState(step, self._parts.engine.version, started_s=time.perf_counter())
        return True

    def submit(self, piece: Piece) -> None:
        heapq.heappush(self._queue, piece)

    def next_completed(self) -> Piece:
        piece = heapq.heappop(self._queue)
        assert piece.step == self._state.step, f"{piece} does not belong to the open step {self._state.step}"
        with self._parts.trace.span(piece.stage, step=piece.step, round=piece.round):
            self._run[piece.stage](self._state)
        return piece

    def num_missing_groups(self, step: int) -> int:
        """Dynamic sampling keeps only groups with signal; when rounds run out, the recipe's policy decides."""
        state, settings = self._state, self._config.algorithm.dynamic_sampling
        missing = self._config.batch.num_prompts_per_step - len(state.groups)
        if missing == 0 or not settings.enabled or state.num_rounds < settings.max_rounds:
            return missing
        if settings.when_exhausted == "stop" or (settings.when_exhausted == "train_on_partial" and not state.groups):
            raise NoSignalError(_no_signal_text(state, self._config))
        if settings.when_exhausted == "skip_step":
            state.groups = []
        return 0

    def sync_weights(self, version: int) -> None:
        with self._parts.trace.span("sync_weights", step=self._state.step):
            publish(self._parts.policy.model, self._parts.engine, version)

    def end_step(self, step: int) -> None:
        self._on_step_end(self._state)

    def _generate(self, state: StepState) -> None:
        missing = self._config.batch.num_prompts_per_step - len(state.groups)
        state.unscored = generate(
            self._parts.engine,
            self._parts.tokenizer,
            self._parts.stream.draw(missing),
            num_samples=self._config.batch.num_samples_per_prompt,
            max_completion_tokens=self._config.rollout.max_completion_tokens,
            sampling=self._config.rollout.sampling,
            seed_key=(self._config.seed, "train"),
            # Scored beside generation: the verifiers' workers begin with a sample when it is finished.
            on_sample=lambda sample: self._parts.scorer.submit([sample]),
        )
        state.num_rounds += 1

    def _score(self, state: StepState) -> None:
        samples = [sample for group in state.unscored for sample in group.samples]
        verdicts = self._parts.scorer.collect()
        for sample in samples:
            sample.verdict = verdicts[sample.id]
        self._parts.breaker.record(samples, self._parts.scorer.slowest())
        state.sampled += state.unscored
        if self._config.algorithm.dynamic_sampling.enabled:
            state.groups += [group for group in state.unscored if group.has_signal]
        else:
            state.groups += state.unscored
        state.unscored = []

    def _advantage(self, state: StepState) -> None:
        state.advantages = group_advantages(state.groups, self._config.algorithm)

    def _old_logprob(self, state: StepState) -> None:
        state.old_logprobs = self._logprobs(self._parts.policy.model, state)

    def _ref_logprob(self, state: StepState) -> None:
        assert self._parts.reference is not None, "the graph scores a reference, and none was loaded"
        state.ref_logprobs = self._logprobs(self._parts.reference, state)

    def _logprobs(self, model: PreTrainedModel, state: StepState) -> dict[str, Tensor]:
        return group_logprobs(
            model,
            state.groups,
            temperature=self._config.rollout.sampling.temperature,
            max_tokens=self._config.batch.num_tokens_per_microbatch,
        )

    def _update(self, state: StepState) -> None:
        inputs = update_inputs(state, self._update_settings)
        state.tally = update_policy(self._parts.policy, inputs, self._update_settings, step=state.step)


def update_settings(config: RunConfig, plan: Plan) -> UpdateSettings:
    """What the updates of a run have in common."""
    return UpdateSettings(
        algorithm=config.algorithm,
        counts=plan.batch,
        num_epochs=config.batch.num_epochs_per_step,
        temperature=config.rollout.sampling.temperature,
        max_completion_tokens=config.rollout.max_completion_tokens,
        num_updates=plan.batch.num_updates_per_step * config.train.num_steps,
        seed=config.seed,
    )


def update_inputs(state: StepState, settings: UpdateSettings) -> UpdateInputs:
    """What the updates of a step read, from what its stages wrote."""
    old_logprobs = state.old_logprobs
    if old_logprobs is None and settings.counts.num_updates_per_step > 1:
        old_logprobs = group_rollout_logprobs(state.groups)
    return UpdateInputs(state.groups, state.advantages, old_logprobs, state.ref_logprobs)


def _no_signal_text(state: StepState, config: RunConfig) -> str:
    """How the pass rates of this step's prompts were spread, so that the cause can be seen."""
    size = config.batch.num_samples_per_prompt
    histogram = [0] * (size + 1)
    for group in state.sampled:
        histogram[sum(sample.reward >= 1 for sample in group.samples)] += 1
    rates = ", ".join(f"{solved}/{size}: {count}" for solved, count in enumerate(histogram) if count)
    return (
        f"step {state.step}: {state.num_rounds} rounds gave {len(state.groups)} of the "
        f"{config.batch.num_prompts_per_step} groups whose rewards differ. Prompts by samples solved: {rates}. "
        "Choose tasks that the model solves sometimes, raise batch.num_samples_per_prompt, or set "
        'algorithm.dynamic_sampling.when_exhausted = "skip_step"'
    )
