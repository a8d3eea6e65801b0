"""Small random models of every family, sequences of unequal length, and an RL loss with all its streams."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from plait.algorithms.kl import ESTIMATORS
from plait.algorithms.losses import POLICY_LOSSES, ClipSettings, TokenBatch
from plait.models import attention
from plait.models.norms import swap_norms
from plait.models.routing import prepare_routers
from plait.stages.packing import TokenSequence

TEMPERATURE = 0.9
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DENSE = {
    "qwen3": {"head_dim": 16},
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": None},
}
SPARSE = {
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
    },
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
}
KINDS = DENSE | SPARSE


def make_model(kind, dtype=torch.float32, **changes):
    """A causal LM of a family in KINDS; the same weights every time. Vectors are random too, not all ones or zeros."""
    attention.register()
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    swap_norms(model)
    prepare_routers(model)
    return model.to(dtype).eval()


def make_sequences(lengths=(23, 5, 40, 17, 31, 9, 12, 28), seed=0, vocab=SIZES["vocab_size"]):
    """Random sequences; the first third of each is prompt, and one in eight of the others is not a loss token."""
    generator = np.random.default_rng(seed)
    made = []
    for length in lengths:
        mask = generator.random(length) < 0.875
        mask[: max(1, length // 3)] = False
        mask[-1] = True
        made.append(TokenSequence(generator.integers(0, vocab, length), mask))
    return made


@dataclass(frozen=True)
class Streams:
    """What the loss reads per loss token, by the caller's index of the sequence."""

    old: list[Tensor]
    ref: list[Tensor]
    advantage: list[Tensor]
    weight: Tensor


def make_streams(sequences, base, seed=1):
    """base: log-probabilities near which the old and reference ones lie (those of the unsharded model)."""
    generator = torch.Generator().manual_seed(seed)

    def near(x, by):
        return x + by * torch.randn(x.shape, generator=generator)

    total = sum(len(x) for x in base)
    return Streams(
        old=[near(x, 0.1) for x in base],
        ref=[near(x, 0.2) for x in base],
        advantage=[torch.randn(1, generator=generator).expand(len(x)) for x in base],
        weight=torch.full((len(sequences),), 1.0 / total),
    )


def rl_loss(streams):
    """loss_of(microbatch, scores): clipped policy loss + 0.1 k3 KL - 0.01 entropy, weighted; a sum over loss tokens."""

    def loss_of(microbatch, scores):
        owners, places = microbatch.sequence_R.tolist(), microbatch.place_R.tolist()

        def pick(stream):
            picked = [stream[owner][place] for owner, place in zip(owners, places, strict=True)]
            return torch.stack(picked) if picked else scores.logprobs_R.new_zeros(0)

        tokens = TokenBatch(
            logprobs_R=scores.logprobs_R,
            old_logprobs_R=pick(streams.old),
            rollout_logprobs_R=pick(streams.old),
            advantages_R=pick(streams.advantage),
            sequence_R=microbatch.sequence_R,
        )
        per_token = POLICY_LOSSES["ppo_clip"](tokens, ClipSettings(0.2, 0.2, None, None))
        kl_R = ESTIMATORS["k3"](scores.logprobs_R, pick(streams.ref))
        loss_R = per_token.loss_R + 0.1 * kl_R - 0.01 * scores.entropy_R
        return (streams.weight[microbatch.sequence_R] * loss_R).sum()

    return loss_of
