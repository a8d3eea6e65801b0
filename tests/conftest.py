"""Fixtures shared by the tests: a random small model and its tokenizer stand-in."""

from types import SimpleNamespace

import pytest
from hypothesis import settings

import plait  # noqa: F401  (before torch: it asks OpenMP not to spin)

# The same examples in every run, and no limit on the time of one: machines differ in load.
settings.register_profile("plait", deadline=None, derandomize=True)
settings.load_profile("plait")


@pytest.fixture(scope="session")
def make_model():
    """A random Qwen3 of about 60k parameters; make_model(dtype) gives the same weights every time."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from plait.models import attention

    torch.set_num_threads(2)
    attention.register()
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.3,
    )

    def make(dtype=torch.float32, **changes):
        torch.manual_seed(0)
        changed = Qwen3Config(**{**config.to_dict(), **changes})
        model = AutoModelForCausalLM.from_config(changed, attn_implementation="plait", dtype=torch.float32)
        return model.to(dtype).eval()

    return make


@pytest.fixture(scope="session")
def plain_tokenizer():
    """Decodes ids as words; end token 1. Encodes nothing: ids must never be rebuilt from text."""
    return SimpleNamespace(end_token_ids=(1,), decode=lambda ids: " ".join(map(str, ids)))
