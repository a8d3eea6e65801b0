"""Parameter counts from config.json: by hand, and against transformers' own modules."""

import json

import pytest

from plait.cost.model_shape import UnknownShapeError, read_model_shape, shape_of
from plait.models.folder import ModelFolderError

QWEN3 = {
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


def test_qwen3_by_hand():
    shape = shape_of(QWEN3)
    # 4 x 6 queries, 6 x 4 output, 4 x 3 keys, 4 x 3 values, three of 4 x 5.
    assert shape.num_matrix_parameters_per_layer == 24 + 24 + 12 + 12 + 60
    # Two norms of 4, and of queries and keys 3 each.
    assert shape.num_vector_parameters_per_layer == 8 + 6
    assert shape.num_hidden_matrix_parameters == 264
    assert shape.num_parameters == 40 + 2 * 146 + 4
    assert shape_of({**QWEN3, "tie_word_embeddings": False}).num_parameters == 336 + 40


def test_biases_by_hand():
    # 6 + 3 + 3 on queries, keys and values, and 4 on the output unless it is Qwen2.
    assert shape_of({**QWEN3, "attention_bias": True}).num_parameters == 336 + 2 * 16
    without_norms = 336 - 2 * 6
    assert shape_of({**QWEN3, "model_type": "qwen2"}).num_parameters == without_norms + 2 * 12
    llama = {**QWEN3, "model_type": "llama", "attention_bias": True, "mlp_bias": True}
    assert shape_of(llama).num_parameters == without_norms + 2 * (16 + 5 + 5 + 4)
    assert shape_of({**QWEN3, "model_type": "mistral", "attention_bias": True}).num_parameters == without_norms


def test_missing_head_size_is_what_transformers_takes():
    sizes = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert shape_of({**sizes, "model_type": "llama"}).head_size == 2
    assert shape_of(sizes).head_size == 128


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "not named"),
        ({"hidden_size": "4"}, "hidden_size"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"vocab_size": 0}, "vocab_size"),
    ],
)
def test_what_cannot_be_counted_says_why(change, said):
    with pytest.raises(UnknownShapeError, match=said):
        shape_of({**QWEN3, **change})


def test_a_folder_is_read(tmp_path):
    with pytest.raises(ModelFolderError):
        read_model_shape(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert read_model_shape(str(tmp_path)).num_parameters == 336


@pytest.mark.parametrize("kind", ["Qwen3", "Qwen2", "Llama", "Mistral"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_transformers_counts_the_same(kind, is_tied):
    import torch
    import transformers

    sizes = {key: value for key, value in QWEN3.items() if key not in ("model_type", "head_dim")}
    more = {} if kind in ("Qwen2", "Mistral") else {"attention_bias": True}
    more |= {} if kind == "Qwen2" else {"head_dim": 6}
    more |= {"mlp_bias": True} if kind == "Llama" else {}
    config = getattr(transformers, f"{kind}Config")
    config = config(**{**sizes, **more, "tie_word_embeddings": is_tied})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert shape_of(json.loads(config.to_json_string(use_diff=True))).num_parameters == expected
