"""Decoding one token per slot with few, fused operators, for the common dense decoder (Qwen3, Qwen2, Llama, Mistral).

transformers' module spends most of a decode step of a small model on the number of its operators. Here query, key and
value are one product, gate and up another, residuals are added by the products, and rotation and cache take four
operators. The weights are derived copies of the module's, made anew after each update and never edited; other
architectures decode through the module itself. Same arithmetic: tests compare both, and both with the trainer.

Shapes: n slots, N query heads, M key/value heads, H head size, D model width, F feed-forward width, C capacity.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import PreTrainedModel

from plait.rollout.kv_slots import KVSlots, visible

ARCHITECTURES = frozenset({"qwen3", "qwen2", "llama", "mistral"})
STATIC_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})
"""Kinds of rotary embedding whose angles depend on the position only, so that a table can hold them."""


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether the model is of a kind that is decoded here."""
    config = model.config.to_dict()
    rope = config.get("rope_parameters") or {}
    return (
        config["model_type"] in ARCHITECTURES
        and config["hidden_act"] == "silu"
        and rope.get("rope_type", "default") in STATIC_ROTATIONS
        and not config.get("mlp_bias", False)
        and model.model.layers[0].self_attn.o_proj.bias is None
    )


def _norm(x_nD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return rms_norm(x_nD, weight_D.shape, weight_D, eps)


class _Layer:
    """Derived weights of one decoder layer."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.qkv = torch.cat([p.weight for p in projections])
        self.qkv_bias = None if projections[0].bias is None else torch.cat([p.bias for p in projections])
        self.out_T = attention.o_proj.weight.t()
        self.gate_up = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])
        self.down_T = mlp.down_proj.weight.t()
        self.first_norm, self.second_norm = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.eps = layer.input_layernorm.variance_epsilon
        self.qk_norm: Tensor | None = None
        head_size, scaling = attention.head_dim, attention.scaling
        self.num_heads = attention.q_proj.weight.shape[0] // head_size
        self.num_kv_heads = attention.k_proj.weight.shape[0] // head_size
        self.head_size, self.scaling = head_size, scaling
        if "q_norm" in dict(attention.named_children()):
            self.qk_eps = attention.q_norm.variance_epsilon
            heads = (
                attention.q_norm.weight.expand(self.num_heads, -1),
                attention.k_norm.weight.expand(self.num_kv_heads, -1),
            )
            self.qk_norm = torch.cat(heads)


class FusedDecoder:
    """Holds the derived weights and the rotation table; `refresh` follows every change of the module's weights."""

    def __init__(self, model: PreTrainedModel, slots: KVSlots):
        self._model, self._slots = model, slots
        weight = model.model.embed_tokens.weight
        positions = torch.arange(slots.capacity, device=weight.device)[None]
        cos, sin = model.model.rotary_emb(weight[:1, None], positions)
        # rotate_half negates the second half of what it moves to the front: the sign lives in the table.
        half = cos.shape[-1] // 2
        sign = torch.cat([-torch.ones(half), torch.ones(half)]).to(sin)
        self._cos_CH, self._sin_CH = cos[0], sin[0] * sign
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Derive the fused weights again."""
        self._layers = [_Layer(layer) for layer in self._model.model.layers]

    def decode(self, tokens_n: Tensor, positions_n: Tensor, longest: int) -> Tensor:
        """Next-token logits [n, V]; keys and values of the tokens are left in the slots."""
        body, num = self._model.model, len(tokens_n)
        x_nD = body.embed_tokens(tokens_n)
        cos_n1H, sin_n1H = self._cos_CH[positions_n, None], self._sin_CH[positions_n, None]
        mask_n11C = visible(positions_n, longest, x_nD.dtype)
        places_n = torch.arange(num, device=positions_n.device) * self._slots.capacity + positions_n
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, x_nD, cos_n1H, sin_n1H, mask_n11C, places_n, longest)
            x_nD = torch.addmm(x_nD, attended, layer.out_T)
            gate_up = linear(_norm(x_nD, layer.second_norm, layer.eps), layer.gate_up)
            gate, up = gate_up.chunk(2, -1)
            x_nD = torch.addmm(x_nD, silu(gate).mul_(up), layer.down_T)
        return self._model.lm_head(body.norm(x_nD))

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x_nD: Tensor,
        cos_n1H: Tensor,
        sin_n1H: Tensor,
        mask_n11C: Tensor,
        places_n: Tensor,
        longest: int,
    ) -> Tensor:
        """Attention of the new tokens [n, N H]."""
        num, num_heads, num_kv = len(x_nD), layer.num_heads, layer.num_kv_heads
        qkv = linear(_norm(x_nD, layer.first_norm, layer.eps), layer.qkv, layer.qkv_bias).view(num, -1, layer.head_size)
        qk, value = qkv.split([num_heads + num_kv, num_kv], 1)
        if layer.qk_norm is not None:
            qk = rms_norm(qk, (layer.head_size,), None, layer.qk_eps).mul_(layer.qk_norm)
        qk = torch.addcmul(qk * cos_n1H, qk.roll(layer.head_size // 2, -1), sin_n1H)
        keys, values = self._slots.keys[index], self._slots.values[index]
        keys.flatten(0, 1).index_copy_(0, places_n, qk[:, num_heads:])
        values.flatten(0, 1).index_copy_(0, places_n, value)
        # The query heads that share a key/value head stand in the place of queries: no copy of keys is made.
        out = scaled_dot_product_attention(
            qk[:, :num_heads].reshape(num, num_kv, -1, layer.head_size),
            keys[:num, :longest].transpose(1, 2),
            values[:num, :longest].transpose(1, 2),
            attn_mask=mask_n11C,
            scale=layer.scaling,
        )
        return out.reshape(num, -1)
