"""Which samples, and which tokens, take part in an update. Shapes: B sequences, R response tokens; results are bool.

Filters look at scores as the verifier gave them, never at shaped rewards (shaping.py says why).
"""

from typing import Literal

import torch
from torch import Tensor


def has_signal(scores_B: Tensor, group_B: Tensor, counted_B: Tensor) -> Tensor:
    """Whether the scores of the counted samples of its group differ, at every sequence of the group [B].

    Max minus min, so rounding cannot hide or invent it. Dynamic sampling (DAPO, arXiv 2503.14476)
    replaces groups without it. It speaks for baselines made of the group; under "greedy", "batch_mean" or a critic a
    group of equal rewards does teach something.
    """
    assert scores_B.shape == group_B.shape == counted_B.shape, "expected vectors of equal length"
    signal_B = torch.zeros_like(counted_B)
    for group in torch.unique(group_B[counted_B]):
        scores = scores_B[(group_B == group) & counted_B]
        signal_B[group_B == group] = bool(scores.max() > scores.min())
    return signal_B


def without_truncated(counted_B: Tensor, truncated_B: Tensor) -> Tensor:
    """counted_B less the samples that were cut at the length limit (overlong filtering, arXiv 2503.14476).

    Give the result to everything that takes counted_B: a sample that is out of the loss must not shift its siblings'
    baseline either.
    """
    assert counted_B.shape == truncated_B.shape, "expected vectors of equal length"
    return counted_B & ~truncated_B


def fresh_tokens(
    versions_R: Tensor,
    sequence_R: Tensor,
    *,
    newest_version: int,
    max_staleness: int,
    unit: Literal["token", "sample"],
) -> Tensor:
    """Whether a token may be trained on: newest_version minus the version that sampled it is at most max_staleness [R].

    unit "token" judges each token by its own version; "sample" keeps or drops whole sequences by their oldest token.
    The two differ only where weights changed in the middle of a sample.
    """
    assert versions_R.shape == sequence_R.shape, "expected one sequence number per token"
    staleness_R = newest_version - versions_R.long()
    assert bool((staleness_R >= 0).all()), "a token is newer than the newest version"
    if unit == "sample" and len(sequence_R):
        oldest_B = staleness_R.new_zeros(int(sequence_R.max()) + 1)
        oldest_B = oldest_B.scatter_reduce(0, sequence_R.long(), staleness_R, "amax")
        staleness_R = oldest_B[sequence_R.long()]
    return staleness_R <= max_staleness
