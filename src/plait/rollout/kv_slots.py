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

    def move(self, source: int, target: int, length: int) -> None:
        """Copy one slot's first `length` tokens over another slot, in every layer."""
        for cache in (*self.keys, *self.values):
            cache[target, :length] = cache[source, :length]


class PrefillAttention(PackedAttention):
    """Attention of packed prompts that leaves their keys and values in slots.

    slots_of_prompts: for each prompt the slots that start from it (all samples of a group share one pass).
    """

    def __init__(self, slots: KVSlots, lengths: list[int], slots_of_prompts: list[list[int]], device: torch.device):
        super().__init__(lengths, device)
        self._slots = slots
        pairs = [(slot, prompt) for prompt, owned in enumerate(slots_of_prompts) for slot in owned]
        self._slot_n = torch.tensor([slot for slot, _ in pairs], device=device)
        self._prompt_n = torch.tensor([prompt for _, prompt in pairs], device=device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        key, value = self.pad(key), self.pad(value)
        # What lies behind a shorter prompt is overwritten token by token before any query may see it.
        self._slots.keys[layer][self._slot_n, : self.longest] = key.transpose(1, 2)[self._prompt_n]
        self._slots.values[layer][self._slot_n, : self.longest] = value.transpose(1, 2)[self._prompt_n]
        return self.attend_padded(self.pad(query), key, value, scaling)


class DecodeAttention:
    """Attention of one new token in each of the first n slots to everything before it in its slot.

    positions_n: index of the new token in its sequence; longest: largest of them plus one.
    """

    def __init__(self, slots: KVSlots, positions_n: Tensor, longest: int):
        self._slots, self._longest = slots, longest
        self._positions_n = positions_n
        self._rows_n = torch.arange(len(positions_n), device=positions_n.device)
        seen = torch.arange(longest, device=positions_n.device)
        self._mask_n11C = (seen <= positions_n[:, None])[:, None, None]

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
