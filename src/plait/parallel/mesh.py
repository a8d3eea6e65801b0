"""The ranks of one layout as a named DeviceMesh, and the process group under it.

Devices are not named here: a platform's backend follows from the device type (cuda: nccl, else gloo), and every group
has the time limit that the process group was opened with, since a wait without one hides a dead rank.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from plait.parallel.degrees import Layout

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: neighbours in rank talk most (tp), the far ones least (pp)."""

EXPERTS, EXPERT_SHARD = "ep", "expert_shard"
"""dp_shard x cp x tp again: ranks that hold different experts, neighbours; and those that hold the same ones."""

SHARD = "shard"
"""dp_shard x cp as one axis: what parameters, gradients and optimiser state are sharded over."""


def backend_of(device: torch.device | str) -> str:
    """The communication library of a device type."""
    return "nccl" if torch.device(device).type == "cuda" else "gloo"


def open_process_group(
    rank: int, world_size: int, device: torch.device | str, timeout_s: float, init_method: str
) -> None:
    """Join the group of all ranks; every collective on it fails after timeout_s instead of waiting for ever.

    init_method: "tcp://host:port" or "file:///path", the same on every rank.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend_of(device),
        init_method=init_method,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def limit_waits(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Give a group made by torch the limit of the world's group, which it does not inherit."""
    _backend(group)._set_default_timeout(_backend(dist.group.WORLD).options._timeout)
    return group


def _backend(group: Any) -> Any:
    return group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))


class Mesh:
    """All ranks of the default process group, laid out as a layout says. Made by all of them together."""

    def __init__(self, layout: Layout, device: torch.device | str):
        """device: this rank's. The world's size must be the layout's."""
        assert dist.get_world_size() == layout.world_size, (
            f"{dist.get_world_size()} processes for a layout of {layout.world_size}"
        )
        self.layout = layout
        self.device = torch.device(device)
        shape = tuple(int(getattr(layout, axis)) for axis in AXES)
        self.whole = init_device_mesh(self.device.type, shape, mesh_dim_names=AXES)
        self._axes: dict[tuple[str, ...], DeviceMesh] = {(axis,): self.whole[axis] for axis in AXES}
        self._axes[("dp_shard", "cp")] = self.whole["dp_shard", "cp"]._flatten(SHARD)
        for mesh in self._axes.values():
            limit_waits(mesh.get_group())

        spread = self.over("dp_shard", "cp", "tp")
        own = (spread.size() // layout.ep, layout.ep)
        self._experts = spread._unflatten(0, own, (EXPERT_SHARD, EXPERTS))
        for axis in (EXPERT_SHARD, EXPERTS):
            limit_waits(self._experts[axis].get_group())

    def over(self, *axes: str) -> DeviceMesh:
        """One flat mesh over the named axes (in the order of AXES) that this rank is on.

        Called by all ranks together when it is the first time for these axes: a group is made then.
        """
        assert axes == tuple(axis for axis in AXES if axis in axes), f"axes in the order {AXES}, got {axes}"
        if axes not in self._axes:
            self._axes[axes] = self.whole[axes]._flatten("_".join(axes))
            limit_waits(self._axes[axes].get_group())
        return self._axes[axes]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group of `over`."""
        return self.over(*axes).get_group()

    def place(self, *axes: str) -> int:
        """This rank's place on the named axes, from 0."""
        return self.over(*axes).get_local_rank()

    @property
    def experts(self) -> DeviceMesh:
        """Ranks that hold different experts."""
        return self._experts[EXPERTS]

    @property
    def expert_data(self) -> DeviceMesh:
        """What FSDP2 takes for modules of experts: (expert_shard), or (dp_replicate, expert_shard) with replicas."""
        shard = self._experts[EXPERT_SHARD]
        if self.layout.dp_replicate == 1:
            return shard
        return DeviceMesh._concatenate([self.over("dp_replicate"), shard])

    @property
    def data_shard(self) -> DeviceMesh:
        """What FSDP2 takes: (shard), or (dp_replicate, shard) with replicas."""
        shard = self.over("dp_shard", "cp")
        if self.layout.dp_replicate == 1:
            return shard
        return self.whole["dp_replicate", SHARD]
