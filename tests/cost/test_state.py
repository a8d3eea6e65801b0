"""Model state: bytes against tensors that are really held, and against shapes cut by hand; published sums."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_models import ALL, build, small_config

from plait.cost.layers import Division
from plait.cost.model_catalogue import find_model
from plait.cost.model_config import model_spec
from plait.cost.state import PRECISION_RECIPES, largest_unit, local_parameters, rank_state, state_bytes


def _held(tensors):
    return sum(t.untyped_storage().nbytes() for t in {t.untyped_storage().data_ptr(): t for t in tensors}.values())


@pytest.mark.parametrize("kind", sorted(ALL))
@pytest.mark.parametrize("is_tied", [True, False])
def test_bytes_are_those_of_the_tensors_that_training_holds(kind, is_tied):
    config = small_config(kind, tie_word_embeddings=is_tied)
    model = build(config).float()
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(96).reshape(4, 24)
    model(input_ids=ids, use_cache=False).logits.logsumexp(-1).sum().backward()
    for parameter in model.parameters():
        # Experts that no token chose have no gradient yet.
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    optimizer.step()
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    spec = model_spec(config.to_dict())
    state = rank_state(spec, PRECISION_RECIPES["fp32"])
    assert state.parameters == _held(model.parameters())
    assert state.gradients == _held([p.grad for p in model.parameters()])
    assert state.optimizer == _held(moments)
    assert state.gathered == 0


def test_bf16_copies_and_masters():
    config = small_config("qwen3")
    masters = build(config).float()
    copy = build(config).bfloat16()
    state = rank_state(model_spec(config.to_dict()), PRECISION_RECIPES["mixed_fp32_gradients"])
    assert state.parameters == _held(copy.parameters())
    assert state.gradients == _held(masters.parameters())
    assert state.optimizer == 3 * _held(masters.parameters())


_ROWWISE = ("o_proj", "down_proj", "c_proj")
_WHOLE = ("norm", "ln_", "router", "gate.weight", "q_a_proj", "kv_a_proj", "shared_expert_gate")


@pytest.mark.parametrize("kind", sorted(set(ALL) - {"gpt2"}))
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shares_of_a_tensor_parallel_rank_by_cutting_shapes(kind, tp):
    """Columns, rows and vocabulary are cut; row-wise biases, norms, routers and KV heads beyond tp are whole."""
    config = small_config(kind, num_attention_heads=8, num_key_value_heads=8 if kind == "deepseek_v3" else 2)
    model, spec = build(config), model_spec(config.to_dict())
    expected = 0
    for name, parameter in model.named_parameters():
        ways = tp
        if any(word in name for word in _WHOLE) or (
            any(word in name for word in _ROWWISE) and name.endswith(("bias", "down_proj_bias"))
        ):
            ways = 1
        elif "k_proj" in name or "v_proj" in name:
            ways = min(tp, 2)
        assert parameter.numel() % ways == 0
        expected += parameter.numel() // ways
    assert local_parameters(spec, Division(tp=tp)).total == expected


def test_experts_are_whole_on_their_rank():
    spec = find_model("Qwen3-30B-A3B")
    local = local_parameters(spec, Division(tp=2, ep=8))
    assert local.experts == spec.parameters.experts / 8
    assert local.router == spec.parameters.router
    assert local_parameters(spec, Division(tp=2)).experts == spec.parameters.experts / 2


@pytest.mark.parametrize(("zero", "bytes_per_parameter"), [(0, 16), (1, 4 + 12 / 64), (2, 2 + 14 / 64), (3, 16 / 64)])
def test_zero_is_the_published_table(zero, bytes_per_parameter):
    # ZeRO, figure 1: 7.5 billion parameters on 64 ranks are 120, 31.4, 16.6 and 1.9 GB.
    recipe = PRECISION_RECIPES["mixed_bf16_gradients"]
    state = state_bytes(7.5e9, recipe, zero=zero, shard=64)
    assert state.total == pytest.approx(7.5e9 * bytes_per_parameter)
    assert state.total / 1e9 == pytest.approx({0: 120, 1: 31.4, 2: 16.6, 3: 1.9}[zero], abs=0.06)


def test_megatrons_bytes_per_parameter():
    # Megatron-LM theoretical_memory_usage.py: 18, and 6 + 12 / dp with the distributed optimiser.
    recipe = PRECISION_RECIPES["mixed_fp32_gradients"]
    assert state_bytes(1, recipe).total == 18
    assert state_bytes(1, recipe, zero=1, shard=8).total == 6 + 12 / 8


def test_fsdp2_by_hand():
    spec = find_model("Qwen2.5-7B")
    state = rank_state(spec, PRECISION_RECIPES["fsdp2_fp32_masters"], zero=3, dp_shard=8)
    assert state.parameters == 4 * spec.num_parameters / 8
    assert state.optimizer == 8 * spec.num_parameters / 8
    # The embedding and the head of 152,064 x 3,584 are more than a layer.
    assert largest_unit(spec) == 2 * 152_064 * 3584
    assert state.gathered == 2 * 2 * largest_unit(spec)
    # Context-parallel ranks share the state too.
    assert rank_state(spec, PRECISION_RECIPES["fp32"], Division(cp=2), zero=3, dp_shard=4).parameters == (
        4 * spec.num_parameters / 8
    )


def test_experts_shard_over_what_expert_parallelism_leaves():
    spec = find_model("Qwen3-30B-A3B")
    recipe = PRECISION_RECIPES["fp32"]
    # 16 ranks, 8 of them hold different experts: two share each, while all 16 share the rest.
    state = rank_state(spec, recipe, Division(ep=8), zero=3, dp_shard=16)
    rest = spec.num_parameters - spec.parameters.experts
    assert state.parameters == pytest.approx(4 * (rest / 16 + spec.parameters.experts / 8 / 2))
    # Two of those are tensor-parallel ranks: 2 x 16 ranks, 8 with different experts, four share each.
    state = rank_state(spec, recipe, Division(ep=8, tp=2), zero=3, dp_shard=16)
    assert state.parameters == pytest.approx(
        4 * ((local_parameters(spec, Division(tp=2, ep=8)).total - spec.parameters.experts / 8) / 16
             + spec.parameters.experts / 8 / 4)
    )  # fmt: skip


_SHARDED = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from small_models import build, small_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

found = {}
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
for kind in ("llama", "qwen3", "qwen3_moe"):
    model = build(small_config(kind, vocab_size=96)).float()
    mesh = init_device_mesh("cpu", (4,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)

    def local(tensors):
        # Gradients of one unit are parts of one buffer: what the reduce-scatter left.
        storages = [t.to_local().untyped_storage() for t in tensors]
        return sum({s.data_ptr(): s.nbytes() for s in storages}.values())

    model(input_ids=torch.arange(96).reshape(4, 24), use_cache=False).logits.sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    optimizer.step()
    moments = [t for state in optimizer.state.values() for name, t in state.items() if name != "step"]
    found[kind] = [local(model.parameters()), local([p.grad for p in model.parameters()]), local(moments)]
print(json.dumps(found))
"""


def test_bytes_of_a_rank_are_those_that_fsdp_holds():
    """ZeRO-3 over four ranks: the shards that one rank keeps, of sizes that four divides."""
    here = str(Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _SHARDED, here], capture_output=True, text=True, check=True
    )
    for kind, held in json.loads(run.stdout.splitlines()[-1]).items():
        spec = model_spec(small_config(kind).to_dict())
        state = rank_state(spec, PRECISION_RECIPES["fp32"], zero=3, dp_shard=4)
        assert [state.parameters, state.gradients, state.optimizer] == held, kind
