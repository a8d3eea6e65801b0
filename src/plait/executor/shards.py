"""Between the whole tensors of one process and the sharded files that ranks write (torch.distributed.checkpoint).

Both name the same things: "policy"/name and "optimizer"/name/moment here are "master/name" and "moment/name/moment"
there. So a run goes on in another layout, one process included.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from plait.parallel.state import MASTER, MOMENT

State = dict[str, dict[str, Tensor]]
"""What an exact continuation needs of the roles: part -> name -> tensor."""

CRITIC = "critic/"

METADATA = ".metadata"
"""The file of torch.distributed.checkpoint that says which rank wrote what."""

_PACKED = ".experts.gate_up_proj"


def has_shards(folder: Path) -> bool:
    """Whether ranks have written this checkpoint."""
    return (folder / METADATA).is_file()


def write_whole(state: State, folder: Path) -> None:
    """Write the tensors of one process as if one rank had: any layout loads them."""
    with _one_process():
        dcp.save(_named(state), checkpoint_id=folder, no_dist=True)


def read_whole(like: State, folder: Path) -> State:
    """Whole tensors from what ranks have written. like: what one process would have saved, for names and shapes."""
    made = {part: {name: torch.empty_like(tensor) for name, tensor in named.items()} for part, named in like.items()}
    with _one_process():
        dcp.load(_named(made), checkpoint_id=folder, no_dist=True)
    return made


@contextmanager
def _one_process() -> Iterator[None]:
    """torch warns that there is one process only, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _named(state: State) -> dict[str, Tensor]:
    """Views of the same memory, fused experts as [E, 2, F, D]."""
    named = _role(state["policy"], state["optimizer"])
    if "value_head" in state:
        named |= _role(state["value_head"], {})
    if "critic" in state:
        critic = _role(state["critic"], state["critic_optimizer"])
        named |= {f"{CRITIC}{_causal_name(name)}": tensor for name, tensor in critic.items()}
    return named


def _role(masters: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = {f"{MASTER}/{name}": _unpacked(name, tensor) for name, tensor in masters.items()}
    return made | {f"{MOMENT}/{key}": _unpacked(key.rpartition("/")[0], tensor) for key, tensor in moments.items()}


def _causal_name(name: str) -> str:
    """One process trains a critic's trunk alone, ranks the causal LM around it, whose trunk is called "model"."""
    kind, _, rest = name.partition("/")
    return name if rest.startswith("value_head.") else f"{kind}/model.{rest}"


def _unpacked(name: str, tensor: Tensor) -> Tensor:
    return tensor.unflatten(1, (2, -1)) if name.endswith(_PACKED) and tensor.ndim == 3 else tensor
