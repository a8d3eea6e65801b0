"""old_logprob and ref_logprob: score the sampled tokens under the policy before the update, or the reference."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plait.batch import Group
from plait.roles.model import sequence_logprobs
from plait.stages.packing import TokenSequence


def group_logprobs(
    model: PreTrainedModel, groups: list[Group], *, temperature: float, max_tokens: int
) -> dict[str, Tensor]:
    """Log-probabilities of the loss tokens by sample id, for the samples that the loss may use."""
    samples = [sample for group in groups for sample in group.samples if sample.is_counted]
    sequences = [TokenSequence.from_sample(sample) for sample in samples]
    logprobs = sequence_logprobs(model, sequences, temperature=temperature, max_tokens=max_tokens)
    return {sample.id: values for sample, values in zip(samples, logprobs, strict=True)}


def group_rollout_logprobs(groups: list[Group]) -> dict[str, Tensor]:
    """The engine's own log-probabilities of the loss tokens, where they may stand for the trainer's."""
    samples = [sample for group in groups for sample in group.samples if sample.is_counted]
    return {sample.id: torch.from_numpy(sample.rollout_logprobs_R[sample.response_mask_R]) for sample in samples}
