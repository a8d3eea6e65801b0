"""Every axis and product equals the unsharded model: loss 1e-5, each gradient 1e-4; sequences of unequal length."""

import equality
import pytest

DATA = [
    ("qwen3", "dp2", {}),
    ("qwen3_moe", "dp2", {}),
    ("qwen3", "fsdp2", {"zero": 1}),
    ("llama", "fsdp2", {"zero": 2}),
    ("mixtral", "fsdp2", {"zero": 3}),
    ("qwen3", "dp2fsdp2", {"zero": 1}),
    ("qwen2", "dp2fsdp2", {"zero": 2}),
    ("qwen3", "dp2fsdp2", {}),
]
TENSOR = [
    ("qwen3", "tp2", {}),
    ("llama", "tp2", {"sp": True}),
    ("qwen2", "tp2", {"sp": True}),
    ("mistral", "tp2", {}),
    ("qwen3_moe", "tp2", {"sp": True}),
    ("mixtral", "tp2", {}),
    ("qwen3", "tp4", {"sp": True}),
    ("qwen3", "fsdp2tp2", {}),
    ("qwen3_moe", "fsdp2tp2", {"sp": True, "zero": 1}),
    ("qwen3", "dp2tp2", {"sp": True}),
    ("qwen2", "dp2fsdp2tp2", {"sp": True, "zero": 2}),
]
RECOMPUTE = [
    ("qwen3", "fsdp2", {"recompute": "full"}),
    ("qwen3", "fsdp2tp2", {"recompute": "selective", "sp": True}),
    ("mixtral", "tp2", {"recompute": "full", "sp": True}),
]
OFFLOAD = [("qwen3", "fsdp2", {"offload": "all"})]


@pytest.mark.parametrize(("kind", "text", "settings"), DATA + TENSOR + RECOMPUTE + OFFLOAD)
def test_equals_the_unsharded_model(groups, kind, text, settings):
    world = equality.make_layout(text, **settings).world_size
    groups[world].run(equality.compare, kind, text, settings)


@pytest.mark.parametrize(("text", "settings"), [("fsdp2", {}), ("tp2", {"sp": True})])
def test_tied_embeddings_and_biases(ranks2, text, settings):
    """The table's gradient is the sum of both its uses; a bias after a row-wise product is added once."""
    changes = {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "pad_token_id": 5}
    ranks2.run(equality.compare, "llama", text, settings, changes)


@pytest.mark.parametrize(("text", "settings"), [("dp2", {}), ("fsdp2", {"zero": 1}), ("dp2tp2", {"sp": True})])
def test_a_rank_without_sequences_takes_part(groups, text, settings):
    world = equality.make_layout(text, **settings).world_size
    groups[world].run(equality.compare, "qwen3_moe", text, settings, {}, (40,))
