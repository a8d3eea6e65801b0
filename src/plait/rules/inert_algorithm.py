"""Settings of an algorithm that a person wrote and that nothing would read under the others.

What a named algorithm's own file sets is no mistake of a person's: `model_fields_set` does not have it.
"""

from collections.abc import Iterator

from plait.algorithm_config import AlgorithmConfig
from plait.errors import Violation
from plait.section import Section

_CLIPPED = ("ppo_clip", "decoupled_ppo")


def _unread(prefix: str, section: Section, names: tuple[str, ...], while_: str, change: str) -> Iterator[Violation]:
    """One violation per name that was written."""
    for name in names:
        if name in section.model_fields_set:
            yield Violation(f"{prefix}.{name}", f"it changes nothing while {while_}", f"Take it out, or {change}")


def kl(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if algorithm.kl_coefficient > 0:
        return
    for name in ("kl_estimator", "kl_in"):
        if name in algorithm.model_fields_set and not (name == "kl_estimator" and algorithm.kl_estimator == "k1"):
            yield Violation(
                f"algorithm.{name}",
                "it changes nothing while algorithm.kl_coefficient is 0: no reference is loaded",
                f"Take it out (--set algorithm.{name}=null), or set kl_coefficient above 0 (0.001 is usual)",
            )


def advantage_scale(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if algorithm.scale == "none" and not algorithm.whitening:
        yield from _unread(
            "algorithm",
            algorithm,
            ("eps", "std_correction"),
            'algorithm.scale is "none" and nothing is whitened: no standard deviation is taken',
            'set scale to "group_std" or "batch_std"',
        )


def returns(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    settings, prefix = algorithm.returns, "algorithm.returns"
    if settings.estimator != "gae":
        yield from _unread(
            prefix,
            settings,
            ("lambda_policy", "lambda_critic", "length_adaptive_alpha"),
            f'algorithm.returns.estimator is "{settings.estimator}"',
            'set estimator to "gae"',
        )
    elif settings.length_adaptive_alpha is not None:
        change = "take length_adaptive_alpha out"
        while_ = "length_adaptive_alpha is set, which gives each sample its own"
        yield from _unread(prefix, settings, ("lambda_policy",), while_, change)
    if settings.estimator != "n_step":
        while_ = f'algorithm.returns.estimator is "{settings.estimator}"'
        yield from _unread(prefix, settings, ("num_steps",), while_, 'set estimator to "n_step"')
    if algorithm.baseline != "value":
        while_ = f'algorithm.baseline is "{algorithm.baseline}": no critic says what would follow'
        yield from _unread(prefix, settings, ("bootstrap_truncated",), while_, 'set baseline to "value"')


def clips(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    while_ = f'algorithm.policy_loss is "{algorithm.policy_loss}"'
    if algorithm.policy_loss == "reinforce":
        change = 'set policy_loss to "ppo_clip"'
        yield from _unread("algorithm", algorithm, ("clip_low", "clip_high"), while_, change)
    if algorithm.policy_loss not in _CLIPPED:
        yield from _unread("algorithm", algorithm, ("dual_clip",), while_, 'set policy_loss to "ppo_clip"')
    if algorithm.policy_loss != "decoupled_ppo":
        change = 'set policy_loss to "decoupled_ppo"'
        yield from _unread("algorithm", algorithm, ("behaviour_cap",), while_, change)


def critic(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    settings, prefix = algorithm.critic, "algorithm.critic"
    if settings.kind == "none":
        names = tuple(name for name in type(settings).model_fields if name != "kind")
        yield from _unread(prefix, settings, names, 'algorithm.critic.kind is "none"', 'set kind to "independent"')
        return
    if settings.kind == "shared_trunk":
        while_ = "the critic is on the policy's trunk, which has one rate (optimizer.learning_rate)"
        yield from _unread(prefix, settings, ("learning_rate",), while_, 'set kind to "independent"')
    if settings.value_loss == "plain":
        yield from _unread(
            prefix,
            settings,
            ("value_clip",),
            'algorithm.critic.value_loss is "plain"',
            'set value_loss to "clipped"',
        )


def correction(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if algorithm.correction.kind == "none":
        yield from _unread(
            "algorithm.correction",
            algorithm.correction,
            ("level", "low", "high"),
            'algorithm.correction.kind is "none"',
            'set kind to "truncate" or "mask"',
        )
    if algorithm.adaptive_kl.target is None:
        yield from _unread(
            "algorithm.adaptive_kl",
            algorithm.adaptive_kl,
            ("horizon",),
            "algorithm.adaptive_kl has no target",
            "set target",
        )


def shaping(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    if algorithm.shaping.overlong_buffer_share == 0:
        yield from _unread(
            "algorithm.shaping",
            algorithm.shaping,
            ("overlong_penalty",),
            "algorithm.shaping.overlong_buffer_share is 0",
            "set it above 0 (0.2 is DAPO's)",
        )


def dynamic_sampling(algorithm: AlgorithmConfig) -> Iterator[Violation]:
    dynamic = algorithm.dynamic_sampling
    written = sorted(dynamic.model_fields_set - {"enabled"})
    if not dynamic.enabled and written:
        yield Violation(
            "algorithm.dynamic_sampling",
            f"{', '.join(written)} change nothing while enabled is false",
            "Set enabled = true, or take them out",
        )
