"""What every role that is a causal LM can do: score given tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from plait.models.attention import SHAPE_MULTIPLE
from plait.stages.packing import Microbatch, TokenSequence, pack


class TokenScores(NamedTuple):
    """logprobs_R: log-probability of each loss token. entropy_R: entropy of its distribution, in nats."""

    logprobs_R: Tensor
    entropy_R: Tensor


def score_tokens(
    model: PreTrainedModel, microbatch: Microbatch, temperature: float, *, entropy_needs_grad: bool = False
) -> TokenScores:
    """Log-probabilities under softmax(logits / temperature), the distribution that was sampled from.

    Logits exist only where the next token is a loss token; they are reduced in fp32.
    """
    num_loss_tokens = len(microbatch.predict_R)
    logits_RV = model(
        input_ids=microbatch.ids_1T,
        position_ids=microbatch.context.position_ids_1T,
        context=microbatch.context,
        use_cache=False,
        logits_to_keep=pad(microbatch.predict_R, (0, -num_loss_tokens % SHAPE_MULTIPLE)),
    ).logits[0, :num_loss_tokens]
    logprobs_RV = (logits_RV.float() / temperature).log_softmax(-1)
    logprobs_R = logprobs_RV.gather(-1, microbatch.targets_R[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_needs_grad and torch.is_grad_enabled()):
        entropy_R = -(logprobs_RV.exp() * logprobs_RV).sum(-1)
    return TokenScores(logprobs_R, entropy_R)


@torch.no_grad()
def sequence_logprobs(
    model: PreTrainedModel, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int
) -> list[Tensor]:
    """Log-probabilities of the loss tokens of each sequence, in the order given, without gradients."""
    device = next(model.parameters()).device
    result: list[Tensor] = [torch.empty(0)] * len(sequences)
    for microbatch in pack(sequences, max_tokens, device):
        scores = score_tokens(model, microbatch, temperature)
        for index in microbatch.sequences:
            result[index] = scores.logprobs_R[microbatch.sequence_R == index]
    return result
