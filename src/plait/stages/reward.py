"""From scores to rewards: verifier and reward models weighted together, then shaping. Host work, group by group."""

from collections.abc import Sequence
from math import isfinite

import torch

from plait.algorithm_config import ShapingConfig
from plait.algorithms.shaping import length_reward, soft_overlong_penalty, with_format_reward
from plait.batch import Group, Sample, Verdict
from plait.rewards.extract import extract


def combine(samples: Sequence[Sample], weights: dict[str, float], verifier_weight: float) -> None:
    """outcome = verifier_weight x score + sum of weight x score of each reward model.

    A score that is not finite makes its sample failed, with the reason, like one of a verifier.
    """
    for sample in samples:
        wrong = [name for name, score in sample.reward_scores.items() if not isfinite(score)]
        if wrong:
            reason = f'reward model "{wrong[0]}" gave {sample.reward_scores[wrong[0]]}'
            sample.verdict = Verdict("failed", 0.0, reason)
        parts = [weights[name] * score for name, score in sample.reward_scores.items()]
        sample.outcome = verifier_weight * sample.score + sum(parts)


def shape(groups: Sequence[Group], settings: ShapingConfig, *, max_completion_tokens: int) -> None:
    """Write `Sample.shaping` of every sample, greedy ones included: they are compared with the others."""
    if not (settings.overlong_buffer_share or settings.length_weight or settings.format_weight):
        return
    members = [
        (number, sample)
        for number, group in enumerate(groups)
        for sample in (*group.samples, *([group.greedy] if group.greedy is not None else []))
    ]
    samples = [sample for _, sample in members]
    lengths_B = torch.tensor([sample.num_response_tokens for sample in samples])
    made: dict[str, list[float]] = {}
    if settings.format_weight:
        outcomes_B = torch.tensor([sample.unshaped_reward for sample in samples], dtype=torch.float64)
        formats_B = torch.tensor([float(_has_format(sample)) for sample in samples])
        mixed_B = with_format_reward(outcomes_B, formats_B, weight=settings.format_weight)
        made["format"] = (mixed_B - outcomes_B).tolist()
    if settings.overlong_buffer_share:
        buffer = max(1, round(settings.overlong_buffer_share * max_completion_tokens))
        penalty_B = soft_overlong_penalty(lengths_B, max_tokens=max_completion_tokens, buffer_tokens=buffer)
        made["overlong"] = (settings.overlong_penalty * penalty_B).tolist()
    if settings.length_weight:
        lengths_reward_B = length_reward(
            lengths_B,
            torch.tensor([sample.score == 1 for sample in samples]),
            torch.tensor([number for number, _ in members]),
            torch.tensor([sample.is_counted for sample in samples]),
        )
        made["length"] = (settings.length_weight * lengths_reward_B).tolist()
    for index, sample in enumerate(samples):
        sample.shaping = {kind: values[index] for kind, values in made.items()}


def _has_format(sample: Sample) -> bool:
    """As the verifier "format" has it: reasoning that is closed, and an answer after it."""
    found = extract(sample.prompt.prefix + sample.text)
    return found.has_reasoning and found.answer is not None
