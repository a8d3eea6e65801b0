"""Expert parallelism: whole experts on their ranks, tokens sent there and back by all-to-all.

Experts are spread over ep neighbouring ranks of dp_shard x cp x tp, a multiple of tp. Ranks that hold the same experts
shard them further, and their gradients are summed over those ranks alone; routers and shared experts are like
everything else.

Every token enters once: under sp each rank of a tp group has its part of the tokens between regions, and without sp
takes its part when it enters the block of experts and gathers the others' results when it leaves.

Shapes: T tokens on this rank, D model width, E experts, K experts per token, X = T K rows that are sent.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from plait.errors import Violation
from plait.parallel.exchange import exchange
from plait.parallel.mesh import Mesh
from plait.parallel.tensor import SEQUENCE_DIM, compute_locally, matches

DISPATCHED, SPLIT = "ep_dispatch_experts", "grouped_gemm"
"""Styles of a model's plan: a module of experts that tokens are sent to, and a parameter whose first dim is experts."""


PACKED = "gate_up_proj"
WIDTH_DIM = 2
"""Of F in [E, 2, F, D] and in [E, D, F]."""


def expert_violations(model: PreTrainedModel, ep: int, key: str = "ep") -> list[Violation]:
    """Why this model's experts cannot be spread, beyond the sizes that `layout_violations` looks at."""
    plan, name = model.config.base_model_ep_plan, type(model).__name__
    if not plan:
        return [Violation(key, f"{name} declares no expert-parallel plan, and {key} is {ep}", f"Leave {key} out")]
    unknown = sorted(set(plan.values()) - {DISPATCHED, SPLIT})
    if unknown:
        rule = f"{name} asks for the expert-parallel styles {', '.join(unknown)}, known are {DISPATCHED}, {SPLIT}"
        return [Violation(key, rule, f"Leave {key} out")]
    return []


def split_experts(model: PreTrainedModel, mesh: Mesh) -> tuple[list[nn.Module], set[str]]:
    """Spread the experts over mesh.experts, in place, before tensors are split.

    Returns the modules of experts, to be sharded over mesh.expert_data, and the names (in the base
    model) of the blocks that they are in: routers and shared experts there are left whole over tp.
    """
    base, layout = model.base_model, mesh.layout
    modules: dict[str, nn.Module] = {}
    for pattern, style in model.config.base_model_ep_plan.items():
        for name, module, parameter in matches(base, pattern):
            if style == DISPATCHED:
                modules[name] = module
                continue
            assert parameter is not None, f"{pattern} names no parameter"
            data = module._parameters[parameter].detach()  # type: ignore[union-attr]
            if parameter == PACKED:  # as `plait.parallel.tensor` has them: [E, 2F, D] -> [E, 2, F, D]
                data = data.unflatten(1, (2, -1))
            split = distribute_tensor(data, mesh.experts, [Shard(0)], src_data_rank=None)
            module._parameters[parameter] = nn.Parameter(split)
    blocks = {name.rpartition(".")[0] for name in modules}
    for module in modules.values():
        compute_locally(module, 1)
        dispatch(module, mesh.experts.get_group())
    if layout.tp > 1 and not layout.sp:
        for name in blocks:
            _enter_in_parts(base.get_submodule(name), mesh)
    return list(modules.values()), blocks


def dispatch(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let a module of all experts, of which it now holds some, send its tokens to those that hold the others."""
    local_forward: Callable[[Tensor, Tensor, Tensor], Tensor] = module.forward
    num_experts = module.num_experts
    assert isinstance(num_experts, int), "transformers' experts say how many they are"
    module.num_experts = num_experts // group.size()  # type: ignore[assignment]

    def forward(hidden_TD: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        per_token = chosen_TK.shape[1]
        order_X = chosen_TK.flatten().argsort(stable=True)
        counts_E = torch.bincount(chosen_TK.flatten(), minlength=num_experts)
        incoming = exchange(counts_E, None, None, group).view(group.size(), -1)  # from each rank, for each expert here
        sends, receives = counts_E.view(group.size(), -1).sum(1).tolist(), incoming.sum(1).tolist()
        rows = exchange(hidden_TD[order_X // per_token], receives, sends, group)
        experts = torch.arange(incoming.shape[1], device=rows.device).repeat(group.size())
        done = _run(local_forward, rows, experts.repeat_interleave(incoming.flatten()))
        back_XD = exchange(done, sends, receives, group)
        mine_TKD = back_XD[order_X.argsort()].unflatten(0, (-1, per_token))
        return (mine_TKD * weights_TK[..., None]).sum(1).to(hidden_TD.dtype)

    module.forward = forward


def _run(local_forward: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor, experts: Tensor) -> Tensor:
    """Each row through its own expert, unweighted."""
    num_rows = len(rows)
    if num_rows == 0:  # one of zeros: backward must reach the collectives behind it on every rank
        rows, experts = rows.sum(0, keepdim=True), experts.new_zeros(1)
    done = local_forward(rows, experts[:, None], rows.new_ones(len(rows), 1))
    return done[:num_rows]


def _enter_in_parts(block: nn.Module, mesh: Mesh) -> None:
    """Each rank of tp passes its part of the tokens through a block, and all get all results."""
    tp = mesh.over("tp")

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        whole = DTensor.from_local(args[0], tp, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(SEQUENCE_DIM)]).to_local(), *args[1:]

    def after(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        parts = DTensor.from_local(output, tp, [Shard(SEQUENCE_DIM)], run_check=False)
        return parts.redistribute(placements=[Replicate()]).to_local()

    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)
