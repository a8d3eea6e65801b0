"""Importance weights between the engine that sampled and the trainer.

The same weights give other probabilities in another program (kernels, dtype, batch shape, quantisation) and older
weights do so all the more. The sampled tokens come from the engine's distribution; the weight pi_old / pi_rollout
makes them count as if the trainer had sampled them. It is a constant: no gradient flows through it.

Shapes: R response tokens of whole sequences; `sequence_R` says which sequence a token belongs to.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from plait.algorithms.ratios import bounded_exp, sequence_means, sequence_sums

Level = Literal["token", "sequence", "geometric_mean"]
Correction = Literal["truncate", "mask"]


class ImportanceWeights(NamedTuple):
    """weights_R: factor of each token's loss. kept_R: the weight is not masked. ratio_R: before either bound."""

    weights_R: Tensor
    kept_R: Tensor
    ratio_R: Tensor


@torch.no_grad()
def importance_weights(
    old_logprobs_R: Tensor,
    rollout_logprobs_R: Tensor,
    sequence_R: Tensor,
    *,
    level: Level,
    correction: Correction,
    low: float = 0.0,
    high: float,
) -> ImportanceWeights:
    """Weights in [low, high] from d = log pi_old - log pi_rollout.

    The ratio, by level: "token" exp(d_t): little variance, biased, since the states were also reached by the engine;
    "sequence" exp(sum_t d_t) for every token of a sequence: unbiased, and far from 1 in long sequences;
    "geometric_mean" exp(mean_t d_t): comparable between lengths, meant for masking.
    By correction: "truncate" clamps the ratio into the bounds (TIS, Espeholt et al., arXiv 1802.01561; for engines
    fengyao.notion.site/off-policy-rl); "mask" is the ratio inside the bounds and 0 outside (MIS; IcePop,
    arXiv 2510.18855).

    Masked tokens stay in the denominators: reductions count every loss token of the update (contract "all tokens"),
    so masking makes the loss smaller, not the other tokens larger. For the other reading give kept_counts to
    reduce.sequence_weights. Two levels together (say token weights under a geometric-mean mask): multiply weights_R
    of the one by kept_R of the other. Ratios above e^20 count as e^20.
    """
    assert 0 <= low < high, f"bounds {low}, {high} are not in order"
    difference_R = old_logprobs_R - rollout_logprobs_R
    if level == "sequence":
        difference_R = sequence_sums(difference_R, sequence_R)
    elif level == "geometric_mean":
        difference_R = sequence_means(difference_R, sequence_R)
    ratio_R = bounded_exp(difference_R).to(old_logprobs_R.dtype)
    if correction == "truncate":
        return ImportanceWeights(ratio_R.clamp(low, high), torch.ones_like(ratio_R, dtype=torch.bool), ratio_R)
    kept_R = (ratio_R >= low) & (ratio_R <= high)
    return ImportanceWeights(torch.where(kept_R, ratio_R, 0), kept_R, ratio_R)


def kept_counts(kept_R: Tensor, sequence_R: Tensor, num_sequences: int) -> Tensor:
    """Kept tokens of each sequence, int64 [B]: the denominator "surviving tokens" for reduce.sequence_weights."""
    return torch.bincount(sequence_R[kept_R].long(), minlength=num_sequences)


def effective_sample_share(weights_R: Tensor) -> float:
    """(sum w)^2 / (n sum w^2): 1 for equal weights, 1 / n where one token has it all, 0 where all weights are 0."""
    total, squares = float(weights_R.double().sum()), float(weights_R.double().square().sum())
    return total**2 / (len(weights_R) * squares) if squares > 0 else 0.0
