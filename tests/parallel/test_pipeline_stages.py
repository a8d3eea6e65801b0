"""Which models can be cut into pipeline stages, and what each stage holds."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from plait.models import attention
from plait.parallel.degrees import Layout
from plait.parallel.pipeline_stages import Absent, pipeline_violations, split_stages

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 5,
    "pad_token_id": 0,
}


def _model(kind, **changes):
    attention.register()
    config = AutoConfig.for_model(kind, **{**SIZES, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)


def _held(stages):
    """Names of the parts of each stage."""
    held = []
    for stage in stages:
        names = {name for name, _ in stage.model.named_parameters()}
        parts = {".".join(name.split(".")[:3]) if ".layers." in name else name for name in names}
        held.append(sorted(part.removeprefix("model.") for part in parts))
    return held


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (
            Layout(pp=2),
            [
                [["embed_tokens.weight", "layers.0", "layers.1", "layers.2"]],
                [["layers.3", "layers.4", "lm_head.weight", "norm.weight"]],
            ],
        ),
        (
            Layout(pp=2, pp_schedule="interleaved_1f1b"),
            [
                [["embed_tokens.weight", "layers.0", "layers.1"], ["layers.3"]],
                [["layers.2"], ["layers.4", "lm_head.weight", "norm.weight"]],
            ],
        ),
        (
            Layout(pp=2, pp_schedule="zero_bubble_v"),
            [
                [["embed_tokens.weight", "layers.0", "layers.1"], ["layers.4", "lm_head.weight", "norm.weight"]],
                [["layers.2"], ["layers.3"]],
            ],
        ),
    ],
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_every_part_is_on_one_stage(layout, expected, is_tied):
    for pp_rank in range(2):
        whole = _model("qwen2", tie_word_embeddings=is_tied)
        weights = {name: p.detach().clone() for name, p in whole.named_parameters()}
        table = weights["model.embed_tokens.weight"]
        stages = split_stages(whole, layout, pp_rank)
        assert _held(stages) == expected[pp_rank]
        for stage in stages:
            names = {0: "model.embed_tokens.weight", layout.num_stages - 1: "lm_head.weight"} if is_tied else {}
            assert stage.tied == names.get(stage.number)
            for name, parameter in stage.owned_parameters().items():
                assert torch.equal(parameter, weights[name]), name
            if is_tied and stage.is_last:  # a copy of its own, which is not counted
                assert torch.equal(stage.model.lm_head.weight, table)
                assert "lm_head.weight" not in stage.owned_parameters()


def test_a_trunk_without_a_head_can_be_cut():
    stages = [split_stages(_model("llama").model, Layout(pp=2), pp_rank)[0] for pp_rank in range(2)]
    layers = [[isinstance(layer, Absent) for layer in stage.model.layers] for stage in stages]
    assert layers == [[False] * 3 + [True] * 2, [True] * 3 + [False] * 2]
    assert [isinstance(stage.model.norm, Absent) for stage in stages] == [True, False]
    assert isinstance(stages[1].model.embed_tokens, Absent)


def test_models_that_cannot_be_cut_are_refused():
    assert pipeline_violations(AutoConfig.for_model("qwen3")) == []
    (gpt2,) = pipeline_violations(AutoConfig.for_model("gpt2"))
    assert "gpt2 declares no plan for a pipeline" in gpt2.rule
    (granite,) = pipeline_violations(AutoConfig.for_model("granite", embedding_multiplier=12.0))
    assert "granite scales the input of its first layer (embedding_multiplier 12.0)" in granite.rule
    assert granite.change == "Set pp to 1"
