"""Products of axes with a pipeline, through ShardedModel: the same bars as for each axis alone."""

import equality
import pytest

TIED = {"tie_word_embeddings": True}
PRODUCTS = [
    ("qwen3", "pp2", {"pp_schedule": "gpipe"}, {}),
    ("qwen3_moe", "dp2pp2", {}, {}),
    ("qwen2", "tp2pp2", {"sp": True}, TIED),
    ("llama", "tp2pp2", {"pp_schedule": "zero_bubble_v", "sp": True}, TIED),
    ("mixtral", "fsdp2pp2", {"pp_schedule": "dual_pipe_v"}, {}),
    ("qwen3", "fsdp2pp2", {"pp_schedule": "interleaved_1f1b", "recompute": "full"}, {}),
    ("qwen3", "fsdp2tp2pp2", {"sp": True}, TIED),
]


@pytest.mark.parametrize(("kind", "text", "settings", "changes"), PRODUCTS)
def test_equals_the_unsharded_model(groups, kind, text, settings, changes):
    world = equality.make_layout(text, **settings).world_size
    groups[world].run(equality.compare, kind, text, settings, changes)


@pytest.mark.parametrize("settings", [{}, {"pp_schedule": "zero_bubble_v"}])
def test_updates_keep_tied_copies_equal(ranks4, settings):
    config = {"name": "sgd", "learning_rate": 1.0}
    for worst, moved, expected, got in ranks4.run(
        equality.updates, "qwen3", "fsdp2pp2", settings, config, None, TIED
    ):
        assert worst < 1e-5
        assert moved > 5e-4
        assert got == pytest.approx(expected, rel=1e-5)
