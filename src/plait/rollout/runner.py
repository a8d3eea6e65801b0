"""The engine's view of the model: prefill prompts into slots, decode one token per slot."""

import torch
from torch import Tensor, nn

from plait.rollout.kv_slots import DecodeAttention, KVSlots, PrefillAttention


class ModelRunner:
    """Runs the very module that the trainer updates, so train equals sample by construction."""

    def __init__(self, model: nn.Module, *, num_slots: int, max_sequence_tokens: int):
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

    @torch.inference_mode()
    def prefill(self, prompts: list[tuple[int, ...]], slots_of_prompts: list[list[int]]) -> Tensor:
        """Compute prompts once each, leave their keys and values in the slots; next-token logits [prompts, V]."""
        context = PrefillAttention(self.slots, [len(p) for p in prompts], slots_of_prompts, self._device)
        ids = torch.tensor([i for prompt in prompts for i in prompt], device=self._device)
        last = torch.tensor([len(p) for p in prompts], device=self._device).cumsum(0) - 1
        return self._logits(ids[None], context.position_ids_1T, context, last)[0]

    @torch.inference_mode()
    def decode(self, tokens_n: Tensor, positions_n: Tensor, longest: int) -> Tensor:
        """One more token in each of the first n slots; next-token logits [n, V]."""
        context = DecodeAttention(self.slots, positions_n, longest)
        return self._logits(tokens_n[:, None], positions_n[:, None], context, 1)[:, -1]

    def _logits(self, ids: Tensor, positions: Tensor, context: object, keep: Tensor | int) -> Tensor:
        return self._model(
            input_ids=ids, position_ids=positions, context=context, use_cache=False, logits_to_keep=keep
        ).logits
