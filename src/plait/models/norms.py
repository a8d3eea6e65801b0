"""RMS normalisation with a hand-written backward pass; the norms of a loaded model are swapped for it.

Measured on two CPU cores, bf16, 2048 x 256, forward and backward: transformers' formulation 5.8 ms, torch's own
`rms_norm` 4.1 ms, this one 1.6 ms (docs/log.md). State dicts do not change.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from transformers import PreTrainedModel

PLAIN_NORMS = frozenset(
    {"LlamaRMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "Qwen2RMSNorm", "Qwen3MoeRMSNorm", "Qwen3RMSNorm"}
)
"""transformers' classes that compute weight * x / sqrt(mean(x^2) + eps); others (Gemma adds 1 to the weight) stay."""


def _wide(x: Tensor) -> Tensor:
    """fp32 for statistics; x itself, which must not be written to, where it is no narrower already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _RMSNormFunction(torch.autograd.Function):
    """y = w x r, r = (mean(x^2) + eps)^(-1/2), statistics in fp32.

    With g = dL/dy * w and n = x r: dL/dx = r (g - n mean(g n)); dL/dw = sum over rows of dL/dy n.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        scale = vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        normed = wide * scale if wide is x else wide.mul_(scale)
        return normed.mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide = _wide(x)
        normed = wide * scale if wide is x else wide.mul_(scale)
        gradient = _wide(gradients[0])
        per_weight = gradient * normed
        of_weight = per_weight.flatten(0, -2).sum(0)
        projection = (per_weight @ _wide(weight)).div_(x.shape[-1])[..., None]
        of_x = (gradient * _wide(weight)).addcmul_(normed, projection, value=-1).mul_(scale)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


class RMSNorm(nn.Module):
    """In place of a transformers norm, with its very parameter."""

    def __init__(self, weight: nn.Parameter, eps: float):
        super().__init__()
        self.weight, self.variance_epsilon = weight, eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _RMSNormFunction.apply(hidden_states, self.weight, self.variance_epsilon)


def swap_norms(model: PreTrainedModel) -> None:
    """Replace the norms that are known to be plain."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ in PLAIN_NORMS:
                setattr(parent, name, RMSNorm(child.weight, child.variance_epsilon))
