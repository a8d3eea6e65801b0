"""A run of a small mixture of experts that keeps the router's choices with its samples."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from plait.executor.inline import InlineExecutor
from plait.jobs.train import train


@pytest.fixture(scope="module")
def small_mixture(tmp_path_factory):
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from plait.models.load import load_tokenizer

    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = load_tokenizer("starter").backend
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=6,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("is_asked", [True, False])
def test_choices_reach_the_samples_and_training_is_not_listened_to(toy, small_mixture, monkeypatch, is_asked):
    kept = []
    original = InlineExecutor.end_step

    def end_step(self, step):
        kept.append([sample for group in self._state.sampled for sample in group.samples])
        original(self, step)

    monkeypatch.setattr(InlineExecutor, "end_step", end_step)
    config = toy("train.num_steps=2", f"model.path={small_mixture}", f"rollout.record_experts={str(is_asked).lower()}")
    train(config, recipe_dir=Path.cwd(), progress=False)
    samples = list(itertools.chain(*kept))
    assert len(samples) == 2 * 16
    for sample in samples:
        if not is_asked:
            assert sample.experts_TLK is None
            continue
        num_seen = len(sample.prompt_ids) + sample.num_response_tokens - 1
        assert sample.experts_TLK.shape == (num_seen, 3, 2)
        assert sample.experts_TLK.dtype == np.int16
        assert np.all((sample.experts_TLK >= 0) & (sample.experts_TLK < 6))
        assert np.all(sample.experts_TLK[..., 0] != sample.experts_TLK[..., 1])  # two different experts per token
