"""Context parallelism equals the unsharded model, on packed sequences of unequal length."""

import equality
import pytest

CASES = [
    ("qwen3", "cp2", {}),
    ("llama", "cp4", {}),
    ("qwen2", "cp2", {"cp_kind": "ulysses"}),
    ("mistral", "cp4", {"cp_kind": "ulysses"}),
    ("qwen3", "fsdp2cp2", {"recompute": "selective"}),
    ("qwen3", "cp2tp2", {"sp": True, "recompute": "full"}),
]


@pytest.mark.parametrize(("kind", "text", "settings"), CASES)
def test_equals_the_unsharded_model(groups, kind, text, settings):
    world = equality.make_layout(text, **settings).world_size
    groups[world].run(equality.compare, kind, text, settings)
