"""One attention function for training and generation, plugged into transformers' attention interface.

transformers hands unknown forward arguments on to the attention function, so each pass brings its own *context*
that knows how its tokens are laid out: several sequences packed in one row (here), or one token for each of many
KV slots (`plait.rollout.kv_slots`). Model definitions stay transformers' own.

Shapes inside: N query heads, M key/value heads, H head size, T packed tokens, B sequences, S longest sequence.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "plait"


SHAPE_MULTIPLE = 128
"""Rows are filled up to a multiple of this with tokens that nobody looks at, so that few shapes ever occur: oneDNN
compiles a bf16 matrix product anew for each shape, which costs more than the filling."""


MAX_DENSE_LENGTH = 256
"""Longest sequence whose scores are held as a matrix, on a CPU: there the flash operator's backward pass took 3 to 6
times as long at lengths of 50 to 100 (docs/log.md). Beyond it the flash operator's memory, linear in length, counts."""


def _dense_causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """softmax(q k^T scaling + causal mask) v, softmax in fp32; [B, N, S, H]."""
    num, num_heads, length, head_size = query.shape
    num_kv_heads = key.shape[1]
    # Query heads that share a key/value head are rows of one product.
    grouped = (query * scaling).reshape(num, num_kv_heads, -1, head_size)
    scores = (grouped @ key.transpose(-1, -2)).float().view(num, num_heads, length, length)
    hidden = torch.full((length, length), -torch.inf, device=query.device).triu(1)
    weights = (scores + hidden).softmax(-1).to(value.dtype).view(num, num_kv_heads, -1, length)
    return (weights @ value).view(num, num_heads, length, head_size)


def filling(lengths: list[int], num_tokens: int | None = None, multiple: int = 1) -> list[int]:
    """Lengths of the filling sequences that bring the sum to num_tokens, or to a multiple of SHAPE_MULTIPLE.

    None is longer than the longest sequence, so that attention is not padded further. Where num_tokens and all lengths
    are multiples of `multiple`, so are those of the filling.
    """
    missing = -sum(lengths) % SHAPE_MULTIPLE if num_tokens is None else num_tokens - sum(lengths)
    assert missing >= 0, f"{sum(lengths)} tokens do not fit in {num_tokens}"
    longest = max(lengths, default=-(-SHAPE_MULTIPLE // multiple) * multiple)
    whole, rest = divmod(missing, longest)
    return [longest] * whole + [rest] * (rest > 0)


class AttentionContext(Protocol):
    """How the tokens of one forward pass attend to each other."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1 or B, N, T, H], key and value [1 or B, M, T, H] -> [1 or B, T, N, H]."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: AttentionContext,
    scaling: float,
    **ignored: Any,
) -> tuple[Tensor, None]:
    return context.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


class PassContext(AttentionContext, Protocol):
    """The attention of a training or scoring pass, with the positions of its tokens in their sequences."""

    @property
    def position_ids_1T(self) -> Tensor: ...


def register() -> None:
    """Make "plait" known to transformers; models are loaded with `attn_implementation="plait"`."""
    AttentionInterface.register(NAME, _attention)


class PackedAttention:
    """Causal attention kept within each of several sequences that stand one after the other in one row.

    Linear layers see only real tokens. For attention alone the sequences are laid out right-padded: under a causal
    mask no real token sees the padding behind it, so no mask is needed and nothing is computed twice.
    """

    def __init__(self, lengths: list[int], device: torch.device | str = "cpu"):
        assert lengths, "expected at least one sequence"
        assert min(lengths) > 0, "expected sequences of at least one token"
        lengths_B = torch.tensor(lengths)
        self.lengths = tuple(lengths)
        self.num_sequences, self.longest = len(lengths), max(lengths)
        position_S = torch.arange(self.longest)
        is_real_BS = position_S < lengths_B[:, None]
        starts_B = lengths_B.cumsum(0) - lengths_B
        self._from_packed = torch.where(is_real_BS, starts_B[:, None] + position_S, 0).flatten().to(device)
        self._to_packed = is_real_BS.flatten().nonzero()[:, 0].to(device)
        self._is_dense = len(self._to_packed) == len(self._from_packed)
        self.position_ids_1T = torch.cat([torch.arange(n) for n in lengths])[None].to(device)

    def pad(self, packed: Tensor) -> Tensor:
        """[1, heads, T, H] -> [B, heads, S, H]."""
        rows = packed[0].transpose(0, 1)
        if not self._is_dense:
            rows = rows.index_select(0, self._from_packed)
        return rows.unflatten(0, (self.num_sequences, self.longest)).transpose(1, 2)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        return self.attend_padded(self.pad(query), self.pad(key), self.pad(value), scaling)

    def attend_padded(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """[B, heads, S, H] each -> packed [1, T, N, H]."""
        if query.device.type == "cpu" and self.longest <= MAX_DENSE_LENGTH:
            out = _dense_causal_attention(query, key, value, scaling)
        else:
            out = scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
            )
        rows = out.transpose(1, 2).flatten(0, 1)
        return (rows if self._is_dense else rows.index_select(0, self._to_packed))[None]
