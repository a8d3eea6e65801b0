"""What several losses share: powers of e that cannot overflow, and sums and means over sequences.

Shapes: R response tokens of any number of sequences. `sequence_R` (integers from 0) says which sequence a token
belongs to; a sequence is always whole inside one call.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Exponents above this count as this, in value and in gradient: e^20 = 4.9e8. fp32 overflows at e^88, and the backward
pass of an infinite ratio is NaN even where a clip multiplies it by 0. No bound is needed below: a ratio that underflows
to 0 has the gradient 0 to within 1e-38."""


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp(min(x, MAX_LOG_RATIO)), whose gradient is its own value everywhere.

    Beyond the bound the gradient keeps its direction at a bounded size; torch.clamp would make it 0, and the tokens
    that moved farthest would be the ones that nothing pulls back.
    """
    return (exponent + (exponent.clamp(max=MAX_LOG_RATIO) - exponent).detach()).exp()


def sequence_sums(values_R: Tensor, sequence_R: Tensor) -> Tensor:
    """Sum over the tokens of its sequence, at each token, float64 [R]. No gradient.

    float64, so that the order in which a device adds does not show after rounding to fp32.
    """
    assert values_R.shape == sequence_R.shape, "expected one sequence number per token"
    values_R = values_R.detach().double()
    num_sequences = int(sequence_R.max()) + 1 if len(sequence_R) else 0
    return values_R.new_zeros(num_sequences).index_add(0, sequence_R.long(), values_R)[sequence_R.long()]


def sequence_means(values_R: Tensor, sequence_R: Tensor) -> Tensor:
    """Mean over the tokens of its sequence, at each token, float64 [R]. No gradient."""
    return sequence_sums(values_R, sequence_R) / sequence_sums(torch.ones_like(values_R), sequence_R)
