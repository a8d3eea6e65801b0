"""Sums over parameters on different meshes: shared gradients, the global norm, the first that is not finite."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from plait.parallel.mesh import SHARD, Mesh


def is_split_beyond_data(parameter: DTensor) -> bool:
    """Whether ranks that differ in tp (or ep) hold different parts of it."""
    names = parameter.device_mesh.mesh_dim_names
    assert names is not None, "every mesh here has named axes"
    return any(
        isinstance(placement, Shard) and name != SHARD
        for name, placement in zip(names, parameter.placements, strict=True)
    )


def local_gradients(parameters: Mapping[str, DTensor]) -> dict[str, Tensor]:
    """This rank's pieces of the gradients that there are, by name."""
    found = {name: p.grad for name, p in parameters.items()}
    return {name: gradient.to_local() for name, gradient in found.items() if isinstance(gradient, DTensor)}


def sum_partial(gradients: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum gradients of which each rank of the group has a part, in place: one all-reduce for all of them."""
    if not gradients or group.size() == 1:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients]).to(device)
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def global_norm(gradients: Mapping[str, Tensor], split: set[str], mesh: Mesh) -> Tensor:
    """The 2-norm over all gradients of the model, the same on every rank.

    gradients: this rank's shards, by name. split: names of those that ranks of tp (or ep) hold different parts of.
    One all-reduce per axis that parameters are split over: dp_shard x cp, tp, pp.
    """
    squares = torch.zeros(2, dtype=torch.float32, device=mesh.device)
    norms = torch._foreach_norm(list(gradients.values())) if gradients else []
    for name, norm in zip(gradients, norms, strict=True):
        squares[int(name in split)] += norm.to(mesh.device).square()
    if mesh.layout.shard_ranks > 1:
        dist.all_reduce(squares, group=mesh.group("dp_shard", "cp"))
    whole, parts = squares[:1], squares[1:]
    if mesh.layout.tp > 1:
        dist.all_reduce(parts, group=mesh.group("tp"))
    total = whole + parts
    if mesh.layout.pp > 1:
        dist.all_reduce(total, group=mesh.group("pp"))
    return total[0].sqrt()


def first_nonfinite(gradients: Mapping[str, Tensor], names: Sequence[str], mesh: Mesh) -> str | None:
    """The first of `names` (of the whole model, the same on every rank) with a gradient that is not finite anywhere."""
    found = next((i for i, name in enumerate(names) if name in gradients and not _is_finite(gradients[name])), None)
    first = torch.tensor([len(names) if found is None else found], device=mesh.device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return names[int(first)] if int(first) < len(names) else None


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())
