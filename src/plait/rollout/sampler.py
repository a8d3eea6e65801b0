"""From logits to tokens: temperature, top-k, top-p, min-p, and the log-probability of what was sampled.

Shapes: n sequences, V vocabulary. One uniform number per token decides it, and it belongs to the sample, not to the
batch: the same sample meets the same number in whatever company it is decoded.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from plait.config import SamplingConfig


class Sampled(NamedTuple):
    """tokens_n int64. logprobs_n float32: log-probability at this temperature over the whole vocabulary, which is
    what a trainer computes. kept_logmass_n float32: log of the probability that truncation kept, so that
    logprobs_n - kept_logmass_n is the log-probability of the truncated distribution that was sampled from.
    """

    tokens_n: Tensor
    logprobs_n: Tensor
    kept_logmass_n: Tensor


def sample_tokens(logits_nV: Tensor, uniform_n: Tensor, sampling: SamplingConfig) -> Sampled:
    """Sample one token per row by inverting its cumulative distribution at uniform_n in [0, 1).

    Temperature 0 takes the likeliest token, with its log-probability at temperature 1.
    Truncations are applied one after the other: top-k, then top-p, then min-p; the likeliest token always stays.
    """
    logits_nV = logits_nV.float()
    if sampling.temperature == 0:
        logprobs_nV = logits_nV.log_softmax(-1)
        logprobs_n, tokens_n = logprobs_nV.max(-1)
        return Sampled(tokens_n, logprobs_n, torch.zeros_like(logprobs_n))
    logprobs_nV = (logits_nV / sampling.temperature).log_softmax(-1)
    probs_nV = logprobs_nV.exp()
    is_truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if is_truncated:
        probs_nV = probs_nV * _kept(probs_nV, sampling)
    cumulative_nV = probs_nV.cumsum(-1)
    total_n1 = cumulative_nV[:, -1:]
    # The first token whose sum lies strictly above the threshold: one of probability 0 adds nothing to the sum.
    tokens_n = torch.searchsorted(cumulative_nV, uniform_n[:, None] * total_n1, right=True)[:, 0]
    if bool((tokens_n == logits_nV.shape[-1]).any()):
        tokens_n = torch.minimum(tokens_n, _last_possible(probs_nV))
    logprobs_n = logprobs_nV.gather(-1, tokens_n[:, None])[:, 0]
    kept_n = total_n1[:, 0].log() if is_truncated else torch.zeros_like(logprobs_n)
    return Sampled(tokens_n, logprobs_n, kept_n)


def _last_possible(probs_nV: Tensor) -> Tensor:
    """Index of each row's last token with probability: rounding may not push a sample beyond it."""
    vocab = probs_nV.shape[-1]
    return vocab - 1 - (probs_nV.flip(-1) > 0).int().argmax(-1)


def _kept(probs_nV: Tensor, sampling: SamplingConfig) -> Tensor:
    """Bool [n, V]: which tokens the truncations keep."""
    sorted_nV, order_nV = probs_nV.sort(dim=-1, descending=True, stable=True)
    kept_nV = torch.ones_like(sorted_nV, dtype=torch.bool)
    if sampling.top_k > 0:
        kept_nV[:, sampling.top_k :] = False
    if sampling.top_p < 1:
        share_nV = sorted_nV * kept_nV
        share_nV = share_nV / share_nV.sum(-1, keepdim=True)
        # A token stays while the mass before it is short of top_p: the smallest set that reaches it.
        kept_nV &= (share_nV.cumsum(-1) - share_nV) < sampling.top_p
    if sampling.min_p > 0:
        kept_nV &= sorted_nV >= sampling.min_p * sorted_nV[:, :1]
    kept_nV[:, 0] = True
    return torch.zeros_like(kept_nV).scatter(-1, order_nV, kept_nV)
