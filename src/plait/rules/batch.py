"""How many prompts, samples, sequences and tokens go together."""

from collections.abc import Iterator

from plait.config import AlgorithmConfig, BatchConfig, RolloutConfig, RunConfig, SftTrainConfig, TrainConfig
from plait.errors import Violation
from plait.plan import BatchCounts

_TRIAL_LIMIT = 1_000_000
"""Largest trial divisor; beyond it a suggestion may be left out, never a rule."""


def is_group_relative(algorithm: AlgorithmConfig) -> bool:
    """Whether what a sample teaches depends on its siblings."""
    if algorithm.has_pairs:
        return True
    baselines, scales = ("group_mean", "leave_one_out", "length_weighted"), ("group_std", "leave_one_out_std")
    return algorithm.baseline in baselines or algorithm.scale in scales


def counts(batch: BatchConfig) -> BatchCounts:
    """The counts of a step, also where other sections are not valid."""
    return BatchCounts.from_config(RunConfig.model_construct(batch=batch))


def divisors(number: int) -> list[int]:
    """All divisors in rising order (those up to the trial limit, and their partners)."""
    small = []
    trial = 1
    while trial * trial <= number and trial <= _TRIAL_LIMIT:
        if number % trial == 0:
            small.append(trial)
        trial += 1
    return sorted({*small, *(number // d for d in small)})


def nearest(values: list[int], target: int, each_side: int = 2) -> list[int]:
    """The values next below and next above the target, in rising order."""
    below = [v for v in values if v < target][-each_side:]
    return below + [v for v in values if v > target][:each_side]


def _or(texts: list[str]) -> str:
    return " or ".join(", ".join(texts).rsplit(", ", 1))


def group_size(algorithm: AlgorithmConfig, batch: BatchConfig) -> Iterator[Violation]:
    if algorithm.has_pairs:
        return  # see plait.rules.pairwise
    if is_group_relative(algorithm) and batch.num_samples_per_prompt < 2:
        yield Violation(
            "batch.num_samples_per_prompt",
            f"a group-relative advantage (algorithm.baseline {algorithm.baseline}, algorithm.scale "
            f"{algorithm.scale}) needs at least 2 samples per prompt, got {batch.num_samples_per_prompt}",
            'Set it to 2 or more (8 is usual), or algorithm.baseline = "none" and algorithm.scale = "none"',
        )


def _has_group_error(algorithm: AlgorithmConfig | None, batch: BatchConfig) -> bool:
    if algorithm is None:
        # Whether one sample per prompt is an error is not known then; a second message would only confuse.
        return batch.num_samples_per_prompt < 2
    return any(True for _ in group_size(algorithm, batch))


def _valid_minibatches(batch: BatchConfig) -> list[int]:
    """Samples per update that keep groups whole and divide the step."""
    return [batch.num_samples_per_prompt * d for d in divisors(batch.num_prompts_per_step)]


def _minibatch_suggestion(batch: BatchConfig) -> str:
    group = batch.num_samples_per_prompt
    values = nearest(_valid_minibatches(batch), batch.num_sequences_per_minibatch)
    shown = [f"{v} ({v // group} prompt{'s' if v > group else ''})" for v in values]
    return f"batch.num_sequences_per_minibatch to {_or(shown)}"


def minibatch_keeps_groups_whole(batch: BatchConfig, algorithm: AlgorithmConfig | None = None) -> Iterator[Violation]:
    minibatch, group = batch.num_sequences_per_minibatch, batch.num_samples_per_prompt
    if minibatch % group == 0 or minibatch > _samples(batch) or _has_group_error(algorithm, batch):
        return
    least = 2 if algorithm is None or is_group_relative(algorithm) else 1
    groups = [d for d in divisors(minibatch) if d >= least and batch.num_prompts_per_step * d % minibatch == 0]
    change = f"Set {_minibatch_suggestion(batch)}"
    if groups := nearest(groups, group):
        change += f", or batch.num_samples_per_prompt to {_or([str(g) for g in groups])}"
    yield Violation(
        "batch.num_sequences_per_minibatch",
        f"samples per update ({minibatch}) must be a multiple of batch.num_samples_per_prompt ({group})",
        change,
    )


def minibatch_divides_step(batch: BatchConfig, algorithm: AlgorithmConfig | None = None) -> Iterator[Violation]:
    minibatch, group = batch.num_sequences_per_minibatch, batch.num_samples_per_prompt
    samples = _samples(batch)
    is_other_rule = minibatch == 0 or minibatch % group or minibatch > samples or _has_group_error(algorithm, batch)
    if is_other_rule or samples % minibatch == 0:
        return
    prompts = minibatch // group
    lower = batch.num_prompts_per_step // prompts * prompts
    steps = [str(p) for p in (lower, lower + prompts) if p > 0]
    yield Violation(
        "batch.num_sequences_per_minibatch",
        f"samples per update ({minibatch}) must divide the samples of a step "
        f"({batch.num_prompts_per_step} prompts x {group} samples = {samples}); "
        f"{samples % minibatch} samples would be left over",
        f"Set {_minibatch_suggestion(batch)}, or batch.num_prompts_per_step to {_or(steps)}",
    )


def _samples(batch: BatchConfig) -> int:
    return batch.num_prompts_per_step * batch.num_samples_per_prompt


def minibatch_fits(batch: BatchConfig, train: TrainConfig | None = None) -> Iterator[Violation]:
    """An update takes its samples from one step; with too few in the whole run none would ever happen."""
    prompts, group, minibatch = (
        batch.num_prompts_per_step,
        batch.num_samples_per_prompt,
        batch.num_sequences_per_minibatch,
    )
    samples = _samples(batch)
    if minibatch <= samples:
        return
    needed = -(-minibatch // group)
    change = (
        f"Set batch.num_sequences_per_minibatch to {samples} or 0 (the whole step in one update), "
        f"or batch.num_prompts_per_step to {needed} ({needed * group} samples) or more"
    )
    if train is not None and train.num_steps * samples < minibatch:
        rule = (
            f"{train.num_steps} * {prompts} * {group} = {train.num_steps * samples} samples in the whole run "
            f"(train.num_steps {train.num_steps}, batch.num_prompts_per_step {prompts}, "
            f"batch.num_samples_per_prompt {group}) are fewer than one update of {minibatch} "
            f"(batch.num_sequences_per_minibatch), so 0 updates would run"
        )
    else:
        rule = (
            f"one update of {minibatch} samples is more than the {prompts} * {group} = {samples} samples "
            "of a step, and an update never spans steps, so 0 updates would run"
        )
    yield Violation("batch.num_sequences_per_minibatch", rule, change)


def batch_std_needs_two(algorithm: AlgorithmConfig, batch: BatchConfig) -> Iterator[Violation]:
    if algorithm.scale == "batch_std" and not is_group_relative(algorithm) and _samples(batch) < 2:
        yield Violation(
            "batch.num_prompts_per_step",
            'algorithm.scale "batch_std" needs at least 2 samples per step, got 1',
            'Set batch.num_prompts_per_step to 2 or more, or algorithm.scale = "none"',
        )


def microbatch_holds_longest(
    batch: BatchConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig | None = None
) -> Iterator[Violation]:
    longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
    if algorithm is not None and algorithm.has_pairs:
        return  # see plait.rules.pairwise
    if batch.num_tokens_per_microbatch < longest:
        yield Violation(
            "batch.num_tokens_per_microbatch",
            f"the longest sequence (rollout.max_prompt_tokens {rollout.max_prompt_tokens} + "
            f"rollout.max_completion_tokens {rollout.max_completion_tokens} = {longest} tokens) does not fit "
            f"into a microbatch of {batch.num_tokens_per_microbatch} tokens",
            f"Set it to {longest} or more, or lower the limits of the rollout",
        )


def sft_microbatch_holds_longest(train: SftTrainConfig, max_sequence_tokens: int) -> Iterator[Violation]:
    if train.num_tokens_per_microbatch < max_sequence_tokens:
        yield Violation(
            "train.num_tokens_per_microbatch",
            f"the longest sequence (max_sequence_tokens {max_sequence_tokens}) does not fit into a "
            f"microbatch of {train.num_tokens_per_microbatch} tokens",
            f"Set it to {max_sequence_tokens} or more, or lower max_sequence_tokens",
        )
