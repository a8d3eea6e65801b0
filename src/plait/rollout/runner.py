"""The engine's view of the model: prefill prompts, decode one token per slot."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from plait.models.attention import filling
from plait.rollout.fused import FusedDecoder, can_fuse
from plait.rollout.kv_slots import DecodeAttention, KVSlots, PrefillAttention
from plait.rollout.prompts import PrefilledPass

_DECODE_MULTIPLE = 16


class ModelRunner:
    """Runs the very module that the trainer updates, so train equals sample by construction."""

    def __init__(self, model: PreTrainedModel, *, num_slots: int, max_sequence_tokens: int, fuses: bool = True):
        config = model.config
        weight = next(model.parameters())
        self._model, self._device = model, weight.device
        head_size = config.head_dim if "head_dim" in config.to_dict() else None
        self.slots = KVSlots(
            num_layers=config.num_hidden_layers,
            num_slots=num_slots,
            num_kv_heads=config.num_key_value_heads,
            capacity=max_sequence_tokens,
            head_size=head_size or config.hidden_size // config.num_attention_heads,
            dtype=weight.dtype,
            device=self._device,
        )
        self._fused = FusedDecoder(model, self.slots) if fuses and can_fuse(model) else None

    def refresh(self) -> None:
        """Follow a change of the module's weights."""
        if self._fused is not None:
            self._fused.refresh()

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> PrefilledPass:
        """Compute distinct prompts in one pass."""
        lengths = [len(p) for p in prompts]
        extra = filling(lengths)
        context = PrefillAttention(lengths + extra, len(prompts), self._device)
        ids = torch.tensor([i for prompt in prompts for i in prompt] + [0] * sum(extra), device=self._device)
        last = torch.tensor(lengths, device=self._device).cumsum(0) - 1
        logits_BV = self._logits(ids[None], context.position_ids_1T, context, last)[0]
        return PrefilledPass(context.keys, context.values, logits_BV)

    @torch.inference_mode()
    def decode(self, tokens_n: Tensor, positions_n: Tensor, longest: int) -> Tensor:
        """One more token in each of the first n slots; next-token logits [n, V]."""
        num = len(tokens_n)
        # Free slots are decoded along so that few shapes occur; what they write at position 0 a prefill overwrites.
        extra = min(-num % _DECODE_MULTIPLE, self.slots.num_slots - num)
        tokens_n, positions_n = pad(tokens_n, (0, extra)), pad(positions_n, (0, extra))
        if self._fused is not None:
            return self._fused.decode(tokens_n, positions_n, longest)[:num]
        context = DecodeAttention(self.slots, positions_n, longest)
        return self._logits(tokens_n[:, None], positions_n[:, None], context, 1)[:num, -1]

    def _logits(self, ids: Tensor, positions: Tensor, context: object, keep: Tensor | int) -> Tensor:
        return self._model(
            input_ids=ids, position_ids=positions, context=context, use_cache=False, logits_to_keep=keep
        ).logits
