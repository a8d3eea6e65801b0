"""advantage: one number per sample from the rewards of its group (or of the batch)."""

import torch

from plait.algorithms.advantages import sequence_advantages
from plait.batch import Group
from plait.config import AlgorithmConfig


def group_advantages(groups: list[Group], algorithm: AlgorithmConfig) -> dict[str, float]:
    """Advantage by sample id; samples that are not counted get 0."""
    samples = [(number, sample) for number, group in enumerate(groups) for sample in group.samples]
    if not samples:
        return {}
    advantages_B = sequence_advantages(
        torch.tensor([sample.reward for _, sample in samples], dtype=torch.float64),
        torch.tensor([number for number, _ in samples]),
        torch.tensor([sample.is_counted for _, sample in samples]),
        baseline=algorithm.baseline,
        scale=algorithm.scale,
        std_correction=algorithm.std_correction,
        eps=algorithm.eps,
    )
    return {sample.id: value for (_, sample), value in zip(samples, advantages_B.tolist(), strict=True)}
