"""A spec as tensors: they add up to the published parameters, and move as those of the equal plain shape."""

import pytest

from plait.cost.model_catalogue import find_model, shipped_models
from plait.cost.parameter_tensors import DecoderShape, num_parameters
from plait.cost.reshard import reshard
from plait.cost.spec_tensors import SpecShape
from plait.cost.traffic.layout import Work, decode_traffic, inference_traffic, training_traffic
from plait.cost.traffic.term import by_name
from plait.parallel.degrees import Layout

WORK = Work(num_microbatches=4, num_tokens=8192)
LLAMA_70B = DecoderShape(80, 8192, 64, 8, 128, 28672, 128256)
LAYOUTS = ("fsdp8", "fsdp4tp2", "tp8", "pp4fsdp2", "cp2fsdp2tp2", "dp2fsdp2")


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("Llama-3.1-70B", 70_553_706_496),
        ("Qwen2.5-7B", 7_615_616_512),  # biases of queries, keys and values
        ("Qwen3-30B-A3B", 30_532_122_624),
        ("DeepSeek-V3", 671_026_404_352),  # dense, then sparse layers; low ranks; a shared expert
    ],
)
def test_published_counts(name, published):
    assert num_parameters(SpecShape(find_model(name))) == published


@pytest.mark.parametrize("name", sorted(shipped_models()))
def test_every_shipped_model_and_its_critic(name):
    for spec in (find_model(name), find_model(name).with_scalar_head()):
        assert num_parameters(SpecShape(spec)) == spec.num_parameters


@pytest.mark.parametrize("text", LAYOUTS)
def test_traffic_is_that_of_the_plain_shape(text):
    layout, shape = Layout.parse(text), SpecShape(find_model("Llama-3.1-70B"))
    for rank in range(layout.pp):
        assert by_name(training_traffic(shape, layout, WORK, rank)) == by_name(
            training_traffic(LLAMA_70B, layout, WORK, rank)
        )
    assert by_name(inference_traffic(shape, layout, WORK)) == by_name(inference_traffic(LLAMA_70B, layout, WORK))
    if layout.cp == 1:
        assert by_name(decode_traffic(shape, layout, 16)) == by_name(decode_traffic(LLAMA_70B, layout, 16))
    moved = reshard(shape, layout, Layout(dp_replicate=layout.world_size))
    plain = reshard(LLAMA_70B, layout, Layout(dp_replicate=layout.world_size))
    assert (moved.received_bytes == plain.received_bytes).all()


def test_only_sparse_layers_dispatch():
    # 3 of DeepSeek-V3's 61 layers are dense: 58 dispatch, once forward and once backward per microbatch.
    terms = training_traffic(SpecShape(find_model("DeepSeek-V3")), Layout.parse("fsdp8ep8"), WORK)
    calls = {term.name: term.num_calls for term in terms}
    assert calls["ep_dispatch"] == 58 * 4 * 2
    assert calls["ep_combine"] == 58 * 4 * 2
    # Every layer's rest, every sparse layer's experts (sharded over no one else: 8 ranks, 8 parts) and the root.
    gathers = [term.num_calls for term in terms if term.name == "fsdp_all_gather"]
    assert sorted(gathers) == sorted([3 * 8, 58 * 8, 4])


def test_the_stages_of_a_pipeline_hold_all_layers_once():
    shape, layout = SpecShape(find_model("DeepSeek-V3")), Layout.parse("pp4")
    moved = reshard(shape, layout, Layout(dp_replicate=4), bytes_per_number=1)
    assert moved.held_bytes.sum() == 671_026_404_352
    assert (moved.needed_bytes == 671_026_404_352).all()
