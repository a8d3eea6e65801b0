"""Factors of an algorithm that do not go together."""

from collections.abc import Iterator

from plait.algorithm_config import AlgorithmConfig
from plait.config import BatchConfig, TrainConfig
from plait.errors import Violation
from plait.rules.batch import counts

_OVER_TIME = ("gae", "n_step")


def value_needs_critic(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if algorithm.baseline == "value" and not algorithm.has_critic:
        yield Violation(
            "algorithm.critic.kind",
            'algorithm.baseline "value" is a critic\'s prediction, and there is no critic (kind "none")',
            'Set it to "independent" or "shared_trunk", or take a baseline without critic such as "group_mean"',
        )
    if algorithm.has_critic and algorithm.baseline != "value":
        yield Violation(
            "algorithm.baseline",
            f'a critic is trained (algorithm.critic.kind "{algorithm.critic.kind}") and the baseline is '
            f'"{algorithm.baseline}", which does not use it',
            'Set it to "value", or algorithm.critic.kind = "none"',
        )


def estimator(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    kind = algorithm.returns.estimator
    if kind in _OVER_TIME and algorithm.baseline != "value":
        yield Violation(
            "algorithm.returns.estimator",
            f'"{kind}" needs the values of a critic, and algorithm.baseline is "{algorithm.baseline}"',
            'Set it to "monte_carlo", or algorithm.baseline = "value"',
        )
    if kind == "sequence" and algorithm.baseline == "value":
        yield Violation(
            "algorithm.returns.estimator",
            '"sequence" takes the completion for one action, and algorithm.baseline "value" has a value per token',
            'Set it to "gae" or "monte_carlo"',
        )
    if algorithm.returns.gamma < 1 and algorithm.baseline != "value":
        yield Violation(
            "algorithm.returns.gamma",
            f"without a critic every token of a completion has the same return, and a discount of "
            f"{algorithm.returns.gamma:g} would favour late tokens without reason",
            'Set it to 1, or algorithm.baseline = "value"',
        )


def scale(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if algorithm.scale == "none":
        return
    if algorithm.baseline == "value":
        yield Violation(
            "algorithm.scale",
            f'"{algorithm.scale}" is a deviation of rewards per sample, and algorithm.baseline "value" gives '
            "advantages per token",
            'Set it to "none"; algorithm.whitening = true scales them over the step',
        )
    elif algorithm.has_kl and algorithm.kl_in == "reward" and algorithm.returns.estimator == "monte_carlo":
        yield Violation(
            "algorithm.returns.estimator",
            f'with the KL in the reward "monte_carlo" gives each token its own return, and algorithm.scale '
            f'"{algorithm.scale}" is a deviation per sample',
            'Set it to "sequence", or algorithm.scale = "none" (algorithm.whitening = true scales over the step)',
        )


def kl(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    is_asked = algorithm.has_kl or "kl_estimator" in algorithm.model_fields_set
    if algorithm.kl_estimator == "k1" and algorithm.kl_in == "loss" and is_asked:
        yield Violation(
            "algorithm.kl_estimator",
            "in the loss the expectation of the gradient of k1 is zero, so it pulls nowhere",
            'Set it to "k2" or "k3", or algorithm.kl_in = "reward"',
        )
    if algorithm.kl_estimator == "k3_with_k2_gradient" and algorithm.kl_in == "reward" and is_asked:
        yield Violation(
            "algorithm.kl_estimator",
            "in the reward only the value counts, and that of k3_with_k2_gradient is k3's",
            'Set it to "k3", or to "k1" (usual in the reward)',
        )
    if algorithm.adaptive_kl.target is not None and not algorithm.has_kl:
        yield Violation(
            "algorithm.adaptive_kl.target",
            "algorithm.kl_coefficient is 0, and a coefficient of 0 cannot be adapted: it is multiplied",
            "Set algorithm.kl_coefficient above 0 (0.05 is usual), or take adaptive_kl out",
        )


def clips(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if algorithm.dual_clip is not None and algorithm.dual_clip <= 1:
        yield Violation(
            "algorithm.dual_clip",
            f"the bound of the loss under a negative advantage, {algorithm.dual_clip:g}, must be above 1: at 1 it "
            "would take the gradient of tokens that have not moved",
            "Set it to 3 (usual), or take it out",
        )
    if algorithm.policy_loss not in ("gmpo", "cispo") and algorithm.clip_low > 1:
        yield Violation(
            "algorithm.clip_low",
            f"the ratio is clipped from below at 1 - {algorithm.clip_low:g}, and it is never below 0",
            "Set it to 1 or less (0.2 is usual)",
        )


def correction(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    settings = algorithm.correction
    if settings.kind == "none":
        return
    if settings.low >= settings.high:
        yield Violation(
            "algorithm.correction.low",
            f"the bounds of the weight are {settings.low:g} and {settings.high:g}, and the lower is not below",
            f"Set it below {settings.high:g}",
        )
    if algorithm.policy_loss == "decoupled_ppo":
        yield Violation(
            "algorithm.correction.kind",
            'algorithm.policy_loss "decoupled_ppo" has this weight in it, so it would be applied twice',
            'Set it to "none" (algorithm.behaviour_cap bounds the weight), or policy_loss = "ppo_clip"',
        )


def critic(algorithm: AlgorithmConfig, train: TrainConfig | None = None) -> Iterator[Violation]:
    settings = algorithm.critic
    if settings.kind == "shared_trunk":
        if settings.path:
            yield Violation(
                "algorithm.critic.path",
                f'the critic is on the policy\'s trunk (kind "shared_trunk"), and the path "{settings.path}" '
                "names another model",
                'Take it out, or set algorithm.critic.kind = "independent"',
            )
        if settings.pretraining_steps:
            yield Violation(
                "algorithm.critic.pretraining_steps",
                f"the critic is on the policy's trunk, so {settings.pretraining_steps} steps of training it alone "
                "would move the policy as well",
                'Set it to 0, or algorithm.critic.kind = "independent"',
            )
    elif settings.kind == "independent" and train is not None and settings.pretraining_steps >= train.num_steps:
        yield Violation(
            "algorithm.critic.pretraining_steps",
            f"the first {settings.pretraining_steps} steps train the critic only, and the run has {train.num_steps}, "
            "so the policy would never be updated",
            f"Set it to {train.num_steps - 1} or less, or train.num_steps higher",
        )


def reinforce_on_old_samples(algorithm: AlgorithmConfig, batch: BatchConfig) -> Iterator[Violation]:
    updates = counts(batch).num_updates_per_step
    if algorithm.policy_loss == "reinforce" and updates > 1:
        yield Violation(
            "algorithm.policy_loss",
            f'"reinforce" has no ratio, and after the first of the {updates} updates of a step the policy is no '
            "longer the one that sampled",
            'Use one update per step, or "ppo_clip"',
        )
