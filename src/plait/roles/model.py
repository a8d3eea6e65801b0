"""What every role that is a causal LM can do: score given tokens."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from plait.models.attention import SHAPE_MULTIPLE
from plait.models.folder import LOGIT_CHANGES
from plait.models.value_head import ValueHead
from plait.stages.packing import Microbatch, TokenSequence, pack

MAX_LOGITS_PER_CHUNK = 2**24
"""Logits that exist at the same time, in numbers: 64 MiB in fp32. Beyond it rows are scored in chunks, and the
backward pass computes each chunk's logits again instead of keeping them."""


class TokenScores(NamedTuple):
    """logprobs_R: log-probability of each loss token. entropy_R: entropy of its distribution, in nats.

    values_R: a value head's prediction before each loss token, values_B: after each sequence's last token; None
    without a head.
    """

    logprobs_R: Tensor
    entropy_R: Tensor
    values_R: Tensor | None = None
    values_B: Tensor | None = None


def score_tokens(
    model: PreTrainedModel,
    microbatch: Microbatch,
    temperature: float,
    *,
    entropy_needs_grad: bool = False,
    value_head: ValueHead | None = None,
    reduce: "Reduction | None" = None,
    hidden_1TD: Tensor | None = None,
) -> TokenScores:
    """Log-probabilities under softmax(logits / temperature), the distribution that was sampled from.

    Logits exist only where the next token is a loss token, at most MAX_LOGITS_PER_CHUNK at a time, and are reduced
    in fp32. value_head: on the same hidden states, for models with a plain head. hidden_1TD: see `model_inputs`.
    reduce: instead of `reduce_logits`, where the head returns something else than all logits.
    """
    reduce = reduce_logits if reduce is None else reduce
    num_loss_tokens = len(microbatch.predict_R)
    vocab = model.get_output_embeddings().weight.shape[0]
    rows_per_chunk = max(SHAPE_MULTIPLE, MAX_LOGITS_PER_CHUNK // vocab // SHAPE_MULTIPLE * SHAPE_MULTIPLE)
    inputs = model_inputs(microbatch, hidden_1TD)
    predict_R = pad(microbatch.predict_R, (0, -num_loss_tokens % SHAPE_MULTIPLE))
    targets_R = pad(microbatch.targets_R, (0, -num_loss_tokens % SHAPE_MULTIPLE))
    assert value_head is None or has_plain_head(model), "a shared trunk needs a plain head; the rules refuse others"
    if value_head is None and (len(predict_R) <= rows_per_chunk or not has_plain_head(model)):
        logits_RV = model(**inputs, logits_to_keep=predict_R).logits[0]
        scores = reduce(logits_RV, targets_R, temperature, entropy_needs_grad)
        return TokenScores(scores.logprobs_R[:num_loss_tokens], scores.entropy_R[:num_loss_tokens])
    hidden_TD = model.base_model(**inputs).last_hidden_state[0]
    hidden_RD = hidden_TD[predict_R]
    shared = (model.get_output_embeddings(), reduce, temperature, entropy_needs_grad)
    values = (None, None)
    if value_head is not None:
        values = value_head(hidden_TD[microbatch.predict_R]), value_head(hidden_TD[microbatch.last_B])
    if len(predict_R) <= rows_per_chunk:
        scores = _head_scores(*shared, hidden_RD, targets_R)
        return TokenScores(scores.logprobs_R[:num_loss_tokens], scores.entropy_R[:num_loss_tokens], *values)
    chunks = [
        checkpoint(_head_scores, *shared, hidden_rD, targets_r, use_reentrant=False)
        for hidden_rD, targets_r in zip(hidden_RD.split(rows_per_chunk), targets_R.split(rows_per_chunk), strict=True)
    ]
    logprobs_R, entropy_R = (
        torch.cat(parts)[:num_loss_tokens] for parts in ([c.logprobs_R for c in chunks], [c.entropy_R for c in chunks])
    )
    return TokenScores(logprobs_R, entropy_R, *values)


def model_inputs(microbatch: Microbatch, hidden_1TD: Tensor | None = None) -> dict[str, Any]:
    """Arguments of a model's forward pass over a microbatch.

    hidden_1TD: what enters the layers instead of embedded ids, on a pipeline stage that is not the first.
    """
    entering = {"input_ids": microbatch.ids_1T} if hidden_1TD is None else {"inputs_embeds": hidden_1TD}
    return {
        **entering,
        "position_ids": microbatch.context.position_ids_1T,
        "context": microbatch.context,
        **({"routing": microbatch.routing} if microbatch.routing.is_needed else {}),
        "use_cache": False,
    }


def _head_scores(
    head: torch.nn.Module,
    reduce: "Reduction",
    temperature: float,
    entropy_needs_grad: bool,
    hidden_rD: Tensor,
    targets_r: Tensor,
) -> TokenScores:
    return reduce(head(hidden_rD), targets_r, temperature, entropy_needs_grad)


Reduction = Callable[[Tensor, Tensor, float, bool], TokenScores]
"""(logits, targets, temperature, whether entropy needs gradients) -> scores."""


def reduce_logits(logits_rV: Tensor, targets_r: Tensor, temperature: float, entropy_needs_grad: bool) -> TokenScores:
    """Log-probability of each target and entropy of its distribution, in fp32."""
    logprobs_rV = (logits_rV.float() / temperature).log_softmax(-1)
    logprobs_r = logprobs_rV.gather(-1, targets_r[:, None])[:, 0]
    with torch.set_grad_enabled(entropy_needs_grad and torch.is_grad_enabled()):
        entropy_r = -(logprobs_rV.exp() * logprobs_rV).sum(-1)
    return TokenScores(logprobs_r, entropy_r)


def has_plain_head(model: PreTrainedModel) -> bool:
    """Whether logits are the head applied to the last hidden state and nothing more.

    Some models cap or scale them (Gemma 2, Granite, Cohere) and say so in their config; their logits are computed
    by the model itself, all at once.
    """
    config = model.config.to_dict()
    return all(key not in config or config[key] in (None, 1.0) for key in LOGIT_CHANGES)


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
