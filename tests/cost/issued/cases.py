"""Every case: a function of the processes' meshes that returns the collectives this rank issued (record.recorded)."""

import activations
import torch
import torch.nn.functional as F
from decoder import Decoder, sharded, tensor_parallel, token_ids
from record import recorded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

NUM_MICROBATCHES = 3


def loss_of(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten(), reduction="sum")


def train(model, before=lambda is_last: None):
    """One step over all microbatches."""

    def run():
        for i in range(NUM_MICROBATCHES):
            before(i == NUM_MICROBATCHES - 1)
            with loss_parallel():
                loss_of(model, token_ids(i)).backward()

    return recorded(run)


def ddp(world):
    model = nn.parallel.DistributedDataParallel(Decoder())

    def run():
        with model.no_sync():
            for i in range(NUM_MICROBATCHES - 1):
                loss_of(model, token_ids(i)).backward()
        loss_of(model, token_ids(9)).backward()

    run()
    run()  # buckets are settled after the first step, with broadcasts of their own
    return recorded(run)


def zero3(world):
    model = sharded(Decoder(), init_device_mesh("cpu", (world,)))
    calls = train(model)
    return {"step": calls, "norm": recorded(lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())}


def zero3_inference(world):
    model = sharded(Decoder(), init_device_mesh("cpu", (world,)))

    def run():
        with torch.no_grad():
            for i in range(NUM_MICROBATCHES):
                model(token_ids(i))
                model.reshard()  # the root stays gathered after a forward without backward

    return recorded(run)


def zero2(world, is_zero1=False):
    model = sharded(Decoder(), init_device_mesh("cpu", (world,)), reshard_after_forward=False)

    def before(is_last):
        model.set_is_last_backward(is_last)
        model.set_reshard_after_backward(is_last)
        model.set_requires_gradient_sync(is_last or not is_zero1)

    return train(model, before)


def zero1(world):
    return zero2(world, is_zero1=True)


def hsdp(world):
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = sharded(Decoder(), mesh)
    return train(model, lambda is_last: model.set_requires_all_reduce(is_last))


def _tp(world, sp=False, is_prepared=True, is_recomputed=False):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = tensor_parallel(Decoder(is_recomputed=is_recomputed), mesh["tp"], sp, is_prepared)
    calls = train(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    return {"step": calls, "optimizer": recorded(optimizer.step)}


def tp(world):
    return _tp(world)


def tp_unprepared(world):
    return _tp(world, is_prepared=False)


def tp_recomputed(world):
    return _tp(world, is_recomputed=True)


def sp(world):
    return _tp(world, sp=True)


def sp_recomputed(world):
    return _tp(world, sp=True, is_recomputed=True)


def fsdp_tp(world):
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    return train(sharded(tensor_parallel(Decoder(), mesh["tp"]), mesh["dp"]))


DATA = (ddp, zero3, zero3_inference, zero2, zero1, hsdp)
TENSOR = (tp, tp_unprepared, tp_recomputed, sp, sp_recomputed, fsdp_tp)
ALL = {case.__name__: case for case in (*DATA, *TENSOR, *activations.ALL)} | activations.NAMED
