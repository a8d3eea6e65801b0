"""Loss reductions as one weight per sequence, fixed before the first microbatch of an update.

The loss of an update is the sum over its tokens of weight times per-token loss. Weights count every sequence that
the update is made of, those included whose pass is skipped because their advantage is zero; so neither microbatches
nor ranks nor skipping can change the loss: they only decide in which order it is added up.
"""

from typing import Literal

import torch
from torch import Tensor

Reduction = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def sequence_weights(num_loss_tokens_B: Tensor, reduction: Reduction, *, max_tokens: int) -> Tensor:
    """Weight of each loss token of each sequence, float64 [B]; sequences without loss tokens get 0.

    "token-mean": 1 / (all loss tokens): long sequences pull more.
    "seq-mean-token-mean": 1 / (B n_i): every sequence pulls alike, its tokens less the longer it is.
    "seq-mean-token-sum-norm": 1 / (B max_tokens): every token pulls alike, whatever the batch holds
    (Dr. GRPO, arXiv 2503.20783).
    B counts the sequences with at least one loss token.
    """
    assert num_loss_tokens_B.ndim == 1, "expected one count per sequence"
    counts_B = num_loss_tokens_B.double()
    used_B = counts_B > 0
    num_sequences = used_B.sum().clamp(min=1)
    if reduction == "token-mean":
        weights_B = torch.ones_like(counts_B) / counts_B.sum().clamp(min=1)
    elif reduction == "seq-mean-token-mean":
        weights_B = 1 / (num_sequences * counts_B.clamp(min=1))
    else:
        weights_B = torch.ones_like(counts_B) / (num_sequences * max_tokens)
    return torch.where(used_B, weights_B, torch.zeros_like(weights_B))
