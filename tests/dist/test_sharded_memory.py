"""Bytes that a rank really holds while it trains, against plait.cost.state: ZeRO-1, 2 and 3, tensor parallelism."""

import equality
import pytest
import torch

from models import TEMPERATURE, make_model, make_sequences
from plait.cost.layers import Division
from plait.cost.model_config import model_spec
from plait.cost.state import PRECISION_RECIPES, PrecisionRecipe, rank_state
from plait.parallel.data import fsdp_modules


def _units(sharded):
    modules = [module for stage in sharded._parts.stages for module in fsdp_modules(stage)]
    return [p for module in modules for group in module._get_fsdp_state()._fsdp_param_groups for p in group.fsdp_params]


def _bytes(tensors):
    """Of what is really there: a freed copy has an empty storage, and gradients of one unit share one."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def _local(tensor):
    return tensor.to_local() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor


def _held(sharded):
    parts = _units(sharded)
    whole = [p._unsharded_param for p in parts if "_unsharded_param" in p.__dict__]
    gradients = [p.sharded_param.grad for p in parts] + [p.grad for p in whole]
    gradients += [p.unsharded_accumulated_grad for p in parts]
    moments = [v for o in sharded._optimizers for e in o.state.values() for key, v in e.items() if key != "step"]
    return {
        "masters": _bytes([p.sharded_param.to_local().detach() for p in parts]),
        "whole": _bytes([_local(p).detach() for p in whole]),
        "gradients": _bytes([_local(g) for g in gradients if g is not None]),
        "moments": _bytes(moments),
    }


def measure(rank, world_size, text, settings, dtype):
    """What a rank holds between updates; in the second microbatch's backward pass, before any of it; and after all."""
    layout = equality.make_layout(text, **settings)
    sharded = equality.make_sharded("qwen3", layout, dtype=dtype)
    microbatches, seen = sharded.split(make_sequences((140,) * 8), equality.MAX_TOKENS), []
    assert len(microbatches) > 1

    def loss_of(microbatch, scores):
        seen.append(_held(sharded))
        return scores.logprobs_R.sum()

    sharded.train_pass(microbatches, loss_of, TEMPERATURE)
    sharded.apply(equality.RATE)
    return seen[1], _held(sharded)


MASTERS_APART = PrecisionRecipe(4, 4, 12)
"""fp32 in ZeRO-1 and 2 as FSDP2 has it: the whole copy that computes is not the sharded masters."""
CASES = [
    ("fsdp4", 3, torch.float32, PRECISION_RECIPES["fp32"]),
    ("fsdp4", 2, torch.float32, MASTERS_APART),
    ("fsdp4", 1, torch.float32, MASTERS_APART),
    ("fsdp4", 3, torch.bfloat16, PRECISION_RECIPES["fsdp2_fp32_masters"]),
    ("fsdp4", 2, torch.bfloat16, PRECISION_RECIPES["mixed_fp32_gradients"]),
    ("fsdp2tp2", 3, torch.float32, PRECISION_RECIPES["fp32"]),
    ("fsdp2tp2", 1, torch.float32, MASTERS_APART),
    ("tp4", 3, torch.float32, PRECISION_RECIPES["fp32"]),
]


@pytest.mark.parametrize(("text", "zero", "dtype", "recipe"), CASES)
def test_bytes_of_a_rank(ranks4, text, zero, dtype, recipe):
    layout = equality.make_layout(text, zero=zero)
    spec = model_spec(make_model("qwen3").config.to_dict())
    state = rank_state(spec, recipe, Division(tp=layout.tp), zero=zero, dp_shard=layout.dp_shard)
    for busy, idle in ranks4.run(measure, text, {"zero": zero}, dtype):
        if zero == 3:
            assert busy["masters"] == state.parameters
            assert busy["moments"] == state.optimizer
        else:
            assert busy["whole"] == state.parameters
            assert busy["masters"] + busy["moments"] == state.optimizer
        assert busy["gradients"] == state.gradients
        assert idle == {"masters": busy["masters"], "moments": busy["moments"], "whole": 0, "gradients": 0}
