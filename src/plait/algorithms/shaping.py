"""What is added to the verifier's score before advantages are taken. Shapes: B sequences; all results float64 [B].

Shaped rewards decide advantages only. Accuracy, pass rates and filters look at the score itself: a length term makes
equal answers differ, and a group in which all are wrong would seem to have a signal.
"""

import torch
from torch import Tensor


def soft_overlong_penalty(lengths_B: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """0 up to max_tokens - buffer_tokens, then linear to -1 at max_tokens, -1 beyond (DAPO, arXiv 2503.14476).

    lengths_B: response tokens of each sequence.
    """
    assert 0 < buffer_tokens <= max_tokens, f"buffer {buffer_tokens} is not within 1 and {max_tokens}"
    start = max_tokens - buffer_tokens
    return ((start - lengths_B.double()) / buffer_tokens).clamp(-1, 0)


def length_reward(lengths_B: Tensor, is_correct_B: Tensor, group_B: Tensor, counted_B: Tensor) -> Tensor:
    """x where the answer is correct, min(0, x) where it is not, x = 0.5 - (l - min l) / (max l - min l) in the group.

    Kimi k1.5, arXiv 2501.12599: among siblings the shorter correct answer earns more, and a wrong one
    earns nothing by being short. A group of equal lengths, or of one counted sample, gets 0; so does who is not
    counted. The caller multiplies by its weight.
    """
    assert lengths_B.shape == is_correct_B.shape == group_B.shape == counted_B.shape, "expected vectors of equal length"
    rewards_B = torch.zeros(len(lengths_B), dtype=torch.float64, device=lengths_B.device)
    for group in torch.unique(group_B[counted_B]):
        members_B = (group_B == group) & counted_B
        lengths = lengths_B[members_B].double()
        spread = lengths.max() - lengths.min()
        if spread > 0:
            share = 0.5 - (lengths - lengths.min()) / spread
            rewards_B[members_B] = torch.where(is_correct_B[members_B], share, share.clamp(max=0))
    return rewards_B


def with_format_reward(scores_B: Tensor, format_scores_B: Tensor, *, weight: float) -> Tensor:
    """(1 - weight) score + weight format score: stays within the range of the two. weight between 0 and 1."""
    assert 0 <= weight <= 1, f"weight {weight} is not between 0 and 1"
    assert scores_B.shape == format_scores_B.shape, "expected one format score per score"
    return (1 - weight) * scores_B.double() + weight * format_scores_B.double()
