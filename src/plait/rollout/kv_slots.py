"""Keys and values of the samples that are being decoded: one slot each, occupied slots first.

Shapes: L layers, S slots, n occupied slots, N query heads, M key/value heads, H head size, C capacity in tokens.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from plait.models.attention import PackedAttention


class KVSlots:
    """Preallocated keys and values [S, C, M, H] per layer: what one token writes is contiguous."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        capacity: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ):
        shape = (num_slots, capacity, num_kv_heads, head_size)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.num_slots, self.capacity = num_slots, capacity

    @property
    def num_bytes(self) -> int:
        """Memory that these slots take: 2 L S M C H times the size of a number."""
        return sum(cache.nbytes for cache in (*self.keys, *self.values))

    def fill(self, slots: list[int], rows: list[int], keys: list[Tensor], values: list[Tensor]) -> None:
        """Start slots from rows of keys and values [B, S, M, H] per layer.

        What lies behind a shorter prompt is overwritten token by token before any query may see it.
        """
        slots_n, rows_n = torch.tensor(slots, device=keys[0].device), torch.tensor(rows, device=keys[0].device)
        longest = keys[0].shape[1]
        for caches, sources in ((self.keys, keys), (self.values, values)):
            for cache, source in zip(caches, sources, strict=True):
                cache[slots_n, :longest] = source[rows_n]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one slot's first `length` tokens over another slot, in every layer."""
        for cache in (*self.keys, *self.values):
            cache[target, :length] = cache[source, :length]


class PrefillAttention(PackedAttention):
    """Attention of packed prompts that keeps their keys and values: [prompts, S, M, H] per layer, S the longest.

    num_prompts: the first sequences; filling sequences come after them.
    """

    def __init__(self, lengths: list[int], num_prompts: int, device: torch.device):
        super().__init__(lengths, device)
        self._num_prompts = num_prompts
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        key, value = self.pad(key), self.pad(value)
        assert layer == len(self.keys), f"layer {layer} attends after {len(self.keys)} others"
        self.keys.append(key[: self._num_prompts].transpose(1, 2))
        self.values.append(value[: self._num_prompts].transpose(1, 2))
        return self.attend_padded(self.pad(query), key, value, scaling)


def visible(positions_n: Tensor, longest: int, dtype: torch.dtype) -> Tensor:
    """What is added to the scores [n, 1, 1, longest]: 0 up to each new token's position, -inf behind it.

    As numbers and not as truth values, because attention would convert those anew in every layer.
    """
    hidden = torch.arange(longest, device=positions_n.device) > positions_n[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions_n.device)
    return mask.masked_fill_(hidden, -torch.inf)[:, None, None]


class DecodeAttention:
    """Attention of one new token in each of the first n slots to everything before it in its slot.

    positions_n: index of the new token in its sequence; longest: largest of them plus one.
    """

    def __init__(self, slots: KVSlots, positions_n: Tensor, longest: int):
        self._slots, self._longest = slots, longest
        self._positions_n = positions_n
        self._rows_n = torch.arange(len(positions_n), device=positions_n.device)
        self._mask_n11C = visible(positions_n, longest, slots.keys[0].dtype)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [n, N, 1, H], key and value [n, M, 1, H] -> [n, 1, N, H]."""
        keys, values = self._slots.keys[layer], self._slots.values[layer]
        keys[self._rows_n, self._positions_n] = key[:, :, 0]
        values[self._rows_n, self._positions_n] = value[:, :, 0]
        num, num_kv_heads = key.shape[0], key.shape[1]
        # The query heads that share a key/value head stand in the place of queries: no copy of keys is made.
        grouped = query.view(num, num_kv_heads, -1, query.shape[-1])
        out = scaled_dot_product_attention(
            grouped,
            keys[:num, : self._longest].transpose(1, 2),
            values[:num, : self._longest].transpose(1, 2),
            attn_mask=self._mask_n11C,
            scale=scaling,
        )
        return out.reshape(num, 1, -1, query.shape[-1])
