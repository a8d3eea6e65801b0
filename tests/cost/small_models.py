"""Small transformers models of every architecture that the cost model knows, for tests."""

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CHOICE = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48}

DENSE = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 24, "sliding_window": None},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"head_dim": 24},
    "starcoder2": {},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128},
}
SPARSE = {
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {**_CHOICE, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 2},
    "qwen3_moe": {**_CHOICE, "mlp_only_layers": [1]},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "moe_intermediate_size": 48,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 16,
        "sliding_window": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
ALL = DENSE | SPARSE


def small_config(kind, **change):
    """The transformers config of a small model with eager attention and eager experts."""
    import transformers

    sizes = {k: v for k, v in SIZES.items() if kind != "gpt2" or k in ("vocab_size", "bos_token_id", "eos_token_id")}
    config = transformers.AutoConfig.for_model(kind, **{**sizes, **ALL[kind], **change})
    config._attn_implementation = "eager"
    return config


def build(config, **how):
    """A model with random weights; FLOPs of experts are only counted under their eager implementation."""
    import transformers

    eager = {"experts_implementation": "eager"} if config.model_type in SPARSE else {}
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", **eager, **how)
