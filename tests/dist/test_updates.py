"""Updates of a sharded model: clipping, optimisers, mixed precision, gradients that are not finite."""

import equality
import pytest
import torch
import torch.distributed as dist

from models import TEMPERATURE, make_model, make_sequences, rl_loss
from plait.errors import ConfigError
from plait.models.optimizer import MasterOptimizer
from plait.parallel.state import whole
from plait.roles.model import score_tokens
from plait.stages.packing import pack, pack_row

SGD = {"name": "sgd", "learning_rate": 1.0}
CASES = [
    ("qwen3", "fsdp2", {"zero": 1}, {}),
    ("qwen3", "fsdp2", {"zero": 2, "offload": "optimizer"}, SGD),
    ("qwen2", "tp2", {"sp": True}, {}),
    ("mixtral", "tp2", {}, {}),
    ("qwen3", "dp2", {}, SGD),
    ("qwen3_moe", "fsdp2tp2", {"sp": True}, SGD),
    ("qwen3", "dp2fsdp2", {"offload": "all"}, {}),
]


@pytest.mark.parametrize(("kind", "text", "settings", "config"), CASES)
def test_three_updates_equal_the_unsharded(groups, kind, text, settings, config):
    world = equality.make_layout(text, **settings).world_size
    # AdamW divides by the root of the second moment: of a gradient near 0 rounding becomes a step.
    config = {"eps": 1e-3, **config}
    for worst, moved, expected, got in groups[world].run(equality.updates, kind, text, settings, config):
        assert worst < 1e-5, f"parameters differ by {worst}"
        assert moved > 5e-4, "every parameter must move"
        assert got == pytest.approx(expected, rel=1e-5)
        assert max(expected) > 0.5, "clipping must bind"


def test_muon_on_whole_matrices(ranks2):
    """It orthogonalises in bf16, which blows rounding up: so nothing may round otherwise than in one process.

    One sequence, whose gradient the other rank adds 0 to, and a norm that clipping leaves alone.
    """
    config = {"name": "muon", "max_grad_norm": 1e9}
    for worst, moved, expected, got in ranks2.run(equality.updates, "qwen3", "dp2", {}, config, (40,)):
        assert worst < 1e-5
        assert moved > 1e-3
        assert got == pytest.approx(expected, rel=1e-5)


def _bf16(rank, world_size, text, settings):
    """Gradients and updated weights against MasterOptimizer on the very microbatches that the ranks made."""
    sequences = make_sequences(equality.LENGTHS)
    _, gradients_fp32, _, streams = equality.unsharded("qwen3", sequences)
    layout, config = equality.make_layout(text, **settings), equality.optimizer(eps=1e-3)
    sharded = equality.make_sharded("qwen3", layout, config, torch.bfloat16)
    microbatches = sharded.split(sequences, equality.MAX_TOKENS)
    rows = [None] * world_size
    dist.all_gather_object(rows, [list(m.sequences) for m in microbatches])
    model = make_model("qwen3")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    reference = MasterOptimizer(model, config)
    # MasterOptimizer's masters start from the copy; a sharded model's are the fp32 weights it was given.
    for name, master in make_model("qwen3").named_parameters():
        reference.masters[name].copy_(master.detach())
    loss_of = rl_loss(streams)
    for row in [row for own in rows for row in own if row]:
        microbatch = pack_row(sequences, row, "cpu")
        loss_of(microbatch, score_tokens(model, microbatch, TEMPERATURE, entropy_needs_grad=True)).backward()
        reference.accumulate()
    sharded.train_pass(microbatches, loss_of, TEMPERATURE, entropy_needs_grad=True)
    expected = {name: master.grad.clone() for name, master in reference.masters.items()}
    got = {name: whole(p.grad, False) for name, p in sharded.masters.items()}
    own = max(equality.relative(got[name], expected[name]) for name in expected)
    rounding = max(equality.relative(expected[name], gradients_fp32[name]) for name in expected)
    dtypes = {p.grad.to_local().dtype for p in sharded.masters.values()}
    reference.apply(equality.RATE)
    sharded.apply(equality.RATE)
    weights = sharded.full_state()
    worst = max(equality.relative(weights[name], master.detach()) for name, master in reference.masters.items())
    return own, rounding, worst, dtypes


@pytest.mark.parametrize(("text", "settings"), [("fsdp2", {}), ("fsdp2", {"zero": 1}), ("dp2", {})])
def test_bf16_over_fp32_masters_is_the_inline_path(ranks2, text, settings):
    for own, rounding, worst, dtypes in ranks2.run(_bf16, text, settings):
        assert dtypes == {torch.float32}
        assert rounding > 1e-3, "bf16 must have computed"
        assert own < 1e-5, f"gradients differ by {own}, bf16's own rounding is {rounding}"
        assert worst < 1e-5


def _bf16_tensor(rank, world_size):
    """Mean relative errors of gradients in bf16. The loss is smooth: clipping would turn rounding into jumps."""
    sequences = make_sequences(equality.LENGTHS)
    model = make_model("qwen3")
    for microbatch in pack(sequences, equality.MAX_TOKENS, "cpu"):
        score_tokens(model, microbatch, TEMPERATURE).logprobs_R.sum().backward()

    def error(layout):
        sharded = equality.make_sharded("qwen3", layout, dtype=torch.bfloat16)
        microbatches = sharded.split(sequences, equality.MAX_TOKENS)
        sharded.train_pass(microbatches, lambda microbatch, scores: scores.logprobs_R.sum(), TEMPERATURE)
        got = equality.whole_gradients(sharded)
        return sum(equality.relative(got[name], p.grad) for name, p in model.named_parameters()) / len(got)

    return error(equality.make_layout("tp2", sp=True)), error(equality.make_layout("dp2"))


def test_bf16_with_tensor_parallelism_rounds_no_worse(ranks2):
    """Products are summed in other parts, so only the size of the error can be compared."""
    for split, whole_model in ranks2.run(_bf16_tensor):
        assert 1e-3 < split < 1.25 * whole_model


def _poisoned(rank, world_size, text, settings):
    sequences = make_sequences(equality.LENGTHS)
    _, _, _, streams = equality.unsharded("qwen3", sequences)
    sharded = equality.make_sharded("qwen3", equality.make_layout(text, **settings))
    before = sharded.full_state()
    equality.one_pass(sharded, sequences, streams)
    name = "model.layers.1.mlp.up_proj.weight"
    if rank == world_size - 1:
        sharded.masters[name].grad.to_local()[0, 0] = float("nan")
    result = sharded.apply(equality.RATE)
    after = sharded.full_state()
    return result.nonfinite, all(torch.equal(before[k], after[k]) for k in before), name


def test_a_gradient_that_is_not_finite_is_named_by_every_rank_and_not_applied(ranks4):
    for culprit, is_unmoved, name in ranks4.run(_poisoned, "fsdp2tp2", {"sp": True}):
        assert culprit == name
        assert is_unmoved


def _refused(rank, world_size):
    with pytest.raises(ConfigError) as caught:
        equality.make_sharded("qwen3", equality.make_layout("tp2"), equality.optimizer(name="muon"), vocab_size=97)
    return str(caught.value)


def test_what_cannot_be_split_is_refused_all_at_once(ranks2):
    for message in ranks2.run(_refused):
        assert "optimizer.name: Muon works on whole matrices, and layout tp2 splits them" in message
        assert "tp: tp 2 does not divide the vocabulary of 97. Set tp to 1 or 97" in message
