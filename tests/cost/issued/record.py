"""Records the collectives that a block of code issues, by watching torch's dispatcher."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from plait.parallel import ring


def _bytes(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def _boxed(group):
    return dist.ProcessGroup.unbox(group).size()


def _named(name):
    return dist.distributed_c10d._resolve_process_group(name).size()


# Operator -> (collective, bytes of the whole payload, number of ranks); see plait.cost.collectives for "payload".
OPERATORS = {
    "c10d.allreduce_": lambda a: ("all_reduce", _bytes(*a[0]), _boxed(a[1])),
    "c10d._allgather_base_": lambda a: ("all_gather", _bytes(a[0]), _boxed(a[2])),
    "c10d._reduce_scatter_base_": lambda a: ("reduce_scatter", _bytes(a[1]), _boxed(a[2])),
    "c10d.alltoall_base_": lambda a: ("all_to_all", _bytes(a[1]), _boxed(a[2])),
    "c10d.send": lambda a: ("send", _bytes(*a[0]), _boxed(a[1])),
    "_c10d_functional.all_reduce": lambda a: ("all_reduce", _bytes(a[0]), _named(a[2])),
    "_c10d_functional.all_gather_into_tensor": lambda a: ("all_gather", _bytes(a[0]) * a[1], a[1]),
    "_c10d_functional.reduce_scatter_tensor": lambda a: ("reduce_scatter", _bytes(a[0]), a[2]),
    "_c10d_functional.all_to_all_single": lambda a: ("all_to_all", _bytes(a[0]), _named(a[3])),
    "_dtensor.shard_dim_alltoall": lambda a: ("all_to_all", _bytes(a[0]), _named(a[3])),
}
NO_TRAFFIC = {"c10d.recv_", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"}
"""The receiving end of a send, and waiting. Every other operator of these namespaces is an error."""
OWN_OPERATORS = {"plait.ring_attention": ring.forward}
"""Our operators that issue collectives inside, where the dispatcher's modes are off: run as plain functions."""


class Recorder(TorchDispatchMode):
    """calls: (collective, number of ranks, payload bytes) of each collective this process issues, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # let it become operations on local tensors first
        name = f"{func.namespace}.{func.overloadpacket.__name__}"
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor") and name not in NO_TRAFFIC:
            collective, payload, ranks = OPERATORS[name](args)
            self.calls.append((collective, ranks, payload))
        if name in OWN_OPERATORS:
            with self:
                return OWN_OPERATORS[name](*args)
        return func(*args, **(kwargs or {}))


def recorded(run):
    """What run() issues."""
    with torch.enable_grad(), Recorder() as recorder:
        run()
    return recorder.calls
