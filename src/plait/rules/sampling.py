"""How tokens are sampled, and which groups a step keeps."""

from collections.abc import Iterator

from plait.config import AlgorithmConfig, BatchConfig, ControlConfig, EvaluationConfig, RolloutConfig
from plait.errors import Violation
from plait.rules.batch import is_group_relative


def training_temperature(rollout: RolloutConfig) -> Iterator[Violation]:
    if rollout.sampling.temperature == 0:
        yield Violation(
            "rollout.sampling.temperature",
            "a training temperature of 0 has no sampling distribution, got 0",
            "Set it above 0 (1.0 is usual); evaluation.sampling.temperature may be 0",
        )


def training_distribution(rollout: RolloutConfig) -> Iterator[Violation]:
    """A truncated distribution is not the one whose log-probabilities the update uses."""
    sampling = rollout.sampling
    for name, value, is_on, off in (
        ("top_p", sampling.top_p, sampling.top_p < 1, "1.0"),
        ("top_k", sampling.top_k, sampling.top_k > 0, "0"),
        ("min_p", sampling.min_p, sampling.min_p > 0, "0.0"),
    ):
        if is_on:
            yield Violation(
                f"rollout.sampling.{name}",
                f"training samples from a truncated distribution ({name} {value}), which is not the one "
                "that is trained: the probabilities of the tokens that are kept are renormalised",
                f"Set it to {off}; evaluation.sampling.{name} may be set",
            )


def stop_tokens(rollout: RolloutConfig) -> Iterator[Violation]:
    for index, token in enumerate(rollout.stop_tokens):
        if not token or token in rollout.stop_tokens[:index]:
            rule = "a stop token is empty" if not token else f'"{token}" is named twice'
            yield Violation(f"rollout.stop_tokens.{index}", rule, "Take it out")


def dynamic_needs_groups(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if algorithm.dynamic_sampling.enabled and not is_group_relative(algorithm):
        yield Violation(
            "algorithm.dynamic_sampling.enabled",
            "dynamic sampling drops groups whose rewards are all equal, and without a group-relative "
            f"advantage (algorithm.baseline {algorithm.baseline}, algorithm.scale {algorithm.scale}) these "
            "do carry signal",
            'Set it to false, or algorithm.baseline = "group_mean"',
        )


def dynamic_needs_signal(algorithm: AlgorithmConfig, control: ControlConfig) -> Iterator[Violation]:
    if algorithm.dynamic_sampling.enabled and control.rewards == "constant":
        yield Violation(
            "algorithm.dynamic_sampling.enabled",
            'with control.rewards "constant" all rewards of a group are equal, so no step can ever be filled',
            'Set it to false, or control.rewards to "random" or "verifier"',
        )


def greedy_baseline_of_chance(algorithm: AlgorithmConfig, control: ControlConfig) -> Iterator[Violation]:
    if algorithm.baseline == "greedy" and control.rewards != "verifier":
        yield Violation(
            "algorithm.baseline",
            f'with control.rewards "{control.rewards}" the reward of the greedy completion says nothing either, '
            "so the baseline takes no variance away",
            'For a control use "group_mean" or "none"',
        )


def dynamic_cannot_fill(algorithm: AlgorithmConfig, batch: BatchConfig) -> Iterator[Violation]:
    dynamic, prompts = algorithm.dynamic_sampling, batch.num_prompts_per_step
    share = dynamic.expected_share_with_signal
    if not dynamic.enabled or share is None:
        return
    usable = dynamic.max_rounds * prompts * share
    if usable < prompts:
        partial = (
            'train on the partial batch (when_exhausted is "train_on_partial" already)'
            if dynamic.when_exhausted == "train_on_partial"
            else 'train on the partial batch (when_exhausted = "train_on_partial")'
        )
        rounds = f", or raise max_rounds to {-(-1 // share):.0f}" if share > 0 else ""
        yield Violation(
            "algorithm.dynamic_sampling",
            f"about {dynamic.max_rounds} * {prompts} * {share:g} = {round(usable)} usable groups per step "
            f"(max_rounds * num_prompts_per_step * expected_share_with_signal), fewer than {prompts}",
            f"Take fewer prompts per step or easier data, {partial}{rounds}",
        )


def greedy_repeats(evaluation: EvaluationConfig) -> Iterator[Violation]:
    if evaluation.sampling.temperature == 0 and evaluation.num_samples_per_prompt > 1:
        yield Violation(
            "evaluation.num_samples_per_prompt",
            f"at evaluation.sampling.temperature 0 all {evaluation.num_samples_per_prompt} samples of "
            "a prompt are equal",
            "Set it to 1, or the temperature above 0",
        )


def greedy_ignores(evaluation: EvaluationConfig) -> Iterator[Violation]:
    set_ones = sorted({"top_p", "top_k", "min_p"} & evaluation.sampling.model_fields_set)
    if evaluation.sampling.temperature == 0 and set_ones:
        yield Violation(
            "evaluation.sampling",
            f"at temperature 0 the likeliest token is taken, so {', '.join(set_ones)} change nothing",
            "Take them out, or set the temperature above 0",
        )
