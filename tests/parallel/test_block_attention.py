"""Attention block by block, merged, equals attention over all keys; operators of other devices take its arguments."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from plait.parallel.block_attention import block_attention, block_attention_backward, merge

SCALING = 0.3


def _plain(query, key, value, hidden):
    shared_by = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(shared_by, 1) for x in (key, value))
    scores = (SCALING * query @ key.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_blocks_merge_to_the_whole(num_kv_heads):
    """Keys in a causal block of the queries' own and one that lies before all of them."""
    generator = torch.Generator().manual_seed(0)
    query, d_out = (torch.randn(2, 4, 6, 8, generator=generator) for _ in range(2))
    key, value = (torch.randn(2, num_kv_heads, 15, 8, generator=generator) for _ in range(2))
    hidden = torch.cat([torch.zeros(6, 9), torch.ones(6, 6).triu(1)], 1).bool()
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    expected, expected_lse = _plain(*leaves, hidden)
    expected.backward(d_out)

    blocks = [(slice(0, 9), False), (slice(9, 15), True)]
    out, lse = torch.zeros_like(query), torch.full(query.shape[:3], -torch.inf)
    for keys, is_causal in blocks:
        merge(
            out, lse, *block_attention(query, key[:, :, keys], value[:, :, keys], is_causal=is_causal, scaling=SCALING)
        )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    d_query, d_key, d_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for keys, is_causal in blocks:
        d_q, d_key[:, :, keys], d_value[:, :, keys] = block_attention_backward(
            d_out, query, key[:, :, keys], value[:, :, keys], out, lse, is_causal=is_causal, scaling=SCALING
        )
        d_query += d_q
    for got, leaf in zip((d_query, d_key, d_value), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_operators_for_gpus_take_these_arguments(dtype):
    """Shapes and signatures alone, on tensors without data: no GPU computes here."""
    with FakeTensorMode():
        query = torch.empty(2, 4, 40, 16, dtype=dtype, device="cuda")
        key = torch.empty(2, 2, 24, 16, dtype=dtype, device="cuda")
        out, lse = block_attention(query, key, key, is_causal=False, scaling=SCALING)
        assert out.shape == query.shape
        assert lse.shape == (2, 4, 40)
        assert lse.dtype == torch.float32
        whole = torch.empty(2, 4, 40, device="cuda")
        made = block_attention_backward(out, query, key, key, out, whole, is_causal=False, scaling=SCALING)
        assert [x.shape for x in made] == [query.shape, key.shape, key.shape]
        assert {x.dtype for x in made} == {dtype}
