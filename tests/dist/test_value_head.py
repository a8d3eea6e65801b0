"""A critic, or a trunk with two heads, split over ranks: values and every gradient equal the unsharded model's."""

import equality
import pytest
import torch
from models import TEMPERATURE, make_model, make_sequences
from ranks import mesh

from plait.models.value_head import ValueHead
from plait.parallel.sharded import ShardedModel
from plait.parallel.state import whole
from plait.roles.model import score_tokens
from plait.stages.packing import pack


def _head():
    head = ValueHead(64, "cpu")
    torch.nn.init.normal_(head.linear.weight, generator=torch.Generator().manual_seed(3), std=0.1)
    return head


def _loss(microbatch, scores):
    """Squared distance to a return that depends on the sequence, and something of the policy's."""
    returns_R = (microbatch.sequence_R % 3).float()
    return ((scores.values_R - returns_R) ** 2).sum() - 0.1 * scores.logprobs_R.sum()


def compare(rank, world_size, text, settings, dtype):
    sequences, layout = make_sequences(equality.LENGTHS), equality.make_layout(text, **settings)
    model, head = make_model("qwen3"), _head()
    for microbatch in pack(sequences, equality.MAX_TOKENS, "cpu"):
        _loss(microbatch, score_tokens(model, microbatch, TEMPERATURE, value_head=head)).backward()
    expected = {**dict(model.named_parameters()), **dict(head.named_parameters(prefix="value_head"))}
    sharded = ShardedModel(
        make_model("qwen3"), layout, mesh(layout), equality.optimizer(), compute_dtype=dtype, value_head=_head()
    )
    sharded.train_pass(sharded.split(sequences, equality.MAX_TOKENS), _loss, TEMPERATURE)
    sharded.sum_shared()
    errors = {n: equality.relative(whole(p.grad, False), expected[n].grad) for n, p in sharded.masters.items()}
    assert sharded.apply(equality.RATE).nonfinite is None
    return errors, set(dict(sharded.gathered())) == expected.keys()


@pytest.mark.parametrize(
    ("text", "settings"),
    [("fsdp2", {}), ("tp2", {"sp": True}), ("tp2", {}), ("cp2", {}), ("pp2", {}), ("fsdp2tp2pp2", {"sp": True})],
)
def test_equals_the_unsharded_model(groups, text, settings):
    world = equality.make_layout(text, **settings).world_size
    seen = set()
    for errors, has_all_names in groups[world].run(compare, text, settings, torch.float32):
        assert has_all_names
        assert max(errors.values()) < equality.GRADIENT_BAR, max(errors, key=errors.get)
        seen |= errors.keys()
    assert {"value_head.linear.weight", "value_head.linear.bias", "model.embed_tokens.weight"} <= seen


def test_the_head_computes_in_fp32_over_a_bf16_trunk(ranks2):
    for errors, _ in ranks2.run(compare, "fsdp2", {}, torch.bfloat16):
        assert 1e-4 < max(errors.values()) < 0.1
        assert errors["value_head.linear.bias"] < 0.02
