"""Expert parallelism equals the unsharded model, also with replayed experts and a balance loss."""

from dataclasses import replace

import equality
import numpy as np
import pytest
from models import KINDS, SIZES, TEMPERATURE, make_model, make_sequences, rl_loss
from torch.distributed.tensor import Shard

from plait.models.routing import Balance, find_routers
from plait.roles.model import score_tokens
from plait.rollout.experts import ExpertRecorder
from plait.stages.packing import pack

CASES = [
    ("qwen2_moe", "fsdp4ep2", {"zero": 2}),
    ("mixtral", "fsdp4ep2", {"recompute": "full"}),
    ("mixtral", "tp2ep2", {"sp": True, "recompute": "selective"}),
    ("qwen2_moe", "fsdp2tp2ep2", {"recompute": "selective"}),
    ("qwen2_moe", "tp2", {"sp": True}),
    ("qwen3_moe", "cp2ep2", {}),
    ("mixtral", "dp2fsdp2ep2", {}),
]


@pytest.mark.parametrize(("kind", "text", "settings"), CASES)
def test_equals_the_unsharded_model(groups, kind, text, settings):
    world = equality.make_layout(text, **settings).world_size
    groups[world].run(equality.compare, kind, text, settings)


LENGTHS = (60, 5, 58, 27, 31, 9, 12, 28, 3)


def _recorded(kind):
    """Sequences with random experts for all tokens but the last, as if generation had chosen them."""
    generator = np.random.default_rng(7)
    layers = SIZES["num_hidden_layers"] - len(KINDS[kind].get("mlp_only_layers", ()))
    per_token = KINDS[kind]["num_experts_per_tok"]
    made = []
    for sequence in make_sequences(LENGTHS):
        shape = (len(sequence.ids_T) - 1, layers, 8)
        chosen = generator.random(shape).argsort(-1)[..., :per_token].astype(np.int16)
        made.append(replace(sequence, experts_TLK=chosen))
    return made


def _replayed(rank, world_size, kind, text, settings):
    """(relative error of the loss, largest of gradients, relative change that replay made to the loss)."""
    sequences = _recorded(kind)
    free = [replace(sequence, experts_TLK=None) for sequence in sequences]
    expected, gradients, _, streams = equality.unsharded(kind, sequences)
    own, _, _, _ = equality.unsharded(kind, free, streams)
    sharded = equality.make_sharded(kind, equality.make_layout(text, **settings))
    loss = equality.total_loss(sharded, equality.one_pass(sharded, sequences, streams))
    got = equality.whole_gradients(sharded)
    worst = max(equality.relative(got[name], gradients[name]) for name in got)
    return abs(loss - expected) / abs(expected), worst, abs(own - expected) / abs(expected)


@pytest.mark.parametrize(
    ("kind", "text", "settings"),
    [
        ("mixtral", "fsdp2ep2", {"recompute": "full"}),
        ("qwen3_moe", "tp2ep2", {"sp": True}),
        ("mixtral", "cp2tp2ep4", {}),
        ("qwen3_moe", "cp2pp2", {"cp_kind": "ulysses"}),
    ],
)
def test_replayed_experts_are_used_on_every_rank(groups, kind, text, settings):
    world = equality.make_layout(text, **settings).world_size
    for loss, gradient, change in groups[world].run(_replayed, kind, text, settings):
        assert loss < equality.LOSS_BAR
        assert gradient < equality.GRADIENT_BAR
        assert change > 1e-2, "replay must have changed the model's own routing"


def test_replay_uses_the_recorded_experts():
    """What `_replayed` compares with: the unsharded model routes exactly as recorded."""
    model, sequences = make_model("mixtral"), _recorded("mixtral")
    recorder = ExpertRecorder(model)
    (microbatch,) = pack(sequences, 256, "cpu")
    recorder.start()
    score_tokens(model, microbatch, TEMPERATURE)
    chosen = recorder.take().numpy()
    start = 0
    for index in microbatch.sequences:
        recorded = sequences[index].experts_TLK
        assert (chosen[start : start + len(recorded)] == recorded).all()
        start += len(recorded) + 1


BALANCE = 0.05


def _balanced(rank, world_size, kind, text, settings):
    """(largest relative error of a gradient, relative change that the balance loss made to a router's)."""
    sequences = make_sequences(LENGTHS)
    _, plain, _, streams = equality.unsharded(kind, sequences)
    model = make_model(kind)
    for microbatch in pack(sequences, 64, "cpu"):
        routed = replace(microbatch, routing=replace(microbatch.routing, balance=Balance(BALANCE)))
        rl_loss(streams)(routed, score_tokens(model, routed, TEMPERATURE, entropy_needs_grad=True)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    sharded = equality.make_sharded(kind, equality.make_layout(text, **settings))
    microbatches = sharded.split(sequences, equality.MAX_TOKENS)
    sharded.train_pass(
        microbatches, rl_loss(streams), TEMPERATURE, entropy_needs_grad=True, expert_balance=BALANCE
    )
    got = equality.whole_gradients(sharded)
    router = next(name for name, p in model.named_parameters() if p is find_routers(model)[0].weight)
    change = equality.relative(plain[router], expected[router]) if router in got else 1.0
    return max(equality.relative(got[name], expected[name]) for name in got), change


@pytest.mark.parametrize(
    ("kind", "text", "settings"),
    [
        ("mixtral", "fsdp2ep2", {"recompute": "full"}),
        ("qwen3_moe", "tp2ep2", {}),
        ("mixtral", "cp2tp2ep4", {"sp": True}),
        ("mixtral", "cp2pp2", {}),
    ],
)
def test_balance_loss_does_not_depend_on_the_layout(groups, kind, text, settings):
    world = equality.make_layout(text, **settings).world_size
    for gradient, change in groups[world].run(_balanced, kind, text, settings):
        assert gradient < equality.GRADIENT_BAR
        assert change > 1e-2, "the balance loss must reach the router"


def _placements(rank, world_size):
    sharded = equality.make_sharded("mixtral", equality.make_layout("fsdp8ep2"))
    experts = sharded.masters["model.layers.0.mlp.experts.gate_up_proj"]
    router = sharded.masters["model.layers.0.mlp.gate.weight"]
    narrow = equality.make_sharded("mixtral", equality.make_layout("fsdp8ep4"), num_local_experts=4)
    cut = narrow.masters["model.layers.0.mlp.experts.down_proj"]
    return (
        experts.device_mesh.mesh_dim_names,
        tuple(experts.to_local().shape),
        router.device_mesh.size(),
        tuple(cut.to_local().shape),
        cut.placements[0] == Shard(2),
    )


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones(ranks8):
    """8 experts over ep 2 are 4, over 4 ranks 1 each; 4 over ep 4 are 1, over 2 ranks half of its width 112."""
    for axes, shape, router_ranks, cut, is_width in ranks8.run(_placements):
        assert axes == ("expert_shard", "ep")
        assert shape == (1, 2, 112, 64)
        assert router_ranks == 8
        assert cut == (1, 64, 56)
        assert is_width


@pytest.mark.parametrize(
    ("kind", "text", "settings"), [("mixtral", "fsdp4ep2", {"zero": 1}), ("qwen3_moe", "tp2ep2", {"sp": True})]
)
def test_updates_clip_by_the_norm_over_all_experts(groups, kind, text, settings):
    world = equality.make_layout(text, **settings).world_size
    config = {"name": "sgd", "learning_rate": 1.0}
    for worst, moved, expected, got in groups[world].run(equality.updates, kind, text, settings, config, LENGTHS):
        assert worst < 1e-5
        assert moved > 5e-4
        assert got == pytest.approx(expected, rel=1e-5)
