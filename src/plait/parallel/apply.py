"""Splits a model as a layout says, in one fixed order: pipeline stages, experts, tensors, recomputation, data."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from plait.errors import ConfigError, Violation
from plait.models.value_head import ValueHead
from plait.parallel import experts, tensor
from plait.parallel.data import shard_data
from plait.parallel.degrees import Layout
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline import Pipeline
from plait.parallel.pipeline_stages import Absent, StageModule, pipeline_violations, split_stages
from plait.parallel.recompute import recompute_layers
from plait.roles.model import Reduction, reduce_logits


@dataclass(frozen=True, slots=True)
class Parallelized:
    """What this rank holds of a model.

    stages: in model order; one without a pipeline. partial: names of parameters of which ranks of one tp group have
    parts of the gradient, to be summed once per update. reduce: what makes scores of this rank's logits.
    """

    stages: Sequence[StageModule]
    pipeline: Pipeline | None
    partial: frozenset[str]
    reduce: Reduction

    @property
    def last(self) -> StageModule | None:
        """The stage that scores, if this rank holds it."""
        return self.stages[-1] if self.stages[-1].is_last else None


def model_violations(model: PreTrainedModel, layout: Layout) -> list[Violation]:
    """Why this model, as loaded, cannot be split so; its sizes are checked by `layout_violations` before."""
    found = tensor.tensor_violations(model, layout.tp) if layout.tp > 1 else []
    found += experts.expert_violations(model, layout.ep) if layout.ep > 1 else []
    return found + (pipeline_violations(model.config) if layout.pp > 1 else [])


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
    hidden_size = model.config.hidden_size
    stages = split_stages(model, layout, mesh.place("pp")) if layout.pp > 1 else [StageModule(model, 0, 1)]
    partial: set[str] = set()
    for stage in stages:
        if stage.is_last and value_head is not None:
            stage.value_head = value_head
        modules, blocks = experts.split_experts(stage.model, mesh) if layout.ep > 1 else ([], set())
        if layout.tp > 1:
            partial |= tensor.split_tensors(stage.model, mesh.over("tp"), sp=layout.sp, expert_blocks=blocks)
        layers = [layer for layer in stage.model.base_model.layers if not isinstance(layer, Absent)]
        recompute_layers(layers, layout.recompute)
        heads = [] if stage.value_head is None else [stage.value_head]
        shard_data(stage, layers, layout, mesh, dtype, own_dtype=heads, experts=modules)
    pipeline = None
    if layout.pp > 1:
        group = mesh.group("pp")
        pipeline = Pipeline(stages, layout, group, mesh.device, hidden_size=hidden_size, dtype=dtype)
    reduce = tensor.vocabulary_scores(mesh.over("tp")) if layout.tp > 1 else reduce_logits
    return Parallelized(stages, pipeline, frozenset(partial), reduce)
