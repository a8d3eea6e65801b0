"""Memory formulas, by hand; activations also against the bytes that autograd really holds."""

import json

import pytest

from plait.cost import memory
from plait.cost.model_shape import shape_of
from plait.cost.run_memory import MAX_LOGITS_PER_CHUNK, PROCESS_BYTES, engine_kv_bytes, predict_run_memory
from plait.recipe import load_run_config

SIZES = {
    "model_type": "qwen3",
    "vocab_size": 10,
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 3,
    "intermediate_size": 5,
    "tie_word_embeddings": True,
}
SHAPE = shape_of(SIZES)
"""336 parameters, 264 of them in hidden matrices."""


def test_weights_and_gradients_by_hand():
    assert memory.parameter_bytes(336, 2) == 672
    assert memory.master_bytes(336, 2) == 1344
    assert memory.master_bytes(336, 4) == 0
    assert memory.gradient_bytes(336) == 1344
    assert memory.copy_gradient_bytes(336, 2) == 672
    assert memory.copy_gradient_bytes(336, 4) == 0


@pytest.mark.parametrize(
    ("optimizer", "momentum", "expected"),
    [("adamw", 0.9, 8 * 336), ("muon", 0.9, 4 * 264 + 8 * 72), ("sgd", 0.9, 4 * 336), ("sgd", 0.0, 0)],
)
def test_moments_by_hand(optimizer, momentum, expected):
    assert memory.moment_bytes(optimizer, 264, 72, momentum) == expected


def test_slots_and_logits_by_hand():
    # 2 (keys, values) x 2 layers x 3 numbers x 8 slots x 16 tokens x 2 bytes.
    assert memory.kv_slot_bytes(SHAPE, 8, 16, 2) == 3072
    assert memory.slot_record_bytes(8, 16) == 2560
    assert memory.sampler_bytes(SHAPE, 8, 2) == 10 * 18 * 8
    assert memory.logits_bytes(SHAPE, 7, 4) == 10 * 16 * 7
    assert memory.layer_working_bytes(SHAPE, 6, 2) == 6 * (40 + 32)


def test_activations_by_hand():
    # bf16, D 4, query width 6, key width 3, F 5: norms 4 b D = 32; norms of queries and keys b 9 = 18.
    # Up to 256 tokens, S = 10: b (6 + 2 x 3) = 24 and N S (4 + 2) = N 60; output b 6 = 12; feed-forward 4 b F = 40.
    heads = SHAPE.num_heads
    assert memory.layer_activation_bytes_per_token(SHAPE, 2, 1.0, 10) == 32 + 18 + 24 + 60 * heads + 12 + 40
    assert memory.layer_activation_bytes_per_token(SHAPE, 2, 1.5, 300) == 32 + 18 + 1.5 * (36 + 4 * heads) + 12 + 40
    layer = 32 + 18 + 24 + 60 * heads + 12 + 40
    assert memory.activation_bytes(SHAPE, 100, 2, 1.0, 10) == 100 * (2 * layer + 16 + 12)
    # Recomputed: 2 layers' inputs of b D = 8, one whole layer, and what comes once.
    assert memory.recomputed_activation_bytes(SHAPE, 100, 2, 1.0, 10) == 100 * (2 * 8 + layer + 16 + 12)


def test_fused_copies_by_hand():
    # Per layer 4 x (6 + 3 + 3) and 4 x (5 + 5), in two layers of 2 bytes a number.
    assert memory.fused_copy_bytes(SHAPE, 2) == 2 * (48 + 40) * 2


def test_the_dense_length_is_the_attentions():
    from plait.models import attention

    assert memory.MAX_DENSE_LENGTH == attention.MAX_DENSE_LENGTH


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["Qwen3", "Llama"])
def test_activations_are_what_autograd_holds(dtype, kind):
    import numpy as np
    import torch
    import transformers

    from plait.models import attention
    from plait.models.norms import swap_norms
    from plait.stages.packing import TokenSequence, pack

    attention.register()
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=96, intermediate_size=112, num_hidden_layers=3, tie_word_embeddings=True, **sizes
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="plait", dtype=torch.float32)
    model = model.to(getattr(torch, dtype)).eval()
    swap_norms(model)
    lengths = (60, 68)
    [microbatch] = pack([TokenSequence(np.ones(n, dtype=np.int64), np.arange(n) > 0) for n in lengths], 128, "cpu")
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model.base_model(
            input_ids=microbatch.ids_1T,
            position_ids=microbatch.context.position_ids_1T,
            context=microbatch.context,
            use_cache=False,
        ).last_hidden_state
    assert out.requires_grad
    expected = memory.activation_bytes(
        shape_of(config.to_dict()), 128, {"bfloat16": 2, "float32": 4}[dtype], 2 * 68 / 128, 68
    )
    # The head's input is counted by the formula and is the result here; ids and indices are counted here only.
    assert sum(storage.nbytes() for storage in held.values()) == pytest.approx(expected, rel=0.02)


def test_the_chunk_of_logits_is_the_trainers():
    from plait.roles import model

    assert MAX_LOGITS_PER_CHUNK == model.MAX_LOGITS_PER_CHUNK


def test_a_run_by_hand():
    settings = ["model.compute_dtype=bfloat16", "batch.num_tokens_per_microbatch=2048", "optimizer.name=adamw"]
    prediction = predict_run_memory(load_run_config("starter", settings))
    sizes = {term.name: term.num_bytes for term in prediction.terms}
    # 768 x 256 + 4 x (256 x (2 x 256 + 2 x 128 + 3 x 768) + 2 x 256 + 2 x 64) + 256.
    num_parameters = 3_345_152
    assert sizes["process"] == PROCESS_BYTES
    assert sizes["parameters"] == 2 * num_parameters
    assert sizes["fp32 masters"] == sizes["gradients"] == 4 * num_parameters
    assert sizes["optimiser moments"] == 8 * num_parameters
    # 128 slots of 256 tokens: keys and values 2 x 4 layers x 128 numbers x 2 bytes, and 20 bytes of records.
    assert sizes["KV slots"] == 128 * 256 * (2048 + 20)
    # Per token and layer, bf16, D 256, N 4, M 2, H 64, F 768, sequences of 128, half of the limit: norms 2,048 + 768,
    # attention 2 x 512 + 4 x 128 x 6, its output 512, feed-forward 6,144. Once: 1,024 + 256.
    per_layer = 2048 + 768 + 1024 + 3072 + 512 + 6144
    assert sizes["activations"] == 2048 * (4 * per_layer + 1280)
    # Twice a layer's activations and what its backward pass makes: 6,144 + 2,048 per token.
    assert sizes["allocator"] == 2 * 2048 * (per_layer + 8192)
    assert prediction.peak_phase == "update_policy"
    held = [term.num_bytes for term in prediction.terms if term.phase in ("always", "update_policy")]
    assert prediction.peak_bytes == sum(held)


def test_what_cannot_be_predicted_is_said(tmp_path):
    config = load_run_config("starter")
    elsewhere = config.model_copy(update={"model": config.model.model_copy(update={"device": "cuda"})})
    assert "CPU" in predict_run_memory(elsewhere).not_predicted
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "mamba"}))
    unknown = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path)})})
    prediction = predict_run_memory(unknown)
    assert (prediction.peak_bytes, prediction.terms) == (None, ())
    assert "mamba" in prediction.not_predicted


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "Llama", "Mistral", "Qwen3Moe"])
def test_the_engine_takes_the_kv_bytes_that_are_stated(tmp_path, kind, dtype):
    import torch
    import transformers

    from plait.models import attention
    from plait.rollout.engine import Engine

    attention.register()
    sizes = {**SIZES, "vocab_size": 50, "max_position_embeddings": 64}
    if kind == "Qwen3Moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{kind}Config")(**sizes), attn_implementation="plait", dtype=getattr(torch, dtype)
    )
    model.config.save_pretrained(tmp_path)
    settings = ["rollout.num_slots=6", "rollout.max_prompt_tokens=10", "rollout.max_completion_tokens=20"]
    config = load_run_config("starter", settings)
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"path": str(tmp_path), "compute_dtype": dtype})}
    )
    engine = Engine(model, end_token_ids=(1,), num_slots=6, max_sequence_tokens=30)
    assert engine_kv_bytes(config) == engine.num_kv_bytes > 0
