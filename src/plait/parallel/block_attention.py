"""Attention of some queries to some keys, with the log-sum-exp of their scores, and its gradients given those of all.

Softmax over all keys is put together from blocks of them: with o_i the output over block i alone and l_i the
log-sum-exp of its scores, l = log sum_i e^{l_i} and o = sum_i e^{l_i - l} o_i (2310.01889). In backward a block needs
the whole o and l only: its weights are e^{score - l}.

PyTorch's own operators are used, whose names differ by device and dtype; nothing else does.

Shapes: b sequences, N query heads, M key/value heads, q queries, k keys, H head size; query and output [b, N, q, H],
key and value [b, M, k, H], lse [b, N, q].
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_aten = torch.ops.aten


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp in fp32). is_causal: query i sees keys up to i."""
    key, value = _for_each_query_head(query, key, value)
    if query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scaling)
        return out, lse
    if query.dtype == torch.float32:
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, is_causal, scale=scaling
        )
        return out, lse.narrow(2, 0, query.shape[2])
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scaling)
    return out, lse


def block_attention_backward(
    d_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    is_causal: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. out, lse: of these queries over all keys."""
    num_kv_heads = key.shape[1]
    key, value = _for_each_query_head(query, key, value)
    d_query, d_key, d_value = _backward(d_out, query, key, value, out, lse.contiguous(), is_causal, scaling)
    d_key, d_value = (x.unflatten(1, (num_kv_heads, -1)).sum(2) for x in (d_key, d_value))
    return d_query, d_key, d_value


def _for_each_query_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    shared_by = query.shape[1] // key.shape[1]
    if shared_by == 1:
        return key, value
    return key.repeat_interleave(shared_by, 1), value.repeat_interleave(shared_by, 1)


def _backward(
    d_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scaling: float
) -> Any:
    if query.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d_out, query, key, value, out, lse, 0.0, is_causal, scale=scaling
        )
    # Seed and offset of a dropout that is not there.
    seed, offset = (torch.zeros((), dtype=torch.int64, device=query.device) for _ in range(2))
    if query.dtype == torch.float32:
        lse = pad(lse, (0, -lse.shape[2] % EFFICIENT_LSE_MULTIPLE), value=torch.inf)
        *gradients, _ = _aten._scaled_dot_product_efficient_attention_backward(
            d_out, query, key, value, None, out, lse, seed, offset, 0.0, [True, True, True, False], is_causal,
            scale=scaling,
        )  # fmt: skip
        return gradients
    return _aten._scaled_dot_product_flash_attention_backward(
        d_out, query, key, value, out, lse, None, None, query.shape[2], key.shape[2], 0.0, is_causal, seed, offset,
        scale=scaling,
    )  # fmt: skip


EFFICIENT_LSE_MULTIPLE = 32
"""What the memory-efficient operator fills the queries of its log-sum-exp up to."""


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Add a block of keys to what queries have seen, in place, in fp32; lse starts as -inf."""
    total = torch.logaddexp(lse, block_lse)
    out.mul_((lse - total).exp()[..., None]).add_(block_out * (block_lse - total).exp()[..., None])
    lse.copy_(total)
