"""When a run is in trouble without having failed: each alarm with its rule, its likely cause and what to try next.

Torch-free. Rules read the metrics of the last steps and say what they found; none of them stops a run. The reasons for
the limits are in docs/health.md, which repeats `Alarm.when` word for word.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from plait.telemetry.gap import OUTSIDE_SHARE_LIMIT
from plait.telemetry.repetition import REPEATED_SHARE

WINDOW = 5
"""Steps whose mean counts as "now", and first steps whose mean counts as "the start"."""
LONG_WINDOW = 10
"""The same for the reward, whose steps differ more from each other than what is learnt between them."""
STUCK_AFTER = 50
LENGTH_LAG = 20
SPIKE_HISTORY = 20

ENTROPY_FALL, ENTROPY_RISE, ENTROPY_RISE_NATS = 0.1, 3.0, 0.2
LEARNT_ACCURACY = 0.9
LENGTH_GROWTH, LENGTH_FALL = 1.5, 0.5
TRUNCATED_LIMIT, TRUNCATED_RISE = 0.2, 0.1
SIGNAL_LIMIT = 0.1
REPETITION_LIMIT = 0.1
SPIKE_FACTOR = 10.0
REWARD_FALL_STDS = 0.5
FAILED_LIMIT = 0.05
UNREAD_LIMIT = 0.5


class History:
    """The metrics of a run so far, as far as rules look back.

    A mean over more values than there are is NaN. Comparisons with NaN are false, so a rule that knows too little
    finds nothing.
    """

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        """Finite metrics of the newest step."""
        self._first: dict[str, list[float]] = {}
        self._recent: dict[str, deque[float]] = {}
        self._count: dict[str, int] = {}

    def add(self, metrics: Mapping[str, float | None]) -> None:
        """Take in the metrics of one step; values that are not finite (None in a file) are left out."""
        watched = {name: metrics[name] for name in sorted(WATCHED & metrics.keys())}
        self.newest = {name: value for name, value in watched.items() if value is not None and math.isfinite(value)}
        for name, value in self.newest.items():
            self._count[name] = self.count(name) + 1
            if len(first := self._first.setdefault(name, [])) < LONG_WINDOW:
                first.append(value)
            self._recent.setdefault(name, deque(maxlen=STUCK_AFTER)).append(value)

    def count(self, name: str) -> int:
        """Finite values so far."""
        return self._count.get(name, 0)

    def recent(self, name: str, number: int, ago: int = 0) -> list[float]:
        """The last `number` values, `ago` values before the newest; [] where there are not so many."""
        values = list(self._recent.get(name, ()))
        end = len(values) - ago
        return values[end - number : end] if end >= number else []

    def first(self, name: str, number: int) -> list[float]:
        """The first `number` values, [] where there are not so many."""
        values = self._first.get(name, [])
        return values[:number] if len(values) >= number else []

    def now(self, name: str, number: int = WINDOW, ago: int = 0) -> float:
        """Mean of the last `number` values."""
        return _mean(self.recent(name, number, ago))

    def start(self, name: str) -> float:
        """Mean of the first WINDOW values."""
        return _mean(self.first(name, WINDOW))


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


@dataclass(frozen=True, slots=True)
class Alarm:
    """One kind of trouble.

    metrics: what the rule reads; in a step without a finite value of each the alarm stays as it was.
    when: the rule in words. rule: what was found, in words with numbers; None while all is well.
    cause: the likely one. next_step: what to try; "{run}", "{step}" and "{sample}" are filled in.
    """

    name: str
    metrics: tuple[str, ...]
    when: str
    rule: Callable[[History], str | None]
    cause: str
    next_step: str


def _entropy_collapse(history: History) -> str | None:
    now, start, accuracy = history.now("entropy"), history.start("entropy"), history.now("accuracy")
    if now < ENTROPY_FALL * start and accuracy < LEARNT_ACCURACY:
        return f"entropy is {now:.3g} nat, {start:.3g} at the start, at an accuracy of {accuracy:.0%}"
    return None


def _entropy_explosion(history: History) -> str | None:
    now, start = history.now("entropy"), history.start("entropy")
    if now > ENTROPY_RISE * start and now > start + ENTROPY_RISE_NATS:
        return f"entropy is {now:.3g} nat, {start:.3g} at the start"
    return None


def _length(history: History, is_drift: Callable[[float], bool]) -> str | None:
    now, before = (history.now("response_tokens/mean", ago=ago) for ago in (0, LENGTH_LAG))
    reward, reward_before = (history.now("reward/mean", ago=ago) for ago in (0, LENGTH_LAG))
    if before > 0 and is_drift(now / before) and reward <= reward_before:
        return (
            f"mean length went from {before:.0f} to {now:.0f} tokens within {LENGTH_LAG} steps, "
            f"the reward from {reward_before:.3f} to {reward:.3f}"
        )
    return None


def _truncation(history: History) -> str | None:
    now, start = history.now("truncated_share"), history.start("truncated_share")
    if now > TRUNCATED_LIMIT or now > start + TRUNCATED_RISE:
        return f"{now:.0%} of the samples are cut at the limit, {start:.0%} at the start"
    return None


def _no_signal(history: History, is_it: Callable[[float, float, float], bool]) -> str | None:
    signal = history.now("groups/with_signal")
    correct, wrong = history.now("groups/all_correct"), history.now("groups/all_wrong")
    if signal < SIGNAL_LIMIT and is_it(correct, wrong, 1 - signal):
        return f"rewards differ in {signal:.0%} of the groups; {correct:.0%} are all correct, {wrong:.0%} all wrong"
    return None


def _gap(history: History) -> str | None:
    share = history.newest["gap/outside_share"]
    if share <= OUTSIDE_SHARE_LIMIT:
        return None
    # Where a gap is not finite, neither are its mean and its largest.
    mean, largest = (history.newest.get(name, math.nan) for name in ("gap/mean", "gap/max"))
    return (
        f"{share:.1%} of the sampled tokens have log-probabilities that engine and trainer do not agree on within "
        f"the band of the dtype (mean {mean:.2g}, largest {largest:.2g})"
    )


def _repetition(history: History) -> str | None:
    share = history.now("repetition_share")
    return f"{share:.0%} of the samples repeat themselves" if share > REPETITION_LIMIT else None


def _gradient_spike(history: History) -> str | None:
    before = history.recent("grad_norm", SPIKE_HISTORY, ago=1) or history.recent("grad_norm", WINDOW, ago=1)
    usual, now = float(np.median(before)) if before else math.nan, history.newest["grad_norm"]
    if now > SPIKE_FACTOR * usual > 0:
        return f"grad_norm is {now:.3g}, its median over the {len(before)} updates before {usual:.3g}"
    return None


def _nonfinite(history: History) -> str | None:
    number = history.newest["updates_skipped_nonfinite"]
    return f"updates not applied because their gradient is not finite: {number:.0f}" if number > 0 else None


def _nonfinite_logprobs(history: History) -> str | None:
    share = history.newest["nonfinite_logprob_share"]
    return f"{share:.0%} of the tokens were sampled from values that are not finite" if share > 0 else None


def _reward_fall(history: History) -> str | None:
    values = history.recent("reward/mean", min(history.count("reward/mean"), STUCK_AFTER))
    if len(values) < 2 * WINDOW:
        return None
    means = np.convolve(values, np.ones(WINDOW) / WINDOW, mode="valid")
    best, now, spread = float(means.max()), float(means[-1]), history.now("reward/std")
    if spread > 0 and now < best - REWARD_FALL_STDS * spread:
        return f"the mean reward is {now:.3f}, and was {best:.3f} within the last {len(values)} steps"
    return None


def _reward_stuck(history: History) -> str | None:
    if history.count("reward/mean") < STUCK_AFTER:
        return None
    first, last = history.first("reward/mean", LONG_WINDOW), history.recent("reward/mean", LONG_WINDOW)
    gain = _mean(last) - _mean(first)
    error = math.sqrt((np.var(first, ddof=1) + np.var(last, ddof=1)) / LONG_WINDOW)
    if gain <= 2 * error and history.now("accuracy", LONG_WINDOW) < LEARNT_ACCURACY:
        return (
            f"the mean reward of the last {LONG_WINDOW} steps is {_mean(last):.3f}, that of the first {LONG_WINDOW} "
            f"{_mean(first):.3f}: a gain of {gain:+.3f} with a standard error of {error:.3f}"
        )
    return None


def _share_above(history: History, name: str, limit: float, what: str) -> str | None:
    share = history.now(name)
    return f"{share:.0%} of the samples {what}" if share > limit else None


_NOW = f"mean of {WINDOW} steps"
_SIGNAL = ("groups/with_signal", "groups/all_correct", "groups/all_wrong")
_LENGTH = ("response_tokens/mean", "reward/mean")
_UNREAD = "have no answer that the verifier could read"

ALARMS: tuple[Alarm, ...] = (
    Alarm(
        "entropy_collapse",
        ("entropy", "accuracy"),
        f"entropy ({_NOW}) below {ENTROPY_FALL:g} x that of the first {WINDOW}, accuracy below {LEARNT_ACCURACY:g}",
        _entropy_collapse,
        "the policy has become sure before it was right, and finds nothing new any more",
        "raise algorithm.clip_high (0.28 beside clip_low 0.2), lower optimizer.learning_rate, or set a small "
        "algorithm.entropy_coefficient; sampling.temperature should be 1",
    ),
    Alarm(
        "entropy_explosion",
        ("entropy",),
        f"entropy ({_NOW}) above {ENTROPY_RISE:g} x that of the first {WINDOW}, and {ENTROPY_RISE_NATS:g} nat above it",
        _entropy_explosion,
        "updates spread probability over tokens that mean nothing: too high a rate, too strong an entropy bonus, or "
        "rewards that do not depend on the text",
        "read samples.jsonl of this step; lower optimizer.learning_rate or algorithm.entropy_coefficient; look at "
        "gap/outside_share",
    ),
    Alarm(
        "length_growth",
        _LENGTH,
        f"mean length ({_NOW}) above {LENGTH_GROWTH:g} x that {LENGTH_LAG} steps before, and the reward no higher",
        lambda history: _length(history, lambda ratio: ratio > LENGTH_GROWTH),
        "completions grow without being worth more: they pad or loop, or the reduction spares long wrong ones "
        '("seq-mean-token-mean" divides by each length)',
        "compare repetition_share and truncated_share, read the longest samples in samples.jsonl; set "
        'algorithm.reduction to "token-mean" or "seq-mean-token-sum-norm"',
    ),
    Alarm(
        "length_fall",
        _LENGTH,
        f"mean length ({_NOW}) below {LENGTH_FALL:g} x that {LENGTH_LAG} steps before, and the reward no higher",
        lambda history: _length(history, lambda ratio: ratio < LENGTH_FALL),
        "reasoning is dropped (see reasoning_share): short guesses are paid as well as worked answers, or the policy "
        "ends too early",
        "read the shortest samples in samples.jsonl; take pay for form alone out of the verifier; lower "
        "optimizer.learning_rate",
    ),
    Alarm(
        "truncation",
        ("truncated_share",),
        f"truncated_share ({_NOW}) above {TRUNCATED_LIMIT:g}, or {TRUNCATED_RISE:g} above that of the first {WINDOW}",
        _truncation,
        "the limit of completion tokens is too low, or the policy rambles; what is cut is mostly wrong",
        "compare accuracy with repetition_share: where few samples repeat, raise rollout.max_completion_tokens; where "
        "many do, see the alarm for repetition",
    ),
    Alarm(
        "tasks_too_hard",
        _SIGNAL,
        f"groups/with_signal ({_NOW}) below {SIGNAL_LIMIT:g}, most of the others all wrong",
        lambda history: _no_signal(history, lambda correct, wrong, rest: wrong > rest / 2),
        "the tasks are too hard, or the verifier does not recognise right answers: hardly any sample teaches anything",
        "read verdicts with `plait sample {run}`; choose easier tasks, raise batch.num_samples_per_prompt, or set "
        "algorithm.dynamic_sampling.enabled",
    ),
    Alarm(
        "tasks_too_easy",
        _SIGNAL,
        f"groups/with_signal ({_NOW}) below {SIGNAL_LIMIT:g}, most of the others all correct",
        lambda history: _no_signal(history, lambda correct, wrong, rest: correct > rest / 2),
        "the tasks are learnt, or were never hard: hardly any sample teaches anything",
        "stop here, or start again from {run}/model with harder tasks",
    ),
    Alarm(
        "equal_rewards",
        _SIGNAL,
        f"groups/with_signal ({_NOW}) below {SIGNAL_LIMIT:g}, neither most of the others all wrong nor all correct",
        lambda history: _no_signal(history, lambda correct, wrong, rest: max(correct, wrong) <= rest / 2),
        "the samples of a group get equal rewards for another reason: their texts are equal (duplicates_share), the "
        "verifier has no opinion or fails (groups/excluded), the reward is constant, or easy and hard tasks are mixed",
        "look at duplicates_share, groups/excluded and the rewards in samples.jsonl; sampling.temperature should be "
        "near 1",
    ),
    Alarm(
        "gap",
        ("gap/outside_share",),
        f"gap/outside_share of one step above {OUTSIDE_SHARE_LIMIT:g}",
        _gap,
        "the engine holds other weights, or the two attend, place positions or scale by temperature differently",
        "see which by `plait replay {run} --sample '{sample}'`; docs/gap.md explains it. In bfloat16, compare with "
        "model.compute_dtype float32, whose rounding is a thousand times finer",
    ),
    Alarm(
        "repetition",
        ("repetition_share",),
        f"repetition_share ({_NOW}) above {REPETITION_LIMIT:g} (more than {REPEATED_SHARE:g} of a sample's 8-grams)",
        _repetition,
        "the policy loops: it does not know how to end, or repeating is rewarded (a length or format reward)",
        "read samples.jsonl; check that the end token ends the model's turn (rollout.stop_tokens), lower "
        "optimizer.learning_rate, set algorithm.kl_coefficient, or take pay for length out of the verifier",
    ),
    Alarm(
        "gradient_spike",
        ("grad_norm",),
        f"grad_norm above {SPIKE_FACTOR:g} x its median over the {SPIKE_HISTORY} updates before (at least {WINDOW})",
        _gradient_spike,
        "few samples pull with most of the weight: an outlying reward, an unlikely token, or weights that became "
        "unstable. What was applied was cut to optimizer.max_grad_norm",
        "see which samples by `plait replay {run} --batch {step} --rerun`; if it comes again, lower "
        "optimizer.learning_rate or optimizer.max_grad_norm",
    ),
    Alarm(
        "nonfinite_update",
        ("updates_skipped_nonfinite",),
        "updates_skipped_nonfinite of one step above 0",
        _nonfinite,
        "a value overflowed or was not a number, in the scores, the weights or on the way back",
        "the batch is kept: `plait replay {run} --batch {step}` says where it begins",
    ),
    Alarm(
        "nonfinite_logprobs",
        ("nonfinite_logprob_share",),
        "nonfinite_logprob_share of one step above 0",
        _nonfinite_logprobs,
        "the weights hold values that are not finite, or a layer overflows: samples are noise, and equal noise makes "
        "no update",
        "if the first step shows it, the model in model.path is damaged or needs model.compute_dtype float32; "
        "otherwise start again with a lower optimizer.learning_rate",
    ),
    Alarm(
        "reward_fall",
        ("reward/mean", "reward/std"),
        f"mean reward ({_NOW}) more than {REWARD_FALL_STDS:g} x reward/std below its best within {STUCK_AFTER} steps",
        _reward_fall,
        "the policy has lost what it had learnt: an update too large, a gap between engine and trainer, or other tasks",
        "look at what else was raised, and at grad_norm, entropy and gap/outside_share just before; start again with a "
        "lower optimizer.learning_rate. The best checkpoint by evaluation is kept (checkpoints/best.json)",
    ),
    Alarm(
        "reward_stuck",
        ("reward/mean", "accuracy"),
        f"from step {STUCK_AFTER} on: mean reward of the last {LONG_WINDOW} steps within 2 standard errors of that of "
        f"the first {LONG_WINDOW} or below, accuracy below {LEARNT_ACCURACY:g}",
        _reward_stuck,
        "too low a learning rate, rewards that do not depend on the text, or answers that the verifier does not read",
        "look at groups/with_signal, verdict/no_answer and samples.jsonl; then raise optimizer.learning_rate "
        "threefold, or the samples per step",
    ),
    Alarm(
        "verifier_failures",
        ("verdict/failed",),
        f"verdict/failed ({_NOW}) above {FAILED_LIMIT:g}",
        lambda history: _share_above(history, "verdict/failed", FAILED_LIMIT, "could not be judged"),
        "the verifier raises, runs out of time or memory, or returns something else than a number; those samples teach "
        "nothing",
        "samples.jsonl has every failed sample with the reason; correct the verifier, or raise verifiers.timeout_s or "
        "verifiers.memory_bytes",
    ),
    Alarm(
        "unread_answers",
        ("verdict/no_answer",),
        f"verdict/no_answer ({_NOW}) above {UNREAD_LIMIT:g}",
        lambda history: _share_above(history, "verdict/no_answer", UNREAD_LIMIT, _UNREAD),
        "the model does not write answers in the form that the verifier reads",
        "compare both with `plait sample {run}`; say the form in the prompt, or warm up with `plait sft`",
    ),
)

WATCHED: frozenset[str] = frozenset(name for alarm in ALARMS for name in alarm.metrics) | {"gap/mean", "gap/max"}
"""Every metric that a rule reads."""
