"""The harness itself: it must fail loudly, in time, and leave nothing behind."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, Ranks, mesh

from plait.parallel.degrees import Layout
from plait.parallel.mesh import AXES


def _sum(rank, world_size, factor):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return float(value) * factor


def _fail_on_one(rank, world_size):
    if rank == 1:
        raise ValueError("no such thing")
    dist.barrier()


def _hang(rank, world_size):
    if rank == 1:
        time.sleep(60)


def _die(rank, world_size):
    if rank == 1:
        os._exit(7)


def _places(rank, world_size):
    made = mesh(Layout.parse("fsdp2tp2"))
    limits = {
        axis: made.group(axis)._get_backend(torch.device("cpu")).options._timeout.total_seconds() for axis in AXES
    }
    return [made.place(axis) for axis in AXES], made.over("dp_shard", "cp", "tp").size(), limits


def test_runs_and_fails_and_goes_on():
    ranks = Ranks(2)
    try:
        assert ranks.run(_sum, 3) == [3.0, 3.0]
        with pytest.raises(RankError, match=r"rank 1 of 2(.|\n)*no such thing") as caught:
            ranks.run(_fail_on_one)
        assert caught.value.rank == 1
        assert ranks.run(_sum, 1) == [1.0, 1.0]
        start = time.monotonic()
        with pytest.raises(RankError, match=r"ranks \[1\] of 2 gave no answer"):
            ranks.run(_hang, timeout_s=1)
        assert time.monotonic() - start < 15
        with pytest.raises(RankError, match="exit code 7"):
            ranks.run(_die)
        processes = list(ranks._processes)
    finally:
        ranks.stop()
    assert not any(process.is_alive() for process in processes)


def test_mesh_names_places_and_limits(ranks4):
    for rank, (places, size, limits) in enumerate(ranks4.run(_places)):
        assert places == [0, 0, rank // 2, 0, rank % 2]
        assert size == 4
        assert set(limits.values()) == {60.0}
