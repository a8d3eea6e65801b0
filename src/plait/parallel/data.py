"""Data parallelism: replicas, ZeRO-1, 2 and 3, and hybrids of them, all from FSDP2's switches.

A unit is what is gathered at once: a decoder layer, or everything outside the layers. fp32 masters are sharded over
dp_shard x cp and computed with as a copy in the compute dtype; gradients arrive in fp32 and are SUMMED over ranks, as
losses are sums over everything that one update uses.

| zero | parameters                        | gradients                                      |
|------|-----------------------------------|------------------------------------------------|
| 3    | gathered in forward and backward  | reduce-scattered after each microbatch         |
| 2    | gathered once per update          | reduce-scattered after each microbatch         |
| 1    | gathered once per update          | whole; reduce-scattered after the last one     |

Replicas add one all-reduce of each shard after the last microbatch. In a pipeline every stage works as in zero 1 while
a pass lasts: its microbatches alternate, and a backward pass in two halves looks for whole parameters in between.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard

from plait.parallel.degrees import Layout
from plait.parallel.experts import WIDTH_DIM
from plait.parallel.mesh import Mesh


def shard_data(
    root: nn.Module,
    units: Iterable[nn.Module],
    layout: Layout,
    mesh: Mesh,
    dtype: torch.dtype,
    own_dtype: Iterable[nn.Module] = (),
    experts: Iterable[nn.Module] = (),
) -> None:
    """Shard `units` (in the order of their forward passes) and, as one more unit, what is left of `root`; in place.

    dtype: what computes. own_dtype: modules that compute in fp32 whatever the rest does; units too. experts: modules
    inside units that expert parallelism has spread; they are sharded over the ranks that hold the same ones.
    """
    is_cuda = mesh.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=is_cuda) if layout.offload == "all" else OffloadPolicy()
    is_gathered_twice = layout.zero == 3 and layout.pp == 1

    spread = {id(parameter) for module in experts for parameter in module.parameters()}
    own_ranks = _mesh_info(mesh.expert_data)

    def placement(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return _expert_placement(parameter, own_ranks) if id(parameter) in spread else None

    def shard(module: nn.Module, param_dtype: torch.dtype, reshard_after_forward: bool) -> None:
        policy = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(
            module,
            mesh=mesh.data_shard,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=placement,
        )

    for unit in units:
        shard(unit, dtype, is_gathered_twice)
    for unit in own_dtype:
        shard(unit, torch.float32, False)
    # Backward needs the outermost unit at once.
    shard(root, dtype, False)
    for wrapped in fsdp_modules(root):
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
        # Ranks whose loss does not reach a parameter must take part in its reduction all the same.
        wrapped.set_reduce_scatter_unused_params(True)
        wrapped.set_reshard_after_backward(is_gathered_twice, recurse=False)


def _mesh_info(mesh: DeviceMesh) -> FSDPMeshInfo:
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, shard_mesh_dim=0)
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def _expert_placement(parameter: nn.Parameter, ranks: FSDPMeshInfo) -> ShardPlacementResult:
    """Fewer experts than ranks are cut along their width instead of being padded, where equal parts can be had."""
    assert isinstance(parameter, DTensor), "experts were spread before"
    num_experts, width, size = parameter.to_local().shape[0], parameter.shape[WIDTH_DIM], ranks.shard_mesh_size
    return ShardPlacementResult(Shard(WIDTH_DIM) if num_experts < size and width % size == 0 else None, ranks)


def fsdp_modules(root: nn.Module) -> list[FSDPModule]:
    """Every unit, the root included."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def set_last_microbatch(root: nn.Module, layout: Layout, is_last: bool) -> None:
    """Before each forward pass of an update: whether gradients must be complete after its backward pass.

    Not with a pipeline, which reduces gradients once per pass by itself.
    """
    assert isinstance(root, FSDPModule), "the outermost unit"
    if layout.zero == 1:
        root.set_requires_gradient_sync(is_last)
    elif layout.dp_replicate > 1:
        root.set_requires_all_reduce(is_last)


def forget_gathered(root: nn.Module) -> None:
    """Drop gathered parameters: after an update they are old."""
    for module in fsdp_modules(root):
        module.reshard()
