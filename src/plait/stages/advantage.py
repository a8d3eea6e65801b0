"""advantage: one number per loss token, and what the critic is to predict, from rewards, KL and values.

Shapes: B samples, T their longest number of loss tokens, R loss tokens of one sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from plait.algorithms import returns as over_time
from plait.algorithms.advantages import sequence_advantages, whiten
from plait.algorithms.kl import REWARD_ESTIMATORS
from plait.batch import Group, Sample
from plait.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class Values:
    """The critic's predictions, keyed by sample id. at_tokens: before each loss token, [R]; at_end: after the last."""

    at_tokens: dict[str, Tensor]
    at_end: dict[str, float]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Keyed by sample id, float32 [R] each. returns: what the critic learns; empty without one.

    kl_per_sample: mean over the counted samples of the KL that was put into their rewards, before its coefficient.
    """

    advantages: dict[str, Tensor]
    returns: dict[str, Tensor]
    kl_per_sample: float | None = None


def is_trained(sample: Sample, algorithm: AlgorithmConfig) -> bool:
    """Whether a sample takes part in statistics and losses: counted, and not filtered out."""
    return sample.is_counted and not (algorithm.filters.overlong and sample.finish == "length")


def step_advantages(
    groups: list[Group],
    algorithm: AlgorithmConfig,
    *,
    old_logprobs: Mapping[str, Tensor] | None = None,
    ref_logprobs: Mapping[str, Tensor] | None = None,
    values: Values | None = None,
    kl_coefficient: float = 0.0,
) -> Advantages:
    """Advantages of every sample of a step; those that take no part get 0.

    old_logprobs, ref_logprobs: where the KL is in the reward. values: where the baseline is the critic's.
    """
    kl = _token_kl(groups, algorithm, old_logprobs, ref_logprobs)
    if algorithm.baseline == "value":
        assert values is not None, "baseline value without values"
        made, targets = _from_values(groups, algorithm, values, kl, kl_coefficient)
    else:
        made, targets = _from_siblings(groups, algorithm, kl, kl_coefficient), {}
    if algorithm.whitening:
        made = _whitened(made, algorithm)
    absent = {
        sample.id: torch.zeros(sample.num_loss_tokens)
        for group in groups
        for sample in group.samples
        if sample.id not in made
    }
    kl_per_sample = sum(float(kl_R.sum()) for kl_R in kl.values()) / len(kl) if kl else None
    return Advantages(made | absent, targets, kl_per_sample)


def _token_kl(
    groups: list[Group],
    algorithm: AlgorithmConfig,
    old_logprobs: Mapping[str, Tensor] | None,
    ref_logprobs: Mapping[str, Tensor] | None,
) -> dict[str, Tensor]:
    """The KL estimate of each token by sample id, float64; nothing where it is not in the reward."""
    if old_logprobs is None or ref_logprobs is None:
        return {}
    estimate = REWARD_ESTIMATORS[algorithm.kl_estimator]
    trained = [s for group in groups for s in group.samples if is_trained(s, algorithm)]
    return {s.id: estimate(old_logprobs[s.id].double().cpu(), ref_logprobs[s.id].double().cpu()) for s in trained}


def _from_siblings(
    groups: list[Group], algorithm: AlgorithmConfig, kl: Mapping[str, Tensor], kl_coefficient: float
) -> dict[str, Tensor]:
    """Advantages without a critic: one number per sample, less the KL of earlier tokens where it counts by token."""
    assert algorithm.baseline != "value", "values are handled elsewhere"
    numbered = [(number, sample) for number, group in enumerate(groups) for sample in group.samples]
    if not numbered:
        return {}
    samples = [sample for _, sample in numbered]
    counted_B = torch.tensor([is_trained(sample, algorithm) for sample in samples])
    penalties = {key: -kl_coefficient * kl_R for key, kl_R in kl.items()}
    totals = [s.reward + (float(penalties[s.id].sum()) if s.id in penalties else 0.0) for s in samples]
    greedy = None
    if algorithm.baseline == "greedy":
        baselines = [group.greedy.reward for group in groups if group.greedy is not None]
        assert len(baselines) == len(groups), "a group has no greedy completion"
        greedy = torch.tensor([baselines[number] for number, _ in numbered], dtype=torch.float64)
    advantages_B = sequence_advantages(
        torch.tensor(totals, dtype=torch.float64),
        torch.tensor([number for number, _ in numbered]),
        counted_B,
        baseline=algorithm.baseline,
        scale=algorithm.scale,
        std_correction=algorithm.std_correction,
        eps=algorithm.eps,
        lengths_B=torch.tensor([sample.num_loss_tokens for sample in samples]),
        greedy_rewards_B=greedy,
    )
    made = {}
    for sample, value, is_counted in zip(samples, advantages_B.float().tolist(), counted_B.tolist(), strict=True):
        if not is_counted:
            continue
        made[sample.id] = torch.full((sample.num_loss_tokens,), value, dtype=torch.float32)
        if algorithm.returns.estimator == "monte_carlo" and sample.id in penalties:
            # A token is not to blame for what came before it.
            past_R = penalties[sample.id].cumsum(0) - penalties[sample.id]
            made[sample.id] = (value - past_R).float()
    return made


def _from_values(
    groups: list[Group], algorithm: AlgorithmConfig, values: Values, kl: Mapping[str, Tensor], kl_coefficient: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(advantages, the critic's targets) over time."""
    samples = [s for group in groups for s in group.samples if is_trained(s, algorithm)]
    if not samples:
        return {}, {}
    settings = algorithm.returns
    lengths_B = torch.tensor([sample.num_loss_tokens for sample in samples])
    mask_BT = torch.arange(int(lengths_B.max())) < lengths_B[:, None]
    values_BT = _padded([values.at_tokens[s.id] for s in samples], mask_BT)
    rewards_BT = over_time.token_rewards(torch.tensor([s.reward for s in samples], dtype=torch.float64), mask_BT)
    if kl:
        rewards_BT = rewards_BT - kl_coefficient * _padded([kl[s.id] for s in samples], mask_BT)
    bootstrap_B = None
    if settings.bootstrap_truncated:
        ends = [values.at_end[s.id] if s.finish == "length" else 0.0 for s in samples]
        bootstrap_B = torch.tensor(ends, dtype=torch.float64)
    if settings.estimator == "gae":
        lam: float | Tensor = settings.lambda_policy
        if settings.length_adaptive_alpha is not None:
            lam = over_time.length_adaptive_lambda(lengths_B, settings.length_adaptive_alpha)
        advantages_BT, returns_BT = over_time.decoupled_gae(
            rewards_BT,
            values_BT,
            mask_BT,
            gamma=settings.gamma,
            lam_policy=lam,
            lam_critic=settings.lambda_critic,
            bootstrap_B=bootstrap_B,
        )
    else:
        if settings.estimator == "n_step":
            returns_BT = over_time.n_step_returns(
                rewards_BT,
                values_BT,
                mask_BT,
                gamma=settings.gamma,
                num_steps=settings.num_steps,
                bootstrap_B=bootstrap_B,
            )
        else:
            returns_BT = over_time.discounted_returns(
                rewards_BT, mask_BT, gamma=settings.gamma, bootstrap_B=bootstrap_B
            )
        advantages_BT = returns_BT - values_BT
    keys = [sample.id for sample in samples]
    rows = [(a[mask].float(), r[mask].float()) for a, r, mask in zip(advantages_BT, returns_BT, mask_BT, strict=True)]
    return (
        {key: advantage_R for key, (advantage_R, _) in zip(keys, rows, strict=True)},
        {key: return_R for key, (_, return_R) in zip(keys, rows, strict=True)},
    )


def _padded(parts: list[Tensor], mask_BT: Tensor) -> Tensor:
    made_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    made_BT[mask_BT] = torch.cat([part.double().cpu() for part in parts])
    return made_BT


def _whitened(advantages: dict[str, Tensor], algorithm: AlgorithmConfig) -> dict[str, Tensor]:
    """Over all loss tokens of the step.

    Where one is not finite it stays as it is, and so do the others: no update comes of them, and its batch is kept.
    """
    if not advantages:
        return {}
    together_N = torch.cat(list(advantages.values()))
    if not bool(together_N.isfinite().all()):
        return advantages
    whitened_N = whiten(
        together_N,
        torch.ones_like(together_N),
        shift_mean=True,
        std_correction=algorithm.std_correction,
        eps=algorithm.eps,
    ).float()
    parts = whitened_N.split([len(part) for part in advantages.values()])
    return dict(zip(advantages, parts, strict=True))
