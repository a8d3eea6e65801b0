"""Context, experts, pipelines and products of axes, through ShardedModel: the same bars as for each axis alone."""

import equality
import pytest

TIED = {"tie_word_embeddings": True}
CONTEXT = [
    ("qwen3", "cp2", {}, {}),
    ("llama", "cp2", {"cp_kind": "ulysses"}, {}),
    ("mistral", "fsdp2cp2", {}, {}),
    ("qwen3", "dp2cp2tp2", {"sp": True}, {}),
]
EXPERTS = [
    ("qwen3_moe", "fsdp2ep2", {}, {}),
    ("mixtral", "fsdp4ep4", {"zero": 1}, {}),
    ("qwen3_moe", "tp2ep2", {}, {}),
    ("mixtral", "fsdp2tp2ep4", {"sp": True}, {}),
]
PRODUCTS = [
    ("qwen3", "pp2", {"pp_schedule": "gpipe"}, {}),
    ("qwen3_moe", "dp2pp2", {}, {}),
    ("qwen2", "tp2pp2", {"sp": True}, TIED),
    ("llama", "tp2pp2", {"pp_schedule": "zero_bubble_v", "sp": True}, TIED),
    ("mixtral", "fsdp2pp2", {"pp_schedule": "dual_pipe_v"}, {}),
    ("qwen3", "fsdp2pp2", {"pp_schedule": "interleaved_1f1b", "recompute": "full"}, {}),
    ("qwen3", "fsdp2tp2pp2", {"sp": True}, TIED),
]


@pytest.mark.parametrize(("kind", "text", "settings", "changes"), CONTEXT + EXPERTS + PRODUCTS)
def test_equals_the_unsharded_model(groups, kind, text, settings, changes):
    world = equality.make_layout(text, **settings).world_size
    groups[world].run(equality.compare, kind, text, settings, changes)


@pytest.mark.parametrize("settings", [{}, {"pp_schedule": "zero_bubble_v"}])
def test_updates_keep_tied_copies_equal(ranks4, settings):
    config = {"name": "sgd", "learning_rate": 1.0}
    for worst, moved, expected, got in ranks4.run(
        equality.updates, "qwen3", "fsdp2pp2", settings, config, equality.LENGTHS, TIED
    ):
        assert worst < 1e-5
        assert moved > 5e-4
        assert got == pytest.approx(expected, rel=1e-5)
