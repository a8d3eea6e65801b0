"""old_logprob and ref_logprob: score the sampled tokens under the policy before the update, or the reference."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from plait.batch import Group
from plait.stages.packing import TokenSequence


class ScoringRole(Protocol):
    """A role that can say how likely given tokens are: the policy, the reference."""

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[Tensor]:
        """Of the loss tokens, per sequence."""
        ...


def group_logprobs(role: ScoringRole, groups: list[Group], *, temperature: float, max_tokens: int) -> dict[str, Tensor]:
    """Log-probabilities of the loss tokens by sample id, for the samples that the loss may use."""
    samples = [sample for group in groups for sample in group.samples if sample.is_counted]
    sequences = [TokenSequence.from_sample(sample) for sample in samples]
    logprobs = role.logprobs(sequences, temperature=temperature, max_tokens=max_tokens)
    return {sample.id: values for sample, values in zip(samples, logprobs, strict=True)}


def group_rollout_logprobs(groups: list[Group]) -> dict[str, Tensor]:
    """The engine's own log-probabilities of the loss tokens, where they may stand for the trainer's."""
    samples = [sample for group in groups for sample in group.samples if sample.is_counted]
    return {sample.id: torch.from_numpy(sample.rollout_logprobs_R[sample.response_mask_R]) for sample in samples}
