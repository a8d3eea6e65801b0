"""The layout's spelling, and every rule that it can break, with the values that mend it."""

from types import SimpleNamespace

import pytest

from plait.parallel.degrees import Layout, LayoutError, layer_ranges, parse_degrees
from plait.parallel.layout_rules import layout_violations
from plait.parallel.layout_words import layout_words, parse_layout_words

SHAPE = SimpleNamespace(
    num_layers=16, num_heads=24, num_kv_heads=4, intermediate_size=96, num_experts=12, expert_intermediate_size=40
)
DENSE = SimpleNamespace(**{**vars(SHAPE), "num_experts": 0, "expert_intermediate_size": 0})


@pytest.mark.parametrize("text", ["", "dp2", "fsdp4tp2pp2ep4", "dp2fsdp4tp2pp2cp2ep8"])
def test_short_spelling_comes_back(text):
    assert str(Layout.parse(text)) == text


def test_settings_complete_the_short_spelling():
    layout = Layout.parse("fsdp4tp2pp2", zero=1, sp=True, recompute="full", pp_schedule="zero_bubble_v")
    assert layout.settings() == {"zero": 1, "sp": True, "recompute": "full", "pp_schedule": "zero_bubble_v"}
    assert Layout.parse(str(layout), **layout.settings()) == layout
    assert Layout().settings() == {}


def test_world_size_and_groups():
    layout = Layout.parse("dp2fsdp4tp2pp3cp2ep8")
    assert layout.world_size == 3 * 2 * 4 * 2 * 2  # ep never multiplies it
    assert layout.data_parallel == 8
    assert layout.shard_ranks == 8
    assert layout.expert_shard_ranks == 4 * 2 * 2 // 8
    assert (layout.num_stages, Layout().num_stages) == (3, 1)
    assert Layout.parse("pp3", pp_schedule="dual_pipe_v").num_stages == 6


def test_layers_of_stages():
    assert [len(layers) for layers in layer_ranges(10, 4)] == [3, 3, 2, 2]
    assert [layer for layers in layer_ranges(10, 4) for layer in layers] == list(range(10))


@pytest.mark.parametrize(
    ("text", "settings", "rule", "change"),
    [
        ("fsdp0", {}, "degree dp_shard is 0, expected at least 1", "Set dp_shard to 1 or more"),
        ("fsdp4tp2ep3", {}, "ep 3 must divide dp_shard x cp x tp = 8 and be a multiple of tp 2", "Set ep to 2 or 4"),
        ("fsdp4tp4ep2", {}, "be a multiple of tp 4", "Set ep to 1 or 4"),
        ("fsdp4", {"zero": 4}, "zero is 4", "Choose one of 0, 1, 2, 3"),
        ("fsdp4", {"zero": 0}, "zero 0 shards nothing, and dp_shard 4", "Write dp_replicate 4"),
        ("dp4", {"zero": 2}, "zero is 2, and there is one rank to shard over", "Leave zero out"),
        ("fsdp4", {"sp": True}, "sp splits activations over tp, and tp is 1", "Leave sp out"),
        ("fsdp4", {"cp_kind": "ulysses"}, "cp_kind is ulysses, and cp is 1", "Leave it out"),
        ("cp2", {"cp_kind": "star"}, "cp_kind is 'star'", "Choose one of ring, ulysses"),
        ("fsdp4", {"pp_schedule": "gpipe"}, "there is no pipeline (pp 1)", "Leave pp_schedule"),
        ("pp4", {"num_virtual": 2}, "1f1b cannot have 2 stages per rank", "choose interleaved_1f1b"),
        ("pp4", {"num_virtual": 1, "pp_schedule": "interleaved_1f1b"}, "cannot have 1 stages", "Set num_virtual to 2"),
        ("pp4", {"num_virtual": 3, "pp_schedule": "dual_pipe_v"}, "cannot have 3 stages", "a V has 2"),
        ("pp4", {"num_virtual": 0, "pp_schedule": "dual_pipe_v"}, "num_virtual is 0", "Leave it out"),
        (
            "pp4",
            {"recompute": "selective", "pp_schedule": "zero_bubble_v"},
            "zero_bubble_v runs backward in two parts, and recompute selective allows one",
            'Set recompute to "full" or "none"',
        ),
        ("fsdp4", {"recompute": "some"}, "recompute is 'some'", "none, selective, full"),
        ("fsdp4", {"offload": "disk"}, "offload is 'disk'", "none, optimizer, all"),
    ],
)
def test_what_no_model_can_make_right(text, settings, rule, change):
    with pytest.raises(LayoutError) as error:
        Layout.parse(text, **settings)
    (violation,) = error.value.violations
    assert rule in violation.rule
    assert change in violation.change
    assert layout_violations({**parse_degrees(text), **settings}) == [violation]


@pytest.mark.parametrize(
    ("text", "settings", "context", "where", "rule", "change"),
    [
        ("fsdp3tp2", {}, {"num_devices": 8}, "world_size", "= 6 devices, and the pool has 8", "Set dp_shard to 4"),
        ("fsdp2tp3", {}, {"num_devices": 8}, "world_size", "= 6 devices, and the pool has 8", "(now 3) as 2 or 4"),
        ("tp5", {}, {}, "tp", "tp 5 does not divide the 24 attention heads", "Set tp to 4"),
        ("tp3", {}, {}, "tp", "tp 3 does not divide the 4 key/value heads", "Set tp to 2 or 4"),
        ("tp8", {}, {}, "tp", "tp 8 is above the 4 key/value heads", "Set tp to 4"),
        ("tp6", {}, {"can_replicate_kv_heads": True}, "tp", "must be a multiple of 4", "Set tp to 4 or 8"),
        ("pp10", {"pp_schedule": "zero_bubble_v"}, {}, "pp", "= 20 stages, and the model has 16 layers", "pp to 8 or"),
        ("fsdp8ep8", {}, {}, "ep", "ep 8 does not divide the 12 experts", "Set ep to 4"),
        ("fsdp4ep4", {}, {"shape": DENSE}, "ep", "spreads experts, and the model has none", "Leave ep out"),
        (
            "cp6",
            {"cp_kind": "ulysses"},
            {},
            "cp",
            "does not divide the 4 key/value heads, nor is cp a multiple",
            "Set cp to 4 or 8, or cp_kind to",
        ),
        (
            "cp5",
            {"cp_kind": "ulysses"},
            {},
            "cp",
            "does not divide the 24 attention heads",
            "Set cp to 4 or 8, or cp_kind to",
        ),
        ("tp2cp3", {"cp_kind": "ulysses"}, {}, "cp", "x tp 2 = 6 does not divide the 4 key/value", "Set cp to 2 or 4,"),
        (
            "pp4",
            {},
            {"num_microbatches": 3},
            "num_microbatches",
            "4 stages needs as many",
            "Use 4 microbatches or more",
        ),
        (
            "pp2",
            {"pp_schedule": "dual_pipe_v"},
            {"num_microbatches": 3},
            "num_microbatches",
            "dual_pipe_v over 4 stages",
            "Use 4 microbatches or more",
        ),
        (
            "pp4",
            {"pp_schedule": "interleaved_1f1b"},
            {"num_microbatches": 9},
            "num_microbatches",
            "= 2 equal rounds",
            "Use 8 or 10 microbatches",
        ),
        (
            "cp2",
            {},
            {"num_tokens_per_microbatch": 1002},
            "num_tokens_per_microbatch",
            "4 equal pieces",
            "Set it to 1000 or 1004",
        ),
        (
            "tp4cp2",
            {"sp": True, "cp_kind": "ulysses"},
            {"num_tokens_per_microbatch": 1001},
            "num_tokens_per_microbatch",
            "8 equal pieces",
            "Set it to 1000 or 1008",
        ),
    ],
)
def test_what_this_model_pool_or_batch_cannot_take(text, settings, context, where, rule, change):
    found = layout_violations(Layout.parse(text, **settings), **{"shape": SHAPE, **context})
    (violation,) = [v for v in found if rule in v.rule]
    assert violation.where == where
    assert change in violation.change


def test_widths_that_tp_does_not_divide():
    narrow = SimpleNamespace(**{**vars(SHAPE), "num_heads": 64, "num_kv_heads": 64})
    rules = [v.rule for v in layout_violations(Layout.parse("tp64"), narrow)]
    assert rules == [
        "tp 64 does not divide the feed-forward width 96",
        "tp 64 does not divide the expert width 40, and ep is 1",
    ]
    assert [v.rule for v in layout_violations(Layout.parse("tp64ep64"), narrow)] == [
        "tp 64 does not divide the feed-forward width 96",
        "ep 64 does not divide the 12 experts",
    ]


def test_all_at_once():
    written = {**parse_degrees("fsdp3tp8pp4ep5cp2"), "zero": 0, "cp_kind": "ulysses", "pp_schedule": "interleaved_1f1b"}
    found = layout_violations(written, DENSE, 16, num_microbatches=9, num_tokens_per_microbatch=1001)
    assert [v.where for v in found] == [
        *("ep", "zero", "world_size", "tp", "cp", "cp", "ep", "num_microbatches", "num_tokens_per_microbatch")
    ]


def test_values_named_in_a_change_are_valid():
    """Following the advice about tp removes every violation of tp."""
    for tp in range(1, 65):
        found = layout_violations({"tp": tp}, SHAPE)
        for value in {word for v in found for word in v.change.replace(",", "").split() if word.isdigit()} - {str(tp)}:
            assert not [v for v in layout_violations({"tp": int(value)}, SHAPE) if v.where == "tp"], (tp, value)


def test_what_fits_is_not_complained_about():
    layout = Layout.parse("dp2fsdp4tp4pp4cp2ep4", sp=True, recompute="selective", offload="optimizer")
    context = {"num_microbatches": 8, "num_tokens_per_microbatch": 1024}
    assert layout_violations(layout, SHAPE, 2 * 4 * 4 * 4 * 2, **context) == []
    assert layout_violations(Layout(), SHAPE, 1) == []
    # 4 key/value heads copied to 8 ranks; 2 of them, which tp left, to 4.
    assert layout_violations(Layout.parse("cp8", cp_kind="ulysses"), SHAPE) == []
    assert layout_violations(Layout.parse("tp2cp4", cp_kind="ulysses"), SHAPE) == []


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("fsdp8tp4:sp:full", Layout(dp_shard=8, tp=4, sp=True, recompute="full")),
        ("fsdp2pp4:zero1:interleaved_1f1b:v3", Layout(dp_shard=2, pp=4, zero=1, pp_schedule="interleaved_1f1b",
                                                      num_virtual=3)),
        ("cp2:ulysses:offload_all", Layout(cp=2, cp_kind="ulysses", offload="all")),
        ("dp1", Layout()),
    ],
)  # fmt: skip
def test_layouts_in_a_word(text, layout):
    assert Layout(**parse_layout_words(text)) == layout
    assert layout_words(layout) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [("fsdp8:fast", 'cannot read "fast"'), ("fsdp8:full:selective", "says recompute twice"), ("fast", "cannot read")],
)
def test_words_that_say_nothing(text, words):
    with pytest.raises(ValueError, match=words):
        parse_layout_words(text)
