"""Losses on pairs of answers: what they need, and which settings nothing would read under them."""

from collections.abc import Iterator

from plait.algorithm_config import AlgorithmConfig
from plait.config import BatchConfig, ControlConfig, RewardModelConfig, RolloutConfig, RowsTask, TaskConfig
from plait.data.naming import task_name
from plait.errors import Violation

_UNREAD = (
    *("returns", "baseline", "scale", "std_correction", "eps", "whitening", "policy_loss", "reduction"),
    *("clip_low", "clip_high", "dual_clip", "behaviour_cap", "kl_estimator", "kl_in", "adaptive_kl", "correction"),
)
"""Factors of advantages and of losses per token."""

_OF_ROLLOUTS = ("shaping", "filters", "dynamic_sampling")


def no_advantages(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """What a loss on pairs has no place for, whoever set it."""
    if not algorithm.has_pairs:
        return
    loss = f'algorithm.pairwise_loss "{algorithm.pairwise_loss}"'
    if algorithm.has_critic:
        yield Violation(
            "algorithm.critic.kind",
            f'{loss} compares two whole answers, and a critic (kind "{algorithm.critic.kind}") predicts the return '
            "from each token on: nothing would read it",
            'Set it to "none", or algorithm.pairwise_loss = "none"',
        )
    if algorithm.has_kl:
        yield Violation(
            "algorithm.kl_coefficient",
            f"{loss} has its own tie to the reference, and a KL of weight {algorithm.kl_coefficient:g} would not be "
            "taken",
            "Set it to 0; algorithm.pairwise.beta is the strength of the tie",
        )
    if algorithm.entropy_coefficient > 0:
        yield Violation(
            "algorithm.entropy_coefficient",
            f"{loss} is of whole answers, and an entropy per token of weight {algorithm.entropy_coefficient:g} would "
            "not be taken",
            "Set it to 0",
        )
    for name in _UNREAD:
        if name in algorithm.model_fields_set:
            yield Violation(
                f"algorithm.{name}",
                f"it changes nothing while {loss} takes the place of advantages and of losses per token",
                f'Take it out (--set algorithm.{name}=null), or set pairwise_loss to "none"',
            )


def unread(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """Constants of a loss that is not chosen."""
    readers: dict[str, tuple[str, ...]] = {"origin": ("dpo", "ipo", "simpo"), "beta": ("dpo", "ipo", "simpo")}
    readers |= {"label_smoothing": ("dpo",), "margin": ("simpo",)}
    for name, losses in readers.items():
        if name in algorithm.pairwise.model_fields_set and algorithm.pairwise_loss not in losses:
            yield Violation(
                f"algorithm.pairwise.{name}",
                f'it changes nothing while algorithm.pairwise_loss is "{algorithm.pairwise_loss}"',
                f'Take it out, or set pairwise_loss to "{losses[0]}"',
            )


def pairs_fit(
    algorithm: AlgorithmConfig, batch: BatchConfig, rollout: RolloutConfig | None = None
) -> Iterator[Violation]:
    """Two answers to a prompt at least, in one microbatch."""
    if not algorithm.has_pairs:
        return
    group = batch.num_samples_per_prompt
    if algorithm.samples_answers and group < 2:
        yield Violation(
            "batch.num_samples_per_prompt",
            f"a pair is the best and the worst of a prompt's samples, and there is {group}",
            "Set it to 2 or more (8 is usual)",
        )
    if not algorithm.samples_answers and group != 2:
        yield Violation(
            "batch.num_samples_per_prompt",
            f"a row of preferences has two answers, chosen and rejected, and {group} are asked for",
            "Set it to 2",
        )
    if rollout is None:
        return
    longest = 2 * (rollout.max_prompt_tokens + rollout.max_completion_tokens)
    if batch.num_tokens_per_microbatch < longest:
        yield Violation(
            "batch.num_tokens_per_microbatch",
            f"the longest pair (2 x (rollout.max_prompt_tokens {rollout.max_prompt_tokens} + "
            f"rollout.max_completion_tokens {rollout.max_completion_tokens}) = {longest} tokens) does not fit into a "
            f"microbatch of {batch.num_tokens_per_microbatch} tokens, and its loss is of both answers",
            f"Set it to {longest} or more, or lower the limits of the rollout",
        )


def rows_of_pairs(algorithm: AlgorithmConfig, tasks: tuple[TaskConfig, ...]) -> Iterator[Violation]:
    """Preferences are read by what trains on them, and by nothing else."""
    for index, task in enumerate(tasks):
        has_preferences = isinstance(task, RowsTask) and task.source == "preferences"
        if has_preferences and algorithm.samples_answers:
            yield Violation(
                f"tasks.{index}.source",
                f'the chosen and rejected answers of "{task_name(task)}" would not be read: algorithm.name '
                f'"{algorithm.name}" trains on its own samples',
                'Set it to "rows", or algorithm.name = "dpo"',
            )
        if not has_preferences and not algorithm.samples_answers:
            yield Violation(
                f"tasks.{index}.source",
                f'"{task.source}" gives prompts, and algorithm.pairwise.origin "rows" trains on pairs of answers that '
                "come with them",
                'Give a file with source = "preferences", or set algorithm.name = "iterative_dpo"',
            )


def nothing_is_sampled(
    algorithm: AlgorithmConfig,
    control: ControlConfig | None = None,
    reward_models: tuple[RewardModelConfig, ...] = (),
) -> Iterator[Violation]:
    """Settings about samples and their rewards, where the pairs come from rows."""
    if algorithm.samples_answers:
        return
    rule = 'it changes nothing while algorithm.pairwise.origin is "rows": nothing is sampled and nothing rewarded'
    remedy = 'Take it out, or set algorithm.pairwise.origin = "rollouts"'
    for name in _OF_ROLLOUTS:
        if name in algorithm.model_fields_set:
            yield Violation(f"algorithm.{name}", rule, remedy)
    if control is not None and control.rewards != "verifier":
        yield Violation("control.rewards", rule, remedy)
    if reward_models:
        yield Violation("reward_models", rule, remedy)


def beta_of_another_loss(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    """SimPO's beta has another size than DPO's: it multiplies a mean over tokens and not a sum."""
    if algorithm.pairwise_loss == "simpo" and algorithm.pairwise.beta < 1:
        yield Violation(
            "algorithm.pairwise.beta",
            f"{algorithm.pairwise.beta:g} is small for simpo, whose rewards are means over tokens",
            "Set it to 2 or more, with a margin of about half of it",
        )
