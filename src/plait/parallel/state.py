"""State of a split model: as DTensors for torch.distributed.checkpoint, or whole on every rank.

A saved state names tensors, not ranks: parameter name, shape and the piece that a rank has. So what one layout saved
another loads. Fused experts' gate and up halves are kept as [E, 2, F, D] in every layout, since tensor parallelism
splits each half.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

MASTER, MOMENT = "master", "moment"


def piece_like(parameter: DTensor, local: Tensor) -> DTensor:
    """A rank's piece of something of the parameter's shape, with its placements; no copy."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def saved_piece(tensor: DTensor, is_packed: bool) -> DTensor:
    """As it is saved: the same memory, a packed one as [E, 2, F, D]."""
    if not is_packed or tensor.ndim == 4:
        return tensor
    experts, rows, width = tensor.shape
    shape = torch.Size((experts, 2, rows // 2, width))
    return DTensor.from_local(
        tensor.to_local().unflatten(1, (2, -1)),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=shape,
        stride=(rows * width, rows // 2 * width, width, 1),
    )


def sharded_state(
    masters: Mapping[str, DTensor], moments: Mapping[str, Mapping[str, Tensor]], packed: set[str]
) -> dict[str, Tensor]:
    """ "master/name" and "moment/name/moment" -> this rank's pieces, sharing memory: loading into them is enough.

    moments: of each parameter, this rank's local ones; scalars (step counts) are whole.
    """
    state: dict[str, Tensor] = {}
    for name, master in masters.items():
        state[f"{MASTER}/{name}"] = saved_piece(master, name in packed)
        for key, local in moments[name].items():
            piece = saved_piece(piece_like(master, local), name in packed) if local.ndim else local
            state[f"{MOMENT}/{name}/{key}"] = piece
    return state


@torch.no_grad()
def whole(tensor: DTensor, is_packed: bool, dtype: torch.dtype | None = None) -> Tensor:
    """The whole tensor on every rank, in the model's own shape; all ranks of its mesh call this together.

    dtype: cast before sending. Axes are gathered from the last that cut (data) to the first (tp, ep), which also holds
    where both cut the same dim or ranks have pieces of unequal size.
    """
    mesh, shape = tensor.device_mesh, list(tensor.shape)
    cuts = []
    for axis in reversed(range(mesh.ndim)):
        placement = tensor.placements[axis]
        if not isinstance(placement, Replicate):
            assert isinstance(placement, Shard | _StridedShard), f"a placement {placement}"
            dim, size = placement.dim, mesh.size(axis)
            cuts.append((mesh.get_group(axis), dim, shape[dim]))
            piece = -(-shape[dim] // size)
            shape[dim] = max(0, min(piece, shape[dim] - piece * mesh.get_local_rank(axis)))
    local = tensor.to_local().detach()
    local = local if dtype is None else local.to(dtype)
    for group, dim, full in reversed(cuts):
        local = _gather(local, group, dim, full)
    return local.flatten(1, 2) if is_packed and local.ndim == 4 else local


def _gather(local: Tensor, group: dist.ProcessGroup, dim: int, full: int) -> Tensor:
    """Pieces along dim, as torch.chunk cuts them, put together."""
    piece = -(-full // group.size())
    rows = local.transpose(0, dim)
    sent = rows.new_zeros(piece, *rows.shape[1:])
    sent[: len(rows)] = rows
    got = sent.new_empty(piece * group.size(), *sent.shape[1:])
    dist.all_gather_into_tensor(got, sent, group=group)
    return got[:full].transpose(0, dim)
