"""Expert parallelism equals the unsharded model; routers in fp32, replayed, balanced."""

import equality
import pytest

CASES = [
    ("qwen2_moe", "fsdp4ep2", {"zero": 2}),
    ("mixtral", "tp2ep2", {"sp": True, "recompute": "selective"}),
    ("qwen2_moe", "tp2ep2", {}),
    ("qwen3_moe", "cp2ep2", {"recompute": "full"}),
    ("mixtral", "dp2fsdp2ep2", {}),
]


@pytest.mark.parametrize(("kind", "text", "settings"), CASES)
def test_equals_the_unsharded_model(groups, kind, text, settings):
    world = equality.make_layout(text, **settings).world_size
    groups[world].run(equality.compare, kind, text, settings)
