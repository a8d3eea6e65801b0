"""One more output of a language model: the return that it expects from here on."""

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """V = w h + b on the last hidden state; w = b = 0 at first, so that nothing is expected before it is learnt.

    Its parameters are fp32, and so is the product, whatever computes the trunk: a bf16 value near 1 is a multiple of
    1/128, and advantages are differences of values.
    """

    def __init__(self, hidden_size: int, device: torch.device | str):
        super().__init__()
        self.linear = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_nD: Tensor) -> Tensor:
        """[n, D] -> [n], fp32."""
        return self.linear(hidden_nD.float())[:, 0]
