"""The loss of one microbatch of pairs: both answers of a pair are in it. Shapes: B pairs, R loss tokens of all."""

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.algorithm_config import AlgorithmConfig
from plait.algorithms.pairwise import PairwiseLoss, dpo, ipo, simpo
from plait.roles.model import TokenScores
from plait.stages.packing import Microbatch
from plait.stages.policy_loss import LossInputs, LossTally, rollout_logprobs


@dataclass(frozen=True, slots=True)
class AnswerSums:
    """Of the pairs of a microbatch: log-probabilities summed over each answer's loss tokens, and their numbers."""

    chosen_B: Tensor
    rejected_B: Tensor
    ref_chosen_B: Tensor | None
    ref_rejected_B: Tensor | None
    num_chosen_tokens_B: Tensor
    num_rejected_tokens_B: Tensor


def losses(sums: AnswerSums, algorithm: AlgorithmConfig) -> PairwiseLoss:
    """The configured loss of each pair. Functions and equations: `plait.algorithms.pairwise`."""
    settings = algorithm.pairwise
    if algorithm.pairwise_loss == "simpo":
        lengths = (sums.num_chosen_tokens_B, sums.num_rejected_tokens_B)
        return simpo(sums.chosen_B, sums.rejected_B, *lengths, beta=settings.beta, margin=settings.margin)
    assert sums.ref_chosen_B is not None, "the reference has not scored the pairs"
    assert sums.ref_rejected_B is not None, "the reference has not scored the pairs"
    four = (sums.chosen_B, sums.rejected_B, sums.ref_chosen_B, sums.ref_rejected_B)
    if algorithm.pairwise_loss == "ipo":
        return ipo(*four, beta=settings.beta)
    return dpo(*four, beta=settings.beta, label_smoothing=settings.label_smoothing)


def pair_loss(
    scores: TokenScores, microbatch: Microbatch, inputs: LossInputs, algorithm: AlgorithmConfig, tally: LossTally
) -> Tensor:
    """This microbatch's part of the update's loss. inputs.samples: chosen and rejected answers in turn."""
    device = scores.logprobs_R.device
    members = [inputs.samples[i] for i in microbatch.sequences]
    chosen, rejected = (torch.tensor(microbatch.sequences[i::2], device=device) for i in (0, 1))
    assert bool(((chosen % 2 == 0) & (rejected == chosen + 1)).all()), "a pair is split between microbatches"

    def summed(values_R: Tensor) -> tuple[Tensor, Tensor]:
        sums_B = values_R.new_zeros(len(inputs.samples)).index_add(0, microbatch.sequence_R, values_R)
        return sums_B[chosen], sums_B[rejected]

    chosen_B, rejected_B = summed(scores.logprobs_R)
    ref_chosen_B, ref_rejected_B = None, None
    if inputs.ref_logprobs is not None:
        ref_R = torch.cat([inputs.ref_logprobs[sample.id] for sample in members]).to(device)
        ref_chosen_B, ref_rejected_B = summed(ref_R)
    numbers = summed(torch.ones_like(scores.logprobs_R))
    sums = AnswerSums(chosen_B, rejected_B, ref_chosen_B, ref_rejected_B, *numbers)
    made = losses(sums, algorithm)
    loss = (inputs.weights_B[chosen] * made.loss_B).sum()
    tally.policy_loss += float(loss.detach())
    if algorithm.positive_nll_coefficient > 0:
        example_loss = -(inputs.example_weights_B[microbatch.sequence_R] * scores.logprobs_R).sum()
        tally.example_loss += float(example_loss.detach())
        loss = loss + algorithm.positive_nll_coefficient * example_loss
    tally.total_loss += float(loss.detach())
    with torch.no_grad():
        tally.pairs.add(sums.chosen_B, sums.rejected_B, made)
        if algorithm.samples_answers and tally.num_applied == 0:
            tally.gaps.append((scores.logprobs_R.cpu() - rollout_logprobs(members)).abs())
        tally.num_trained_tokens += len(scores.logprobs_R)
        tally.num_forward_tokens += microbatch.num_tokens
        tally.entropy_sum += float(scores.entropy_R.sum())
    return loss
