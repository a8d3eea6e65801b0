"""Ulysses attention (2309.14509): from some tokens of all heads to all tokens of some heads, and back.

Any attention runs in between, here the packed one on whole rows. Query heads must be a multiple of the ranks. Key/value
heads too, or the ranks a multiple of them: then each is copied to the ranks whose query heads share it.

Shapes: T tokens of the whole row, t = T/c here, N query heads, M key/value heads, H head size.
"""

import torch.distributed as dist
from torch import Tensor

from plait.models.attention import PackedAttention
from plait.parallel.exchange import exchange


class UlyssesAttention:
    """Attention of a whole packed row whose tokens are cut, in order, over the ranks of `group`."""

    def __init__(self, whole: PackedAttention, position_ids_1T: Tensor, group: dist.ProcessGroup):
        """whole: of the row before it was cut. position_ids_1T: of this rank's tokens."""
        self.position_ids_1T = position_ids_1T
        self._whole, self._group = whole, group

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """query [1, N, t, H], key and value [1, M, t, H] -> [1, t, N, H]."""
        c = self._group.size()
        copies = max(1, c // key.shape[1])
        query, key, value = (
            self._heads_apart(x) for x in (query, *(x.repeat_interleave(copies, 1) for x in (key, value)))
        )
        return self._tokens_apart(self._whole.attend(layer, query, key, value, scaling))

    def _heads_apart(self, x: Tensor) -> Tensor:
        """[1, heads, t, H] -> [1, heads/c, T, H]."""
        assert x.shape[1] % self._group.size() == 0, f"{x.shape[1]} heads for {self._group.size()} ranks"
        got = exchange(x[0].unflatten(0, (self._group.size(), -1)), None, None, self._group)
        return got.transpose(0, 1).flatten(1, 2)[None]  # [c, heads/c, t, H] before

    def _tokens_apart(self, x: Tensor) -> Tensor:
        """[1, T, heads/c, H] -> [1, t, heads, H]."""
        got = exchange(x[0].unflatten(0, (self._group.size(), -1)), None, None, self._group)
        return got.transpose(0, 1).flatten(1, 2)[None]  # [c, t, heads/c, H] before
