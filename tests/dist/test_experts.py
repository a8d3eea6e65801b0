"""Expert parallelism equals the unsharded model; routers in fp32, replayed, balanced."""

import equality
import pytest

CASES = [
    ("qwen3_moe", "fsdp2ep2", {}),
    ("mixtral", "fsdp4ep4", {"zero": 1}),
    ("qwen2_moe", "fsdp4ep2", {"zero": 2}),
    ("qwen3_moe", "tp2ep2", {}),
    ("mixtral", "tp2ep2", {"sp": True}),
    ("qwen2_moe", "fsdp2tp2ep4", {"recompute": "selective"}),
    ("qwen3_moe", "cp2ep2", {"recompute": "full"}),
    ("mixtral", "dp2fsdp2ep2", {}),
]


@pytest.mark.parametrize(("kind", "text", "settings"), CASES)
def test_equals_the_unsharded_model(groups, kind, text, settings):
    world = equality.make_layout(text, **settings).world_size
    groups[world].run(equality.compare, kind, text, settings)
