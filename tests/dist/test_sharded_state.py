"""State saved in one layout and loaded in another; weights gathered for export and engines."""

import equality
import pytest
import torch
import torch.distributed.checkpoint as dcp

from models import make_model, make_sequences
from plait.models.optimizer import MasterOptimizer

CONFIG = {"eps": 1e-3}


class Run:
    """A sharded model and what it trains on."""

    def __init__(self, kind, text, settings, changes):
        layout = equality.make_layout(text, **settings)
        self.sharded = equality.make_sharded(kind, layout, equality.optimizer(**CONFIG), **changes)
        self.sequences = make_sequences(equality.LENGTHS)
        self.streams = equality.unsharded(kind, self.sequences, **changes)[-1]

    def train(self, num_updates):
        for _ in range(num_updates):
            equality.one_pass(self.sharded, self.sequences, self.streams)
            self.sharded.apply(equality.RATE)


def save(rank, world_size, kind, text, settings, changes, folder):
    """Two updates, a save, one more update; the weights after it."""
    run = Run(kind, text, settings, changes)
    sharded = run.sharded
    run.train(2)
    dcp.save(sharded.state(), checkpoint_id=folder)
    run.train(1)
    return sharded.full_state()


def resume(rank, world_size, kind, text, settings, changes, folder):
    """Into a model of other weights and moments: a load, and the third update; the weights after it."""
    run = Run(kind, text, settings, changes)
    sharded = run.sharded
    run.train(1)
    state = sharded.state()
    dcp.load(state, checkpoint_id=folder)
    sharded.loaded()
    run.train(1)
    return sharded.full_state()


TIED = {"tie_word_embeddings": True}
MOVES = [
    ("qwen3", {}, ("fsdp2", {}), [("fsdp2", {}), ("tp2", {"sp": True}), ("dp2fsdp2", {"zero": 1})]),
    ("qwen3_moe", {}, ("fsdp2tp2", {}), [("fsdp2tp2", {}), ("tp2", {}), ("fsdp2", {})]),
    ("llama", TIED, ("fsdp2pp2", {}), [("tp2", {}), ("pp2", {"pp_schedule": "zero_bubble_v"}), ("fsdp4", {})]),
]


@pytest.mark.parametrize(("kind", "changes", "source", "targets"), MOVES)
def test_saved_in_one_layout_loaded_in_another(groups, tmp_path, kind, changes, source, targets):
    """Bit-identical within a layout, equal within rounding across; the unsharded optimiser gets there too."""

    def run(function, text, settings):
        world = equality.make_layout(text, **settings).world_size
        return groups[world].run(function, kind, text, settings, changes, str(tmp_path))

    expected = run(save, *source)[0]
    assert expected.keys() == dict(make_model(kind, **changes).named_parameters()).keys()
    for text, settings in targets:
        for rank, weights in enumerate(run(resume, text, settings)):
            assert weights.keys() == expected.keys()
            for name in expected:
                if (text, settings) == source:
                    assert torch.equal(weights[name], expected[name]), f"rank {rank}: {name}"
                else:
                    assert equality.relative(weights[name], expected[name]) < 1e-5, f"{text}: {name}"


def _on_one(rank, world_size, text, settings, folder):
    """Every rank reads the whole state without a group and goes on with MasterOptimizer; the sharded one alongside."""
    run = Run("qwen3", text, settings, {})
    sharded = run.sharded
    run.train(2)
    dcp.save(sharded.state(), checkpoint_id=folder)
    run.train(1)
    model = make_model("qwen3")
    inline = MasterOptimizer(model, equality.optimizer(**CONFIG))
    equality.accumulate(model, inline, run.sequences, run.streams)
    inline.apply(equality.RATE)  # so that moments exist
    masters, moments = inline.state()
    state = {f"master/{k}": v for k, v in masters.items()} | {f"moment/{k}": v for k, v in moments.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    inline.load_state({k: state[f"master/{k}"] for k in masters}, {k: state[f"moment/{k}"] for k in moments})
    equality.accumulate(model, inline, run.sequences, run.streams)
    inline.apply(equality.RATE)
    weights = sharded.full_state()
    return max(equality.relative(weights[name], p.detach()) for name, p in model.named_parameters())


def test_a_saved_state_continues_on_one_process(ranks2, tmp_path):
    assert max(ranks2.run(_on_one, "fsdp2", {}, str(tmp_path))) < 1e-5


def _gathered(rank, world_size, kind, text, settings, changes):
    run = Run(kind, text, settings, changes)
    sharded = run.sharded
    model = make_model(kind, **changes)
    names = []
    for name, tensor in sharded.gathered(torch.bfloat16):
        names.append(name)
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, model.get_parameter(name).bfloat16()), name
    return names


@pytest.mark.parametrize(
    ("kind", "text", "settings", "changes"),
    [
        ("qwen3", "fsdp4tp2", {"sp": True}, {"hidden_size": 60, "intermediate_size": 108}),  # pieces of unequal size
        ("qwen3_moe", "fsdp2tp2pp2", {}, {}),
        ("qwen2", "tp2pp2", {"pp_schedule": "zero_bubble_v"}, TIED),
    ],
)
def test_weights_are_gathered_whole_on_every_rank(groups, kind, text, settings, changes):
    world = equality.make_layout(text, **settings).world_size
    expected = [name for name, _ in make_model(kind, **changes).named_parameters()]
    for names in groups[world].run(_gathered, kind, text, settings, changes):
        assert sorted(names) == sorted(expected)
