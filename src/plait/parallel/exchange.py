"""Rows of a tensor to other ranks and their gradients back: the all-to-all of Ulysses and of experts."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor


def exchange(x: Tensor, receives: list[int] | None, sends: list[int] | None, group: dist.ProcessGroup) -> Tensor:
    """Rows of x, `sends` of them to each rank in order, for the `receives` rows of each; None: in equal parts."""
    got: Tensor = _Exchange.apply(x, receives, sends, group)
    return got


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, receives: Any, sends: Any, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = (receives, sends), group
        return _sent(x, receives, sends, group)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        receives, sends = ctx.rows
        return _sent(d_out, sends, receives, ctx.group), None, None, None


def _sent(x: Tensor, receives: Any, sends: Any, group: dist.ProcessGroup) -> Tensor:
    # The functional form: selective recomputation keeps what it brings (plait.parallel.recompute).
    got: Tensor = functional.wait_tensor(functional.all_to_all_single(x.contiguous(), receives, sends, group))
    return got
