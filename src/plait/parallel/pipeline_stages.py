"""The stages of a pipeline: a transformers causal LM cut by the plan that it declares itself (`base_model_pp_plan`).

Every stage is the whole model object with the modules of other stages taken out: parameters keep their names, the
model's own forward pass runs on every stage, and tensor parallelism and FSDP are applied to a stage as to a model.
"""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from plait.errors import Violation
from plait.models.value_head import ValueHead
from plait.parallel.degrees import Layout, layer_ranges
from plait.parallel.pipeline_orders import stages_of_rank
from plait.roles.model import TokenScores, model_inputs
from plait.stages.packing import Microbatch

_EMBEDDING_CHANGES = ("embedding_multiplier",)
"""Keys by which Granite and Falcon-H1 say that they scale whatever enters the first layer, outside the embedding."""

Score = Callable[[PreTrainedModel, Microbatch, Tensor | None], TokenScores]
"""(model of the last stage, microbatch, hidden states that enter it [1, T, D]) -> scores of the loss tokens. The hidden
states are None where the last stage is also the first."""


def pipeline_violations(config: PreTrainedConfig) -> list[Violation]:
    """Why a model cannot be cut into pipeline stages; empty if it can."""
    kind, values = config.model_type, config.to_dict()
    if not config.base_model_pp_plan:
        rule = f"{kind} declares no plan for a pipeline (base_model_pp_plan of its transformers configuration)"
        return [Violation("pp", rule, "Set pp to 1")]
    scaled = [key for key in _EMBEDDING_CHANGES if key in values and values[key] not in (None, 1.0)]
    return [
        Violation(
            "pp", f"{kind} scales the input of its first layer ({key} {values[key]}) in every stage", "Set pp to 1"
        )
        for key in scaled
    ]


class Absent(nn.Module):
    """In place of a module that another stage holds: hands its input on."""

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Whatever else a layer is given is not looked at."""
        return hidden


class StageModule(nn.Module):
    """One stage. model: the causal LM with only this stage's parts. number: of num_stages, in model order.

    tied: name of this stage's copy of a table that is embedding and head: the embedding on the first stage, the head on
    the last. Before each update their gradients are added up (`Pipeline.sum_tied`), so that the copies stay equal.
    score: what the last stage does with its hidden states; set before a pass. value_head: what it may do it with, on
    the last stage of a model that has one.
    score_fields: fields of TokenScores that the last forward pass returned, in order.
    """

    def __init__(self, model: PreTrainedModel, number: int, num_stages: int, tied: str | None = None):
        super().__init__()
        self.model, self.number, self.num_stages, self.tied = model, number, num_stages, tied
        self.score: Score | None = None
        self.value_head: ValueHead | None = None
        self.score_fields: tuple[str, ...] = ()

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num_stages - 1

    def forward(self, hidden_1TD: Tensor | None = None, *, microbatch: Microbatch) -> Tensor | tuple[Tensor, ...]:
        """Hidden states for the next stage [1, T, D]; on the last stage the scores that are not None."""
        if not self.is_last:
            return self.model.base_model(**model_inputs(microbatch, hidden_1TD)).last_hidden_state
        assert self.score is not None, "the last stage was not told what to compute"
        scores = self.score(self.model, microbatch, hidden_1TD)._asdict()
        self.score_fields = tuple(name for name, value in scores.items() if value is not None)
        return tuple(scores[name] for name in self.score_fields)

    def owned_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in the whole model; a tied table counts (in norms) and is saved on the first."""
        return {name: p for name, p in self.all_parameters().items() if not (self.is_last and name == self.tied)}

    def all_parameters(self) -> dict[str, nn.Parameter]:
        """The same with the copy of a tied table; those of a value head have its name before theirs."""
        own = {} if self.value_head is None else dict(self.value_head.named_parameters(prefix="value_head"))
        return {**dict(self.model.named_parameters()), **own}


def split_stages(model: PreTrainedModel, layout: Layout, pp_rank: int) -> list[StageModule]:
    """The stages that a pipeline rank holds, in model order. Takes the model apart: only the stages are of use after.

    model: a causal LM, or its base model where nothing but hidden states is wanted. Parts before the layers in the
    model's plan go to the first stage, parts after them and the head to the last, layers as `layer_ranges` says.
    """
    assert not pipeline_violations(model.config), f"{model.config.model_type} cannot be cut into stages"
    before, layers_name, after = _planned_parts(model)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_tied = head is not None and head.weight is embedding.weight and layout.num_stages > 1
    ends = [name for end in (embedding, head) for name, module in model.named_modules() if module is end]
    parts = {name: model.get_submodule(name) for name in (*before, layers_name, *after)}
    layers = parts[layers_name]
    assert isinstance(layers, nn.ModuleList), f"{layers_name} is no list of layers"
    for name in parts:
        model.set_submodule(name, Absent())  # so that a copy of the model costs nothing
    left = [name for name, _ in model.named_parameters()]
    assert not left, f"parameters outside the pipeline plan of {model.config.model_type}: {left}"
    ranges = layer_ranges(len(layers), layout.num_stages)
    stages = []
    for number in stages_of_rank(layout.pp_schedule, pp_rank, layout.pp, layout.stages_per_rank):
        shell = copy.deepcopy(model)
        mine = [layer if i in ranges[number] else Absent() for i, layer in enumerate(layers)]
        shell.set_submodule(layers_name, nn.ModuleList(mine))
        is_last = number == layout.num_stages - 1
        for name in (before if number == 0 else []) + (after if is_last else []):
            shell.set_submodule(name, parts[name])
        if is_tied and is_last:
            assert head is not None
            head.weight = nn.Parameter(head.weight.detach().clone())
        tied = f"{ends[is_last]}.weight" if is_tied and (number == 0 or is_last) else None
        stages.append(StageModule(shell, number, layout.num_stages, tied))
    return stages


def _planned_parts(model: PreTrainedModel) -> tuple[list[str], str, list[str]]:
    """Names of the modules before the layers, of the layers, and of those after them (the head last)."""
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    planned = list(base.config.base_model_pp_plan)
    (layers,) = [name for name in planned if isinstance(base.get_submodule(name), nn.ModuleList)]
    place = planned.index(layers)
    after = [f"{prefix}{name}" for name in planned[place + 1 :]]
    if base is not model:
        after += list(type(model)._pp_plan)
    return [f"{prefix}{name}" for name in planned[:place]], f"{prefix}{layers}", after
