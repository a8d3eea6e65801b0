"""One process, one pool: pieces run when a schedule waits for them."""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plait.algorithms.kl import adapted_coefficient
from plait.batch import Group, Sample
from plait.config import RunConfig, SamplingConfig
from plait.data.stream import EncodedPrompt, PromptStream
from plait.errors import NoSignalError
from plait.executor.protocol import Piece
from plait.executor.step_state import StepState
from plait.executor.workers import Workers, update_settings
from plait.models.load import Tokenizer
from plait.plan import Plan
from plait.rewards.breaker import CircuitBreaker
from plait.rewards.scoring import Scoring
from plait.stages.advantage import step_advantages
from plait.stages.generate import generate
from plait.stages.graph import StepGraph
from plait.stages.logprob import group_rollout_logprobs
from plait.stages.pair import best_and_worst, given_pair
from plait.stages.reward import combine, shape
from plait.stages.update import UpdateInputs, UpdateSettings
from plait.telemetry.trace import Trace


@dataclass(frozen=True, slots=True)
class Parts:
    """The models' workers and the services of a run, assembled by the job that starts it."""

    workers: Workers
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
        self.kl_coefficient = config.algorithm.kl_coefficient
        """All that the executor carries from step to step: adaptive KL changes it. Saved in checkpoints."""
        self._state = StepState(0, parts.workers.version)
        self._update_settings = update_settings(config, plan)
        self._run: dict[str, Callable[[StepState], None]] = {
            "generate": self._generate,
            "score_verifier": self._score_verifier,
            "score_reward": self._score_reward,
            "value": self._value,
            "advantage": self._advantage,
            "pair": self._pair,
            "old_logprob": self._old_logprob,
            "ref_logprob": self._ref_logprob,
            "update_policy": self._update_policy,
            "update_critic": self._update_critic,
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
        self._state = StepState(
            step, self._parts.workers.version, kl_coefficient=self.kl_coefficient, started_s=time.perf_counter()
        )
        if not self._config.algorithm.samples_answers:
            drawn = self._parts.stream.draw(self._config.batch.num_prompts_per_step)
            self._state.groups = [given_pair(encoded, step - 1) for encoded in drawn]
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
        """Groups that lack their greedy completion, or under dynamic sampling the groups that lack signal.

        When the rounds of dynamic sampling run out, the recipe's policy decides.
        """
        state, settings = self._state, self._config.algorithm.dynamic_sampling
        if self._config.algorithm.baseline == "greedy":
            return sum(group.greedy is None for group in state.groups)
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
            self._parts.workers.sync_weights(version)

    def end_step(self, step: int) -> None:
        self._adapt_kl_coefficient(self._state)
        self._on_step_end(self._state)

    def _generate(self, state: StepState) -> None:
        batch, sampling = self._config.batch, self._config.rollout.sampling
        missing = batch.num_prompts_per_step - len(state.groups)
        if missing:
            prompts = self._parts.stream.draw(missing)
            state.unscored = self._sampled(prompts, sampling, "train", batch.num_samples_per_prompt)
        else:
            # All prompts have their samples: the second round of baseline "greedy".
            greedy = self._sampled([_encoded(group) for group in state.groups], _GREEDY, "greedy", 1)
            for group, made in zip(state.groups, greedy, strict=True):
                group.greedy = made.samples[0]
            state.unscored = []
        state.num_rounds += 1

    def _sampled(
        self, prompts: Sequence[EncodedPrompt], sampling: SamplingConfig, purpose: str, num_samples: int
    ) -> list[Group]:
        return generate(
            self._parts.workers,
            self._parts.tokenizer,
            prompts,
            num_samples=num_samples,
            max_completion_tokens=self._config.rollout.max_completion_tokens,
            sampling=sampling,
            seed_key=(self._config.seed, purpose),
            # Scored beside generation: the verifiers' workers begin with a sample when it is finished.
            on_sample=lambda sample: self._parts.scorer.submit([sample]),
        )

    def _score_verifier(self, state: StepState) -> None:
        samples = _unscored(state)
        verdicts = self._parts.scorer.collect()
        for sample in samples:
            sample.verdict = verdicts[sample.id]
        self._parts.breaker.record(samples, self._parts.scorer.slowest())
        if "score_reward" not in self.graph:
            self._reward(state)

    def _score_reward(self, state: StepState) -> None:
        samples = _unscored(state)
        for name, scores in self._parts.workers.reward_scores(samples).items():
            for sample, score in zip(samples, scores, strict=True):
                sample.reward_scores[name] = score
        weights = {one.label: one.weight for one in self._config.reward_models}
        combine(samples, weights, self._config.verifiers.weight)
        self._reward(state)

    def _reward(self, state: StepState) -> None:
        """Every score of this round is there: make rewards of them, and keep the groups that the step trains on."""
        # A round of greedy completions has no groups of its own; they belong to those of the first.
        shape(
            state.unscored or state.groups,
            self._config.algorithm.shaping,
            max_completion_tokens=self._config.rollout.max_completion_tokens,
        )
        state.sampled += state.unscored
        if self._config.algorithm.dynamic_sampling.enabled:
            state.groups += [group for group in state.unscored if group.has_signal]
        else:
            state.groups += state.unscored
        state.unscored = []

    def _value(self, state: StepState) -> None:
        state.values, logprobs = self._parts.workers.values(state.groups)
        state.old_logprobs = logprobs or state.old_logprobs

    def _advantage(self, state: StepState) -> None:
        algorithm = self._config.algorithm
        penalised = algorithm.kl_in == "reward" and state.ref_logprobs is not None
        state.advantages = step_advantages(
            state.groups,
            algorithm,
            old_logprobs=(state.old_logprobs or group_rollout_logprobs(state.groups)) if penalised else None,
            ref_logprobs=state.ref_logprobs if penalised else None,
            values=state.values,
            kl_coefficient=state.kl_coefficient,
        )

    def _pair(self, state: StepState) -> None:
        state.groups = best_and_worst(state.groups, self._config.algorithm)

    def _old_logprob(self, state: StepState) -> None:
        state.old_logprobs = self._parts.workers.old_logprobs(state.groups)

    def _ref_logprob(self, state: StepState) -> None:
        state.ref_logprobs = self._parts.workers.ref_logprobs(state.groups)

    def _update_policy(self, state: StepState) -> None:
        inputs = update_inputs(state, self._update_settings)
        state.tally = self._parts.workers.update_policy(inputs, step=state.step)

    def _update_critic(self, state: StepState) -> None:
        inputs = update_inputs(state, self._update_settings)
        state.critic_tally = self._parts.workers.update_critic(inputs, step=state.step)

    def _adapt_kl_coefficient(self, state: StepState) -> None:
        """Towards the target KL per sample, as measured in this step."""
        settings = self._config.algorithm.adaptive_kl
        kl = kl_per_sample(state)
        if settings.target is None or kl is None:
            return
        num_samples = sum(len(group.samples) for group in state.groups)
        gain = num_samples / settings.horizon
        self.kl_coefficient = adapted_coefficient(self.kl_coefficient, kl, target=settings.target, gain=gain)


_GREEDY = SamplingConfig(temperature=0.0)


def kl_per_sample(state: StepState) -> float | None:
    """KL to the reference summed over the tokens of a sample, mean over the step's; None where it was not measured."""
    if state.advantages is not None and state.advantages.kl_per_sample is not None:
        return state.advantages.kl_per_sample
    if state.tally is None or state.ref_logprobs is None or state.tally.num_trained_samples == 0:
        return None
    return state.tally.kl_sum / state.tally.num_trained_samples


def _encoded(group: Group) -> EncodedPrompt:
    return EncodedPrompt(group.prompt, group.samples[0].prompt_ids)


def _unscored(state: StepState) -> list[Sample]:
    """Samples of this round: of new groups, or else the greedy ones of all groups."""
    if state.unscored:
        return [sample for group in state.unscored for sample in group.samples]
    return [group.greedy for group in state.groups if group.greedy is not None]


def update_inputs(state: StepState, settings: UpdateSettings) -> UpdateInputs:
    """What the updates of a step read, from what its stages wrote."""
    if settings.algorithm.has_pairs:
        return UpdateInputs(state.groups, {}, None, state.ref_logprobs)
    assert state.advantages is not None, "no advantages were taken"
    old_logprobs = state.old_logprobs
    if old_logprobs is None and settings.counts.num_updates_per_step > 1:
        old_logprobs = group_rollout_logprobs(state.groups)
    return UpdateInputs(
        state.groups,
        state.advantages.advantages,
        old_logprobs,
        state.ref_logprobs if settings.algorithm.kl_in == "loss" else None,
        state.advantages.returns,
        {} if state.values is None else state.values.at_tokens,
        state.kl_coefficient,
    )


def _no_signal_text(state: StepState, config: RunConfig) -> str:
    """How the pass rates of this step's prompts were spread, so that the cause can be seen."""
    size = config.batch.num_samples_per_prompt
    histogram = [0] * (size + 1)
    for group in state.sampled:
        histogram[sum(sample.score >= 1 for sample in group.samples)] += 1
    rates = ", ".join(f"{solved}/{size}: {count}" for solved, count in enumerate(histogram) if count)
    return (
        f"step {state.step}: {state.num_rounds} rounds gave {len(state.groups)} of the "
        f"{config.batch.num_prompts_per_step} groups whose rewards differ. Prompts by samples solved: {rates}. "
        "Choose tasks that the model solves sometimes, raise batch.num_samples_per_prompt, or set "
        'algorithm.dynamic_sampling.when_exhausted = "skip_step"'
    )
