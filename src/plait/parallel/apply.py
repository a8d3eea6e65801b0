"""Splits a model as a layout says, in one fixed order: experts, tensors, recomputation, data."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from plait.errors import ConfigError, Violation
from plait.models.value_head import ValueHead
from plait.parallel import tensor
from plait.parallel.data import shard_data
from plait.parallel.degrees import Layout
from plait.parallel.mesh import Mesh
from plait.parallel.recompute import recompute_layers
from plait.roles.model import Reduction, TokenScores, reduce_logits, score_tokens
from plait.stages.packing import Microbatch


class Scorer(nn.Module):
    """A model and what scores its tokens, as one module: the outermost unit that is sharded."""

    def __init__(self, model: PreTrainedModel, value_head: ValueHead | None, reduce: Reduction):
        super().__init__()
        self.model, self.value_head = model, value_head
        self._reduce = reduce

    def forward(self, microbatch: Microbatch, temperature: float, entropy_needs_grad: bool = False) -> TokenScores:
        """`plait.roles.model.score_tokens` on this rank's microbatch."""
        return score_tokens(
            self.model,
            microbatch,
            temperature,
            entropy_needs_grad=entropy_needs_grad,
            value_head=self.value_head,
            reduce=self._reduce,
        )


@dataclass(frozen=True, slots=True)
class Parallelized:
    """scorer: what runs. partial: names of parameters whose gradients are summed over tp once per update."""

    scorer: Scorer
    partial: frozenset[str]

    @property
    def root(self) -> FSDPModule:
        """The scorer as FSDP2's outermost unit."""
        return cast(FSDPModule, self.scorer)


def model_violations(model: PreTrainedModel, layout: Layout) -> list[Violation]:
    """Why this model, as loaded, cannot be split so; its sizes are checked by `layout_violations` before."""
    return tensor.tensor_violations(model, layout.tp) if layout.tp > 1 else []


def parallelize(
    model: PreTrainedModel, layout: Layout, mesh: Mesh, dtype: torch.dtype, value_head: ValueHead | None = None
) -> Parallelized:
    """Split a whole model, in place: masters in fp32, computed with in `dtype`. Raises ConfigError.

    model: with the same weights on every rank.
    """
    found = model_violations(model, layout)
    if found:
        raise ConfigError(found)
    model.float().to(mesh.device)
    partial: set[str] = set()
    reduce: Reduction = reduce_logits
    if layout.tp > 1:
        partial = tensor.split_tensors(model, mesh.over("tp"), sp=layout.sp)
        reduce = tensor.vocabulary_scores(mesh.over("tp"))
    layers = list(model.base_model.layers)
    recompute_layers(layers, layout.recompute)
    scorer = Scorer(model, value_head, reduce)
    shard_data(scorer, layers, layout, mesh, dtype, own_dtype=[] if value_head is None else [value_head])
    return Parallelized(scorer, frozenset(partial))
