"""Model specs: counts against published ones and against transformers' own modules, errors, pipeline parts."""

import json

import pytest
from small_models import ALL, DENSE, build, small_config

from plait.cost.model_catalogue import find_model, shipped_models
from plait.cost.model_config import ARCHITECTURES, model_spec
from plait.cost.model_spec import LayerRun
from plait.errors import ConfigError

PUBLISHED = {
    # safetensors totals on the models' pages; a tied head is counted once.
    "Llama-3-8B": 8_030_261_248,
    "Llama-3-70B": 70_553_706_496,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.1-70B": 70_553_706_496,
    "Llama-3.1-405B": 405_853_388_800,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-1.5B": 1_543_714_304,
    "Qwen2.5-3B": 3_085_938_688,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen2.5-14B": 14_770_033_664,
    "Qwen2.5-32B": 32_763_876_352,
    "Qwen2.5-72B": 72_706_203_648,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-1.7B": 1_720_574_976,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Qwen3-14B": 14_768_307_200,
    "Qwen3-32B": 32_762_123_264,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Qwen3-235B-A22B": 235_093_634_560,
    "DeepSeek-V3": 671_026_419_200,
    "Mixtral-8x7B": 46_702_792_704,
    "Mixtral-8x22B": 140_620_634_112,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}


def test_counts_are_the_published_ones():
    assert {*PUBLISHED, "starter"} == set(shipped_models())
    for name, count in PUBLISHED.items():
        spec = find_model(name)
        assert spec.num_parameters + spec.num_routing_buffers == count, name
    # DeepSeek's checkpoint stores 256 routing corrections for each of 58 layers beside the parameters.
    assert find_model("DeepSeek-V3").num_routing_buffers == 14_848
    assert find_model("starter").num_parameters == 3_345_152


@pytest.mark.parametrize("name", [*PUBLISHED, "starter"])
def test_transformers_holds_as_many(name):
    import torch
    import transformers

    fields = {k: v for k, v in shipped_models()[name].items() if k != "source"}
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    spec = find_model(name)
    counts = dict.fromkeys(("attention", "feed_forward", "experts", "router", "norms", "embedding", "head"), 0)
    for parameter_name, parameter in model.named_parameters():
        counts[_part(parameter_name)] += parameter.numel()
    found = {key: getattr(spec.parameters, key) for key in counts}
    assert found == counts
    assert spec.num_parameters == sum(counts.values())


def _part(name):
    if "norm" in name:
        return "norms"
    for word, part in (("self_attn", "attention"), ("embed_tokens", "embedding"), ("lm_head", "head")):
        if word in name:
            return part
    if ".experts." in name:
        return "experts"
    return "router" if name.endswith(("mlp.gate.weight", "router.weight", "router.bias")) else "feed_forward"


@pytest.mark.parametrize("kind", sorted(ALL))
@pytest.mark.parametrize("is_tied", [True, False])
def test_every_architecture_from_the_file_that_transformers_writes(kind, is_tied):
    import torch

    config = small_config(kind, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        model = build(config)
    spec = model_spec(json.loads(config.to_json_string(use_diff=False)))
    assert spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_no_architecture_is_untested():
    assert set(ALL) == set(ARCHITECTURES)


def test_windows_are_the_layers_own():
    import transformers

    for kind, change in (
        ("qwen2", {}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
        ("gpt_oss", {}),
    ):
        config = small_config(kind, **change)
        expected = [8 if layer == "sliding_attention" else None for layer in config.layer_types]
        assert None in expected
        assert 8 in expected
        fields = {k: v for k, v in config.to_dict().items() if k != "layer_types"}
        for source in (config.to_dict(), fields):
            found = [run.window for run in model_spec(source).layers for _ in range(run.count)]
            assert found == expected, kind
    mistral = transformers.AutoConfig.for_model("mistral", sliding_window=64).to_dict()
    assert model_spec(mistral).windows == (64,)
    assert model_spec({**mistral, "sliding_window": None}).windows == (None,)


def test_parts_and_activity_by_hand():
    spec = find_model("Qwen3-30B-A3B")
    # 48 layers of 128 experts of three 2048 x 768, 8 of them active.
    assert spec.parameters.experts == 48 * 128 * 3 * 2048 * 768
    assert spec.num_active_parameters == spec.num_parameters - 48 * 120 * 3 * 2048 * 768
    assert spec.parameters.router == 48 * 2048 * 128
    assert find_model("qwen3-235b-a22b").num_active_parameters == 22_190_763_520
    assert find_model("DeepSeek-V3").num_active_parameters == 37_552_282_624
    assert find_model("Llama-3-8B").num_active_parameters == 8_030_261_248
    assert [layer.count for layer in find_model("DeepSeek-V3").layers] == [3, 58]


def test_kv_bytes_are_the_published_ones():
    # 128 KiB, 320 KiB, 56 KiB, 96 KiB per token, and DeepSeek-V3's 70 KB (2412.19437).
    for name, size in (
        ("Llama-3-8B", 131_072),
        ("Llama-3-70B", 327_680),
        ("Qwen2.5-7B", 57_344),
        ("Qwen3-30B-A3B", 98_304),
        ("DeepSeek-V3", 70_272),
    ):
        assert find_model(name).kv_bytes_per_token(2) == size
    oss = find_model("gpt-oss-20b")
    # 12 layers keep everything, 12 at most 128 tokens; keys and values of 8 heads of 64 numbers of 2 bytes.
    assert oss.kv_bytes(1000, 2) == 12 * (1000 + 128) * 2 * 8 * 64 * 2
    assert oss.kv_bytes(100, 2) == 24 * 100 * 2 * 8 * 64 * 2
    # Eight ranks hold a head each, sixteen no less.
    assert oss.kv_bytes(100, 2, tp=8) * 8 == oss.kv_bytes(100, 2)
    assert oss.kv_bytes(100, 2, tp=16) == oss.kv_bytes(100, 2, tp=8)
    deepseek = find_model("DeepSeek-V3")
    assert deepseek.kv_bytes(10, 2, tp=8) == deepseek.kv_bytes(10, 2)


@pytest.mark.parametrize("name", ["Qwen2.5-1.5B", "DeepSeek-V3", "gpt-oss-20b"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
def test_pipeline_parts_make_the_whole(name, num_stages):
    spec = find_model(name)
    parts = [spec.pipeline_stage(index, num_stages) for index in range(num_stages)]
    copy = spec.vocab_size * spec.hidden_size if spec.is_tied and num_stages > 1 else 0
    assert sum(part.num_parameters for part in parts) == spec.num_parameters + copy
    assert sum(part.num_sparse_layers for part in parts) == spec.num_sparse_layers
    sizes = [part.num_layers for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_names_are_found_in_any_case_and_unknown_ones_list_the_nearest(tmp_path):
    assert find_model("llama-3-8b").name == "Llama-3-8B"
    assert find_model("Qwen/qwen2.5-7B").name == "Qwen2.5-7B"
    with pytest.raises(ConfigError, match=r"Nearest: .*Qwen2\.5-7B"):
        find_model("qwen25-7b")
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(small_config("qwen3").to_dict()))
    assert find_model(str(folder)).layers == (LayerRun(3),)
    assert find_model(str(folder / "config.json")).hidden_size == 64
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_model(str(folder) + "/config.json")


def test_everything_that_is_wrong_is_said_at_once():
    config = small_config("qwen3").to_dict()
    broken = {k: v for k, v in config.items() if k != "vocab_size"} | {"hidden_size": "64", "num_key_value_heads": 3}
    with pytest.raises(ConfigError) as caught:
        model_spec(broken)
    places = {violation.where for violation in caught.value.violations}
    assert places == {"model.vocab_size", "model.hidden_size", "model.num_key_value_heads"}
    with pytest.raises(ConfigError, match=r"mamba.*Known architectures: llama"):
        model_spec({"model_type": "mamba"})
    with pytest.raises(ConfigError, match="missing"):
        model_spec({})
    deepseek = {
        k: v for k, v in small_config("deepseek_v3").to_dict().items() if k not in ("kv_lora_rank", "n_shared_experts")
    }
    with pytest.raises(ConfigError) as caught:
        model_spec(deepseek)
    assert {v.where for v in caught.value.violations} == {"model.kv_lora_rank", "model.n_shared_experts"}
    kinds = {"layer_types": ["linear_attention", "full_attention", "full_attention"]}
    with pytest.raises(ConfigError, match="linear_attention"):
        model_spec(small_config("qwen2").to_dict() | kinds)


def test_dense_architectures_have_no_experts():
    for kind in DENSE:
        spec = model_spec(small_config(kind).to_dict())
        assert spec.experts is None
        assert spec.num_active_parameters == spec.num_parameters
