"""value: what the critic expects at every loss token, before any update; in a shared trunk with log-probabilities."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from plait.batch import Group, Sample
from plait.roles.model import score_tokens
from plait.roles.policy import Policy
from plait.stages.advantage import Values
from plait.stages.packing import TokenSequence, pack


class ValueRole(Protocol):
    """A role that predicts returns: a critic, whole or split over ranks."""

    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[tuple[Tensor, float]]:
        """Of each sequence: values before its loss tokens [R], and after its last token."""
        ...


def group_values(critic: ValueRole, groups: list[Group], *, max_tokens: int) -> Values:
    """Values of the samples that the loss may use."""
    samples = _counted(groups)
    made = critic.values([TokenSequence.from_sample(sample) for sample in samples], max_tokens=max_tokens)
    pairs = list(zip(samples, made, strict=True))
    return Values({s.id: values_R for s, (values_R, _) in pairs}, {s.id: last for s, (_, last) in pairs})


@torch.no_grad()
def trunk_values(
    policy: Policy, groups: list[Group], *, temperature: float, max_tokens: int
) -> tuple[Values, dict[str, Tensor]]:
    """(values, log-probabilities of the loss tokens) of a shared trunk, from one pass."""
    samples = _counted(groups)
    values, logprobs = Values({}, {}), {}
    for microbatch in pack([TokenSequence.from_sample(s) for s in samples], max_tokens, policy.device):
        scores = score_tokens(policy.model, microbatch, temperature, value_head=policy.value_head)
        assert scores.values_R is not None, "the policy has no value head"
        assert scores.values_B is not None, "the policy has no value head"
        for index, last in zip(microbatch.sequences, scores.values_B.tolist(), strict=True):
            key, is_own_R = samples[index].id, microbatch.sequence_R == index
            values.at_tokens[key], values.at_end[key] = scores.values_R[is_own_R], last
            logprobs[key] = scores.logprobs_R[is_own_R]
    return values, logprobs


def _counted(groups: list[Group]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples if sample.is_counted]
