"""Folders of random models with the tokenizer of a given model, for benchmarks that need a size and no skill."""

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, dict[str, int]] = {
    "60k": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
            "num_key_value_heads": 1, "intermediate_size": 64},
    "20m": {"hidden_size": 384, "num_hidden_layers": 10, "num_attention_heads": 6, "head_dim": 64,
            "num_key_value_heads": 3, "intermediate_size": 1152},
    "50m": {"hidden_size": 512, "num_hidden_layers": 14, "num_attention_heads": 8, "head_dim": 64,
            "num_key_value_heads": 4, "intermediate_size": 1792},
}  # fmt: skip


def write_random_model(folder: Path, size: str, tokenizer_of: str = "starter", **changes: Any) -> Path:
    """A random Qwen3 of that size, in bfloat16, that transformers and Plait load; returns its folder."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from plait.models.load import load_tokenizer

    tokenizer = load_tokenizer(tokenizer_of).backend
    settings = {
        "vocab_size": len(tokenizer),
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **SIZES[size],
        **changes,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**settings)).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def cores() -> int:
    """Cores that this process may use."""
    from plait.jobs.machine import usable_cores

    return usable_cores()


def print_figures(figures: dict[str, Any]) -> None:
    """The last line of every benchmark."""
    print(json.dumps(figures), flush=True)
