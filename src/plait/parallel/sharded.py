"""One causal LM split over the ranks of a layout: what the training stage and the engine talk to."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from plait.config import OptimizerConfig
from plait.errors import ConfigError, Violation
from plait.models.optimizer import UpdateResult, embedding_names, make_optimizers
from plait.models.value_head import ValueHead
from plait.parallel.apply import model_violations, parallelize
from plait.parallel.context import cut, row_multiple, sequence_multiple
from plait.parallel.balance import SequenceCost, partition, sequence_cost
from plait.parallel.data import forget_gathered, set_last_microbatch
from plait.parallel.degrees import Layout
from plait.parallel.gradients import first_nonfinite, global_norm, is_split_beyond_data, sum_partial
from plait.parallel.mesh import Mesh
from plait.parallel.state import sharded_state, whole
from plait.roles.model import TokenScores
from plait.stages.packing import Microbatch, TokenSequence, filled, pack_row, plan_microbatches

LossOf = Callable[[Microbatch, TokenScores], Tensor]
"""A sum over the loss tokens of a microbatch."""


def sharded_violations(model: PreTrainedModel, layout: Layout, config: OptimizerConfig) -> list[Violation]:
    """Why this model and optimiser cannot train in this layout; the layout's sizes are checked before."""
    found = model_violations(model, layout)
    splits = layout.shard_ranks * layout.tp > 1 or layout.ep > 1
    if config.name == "muon" and splits:
        rule = f"Muon works on whole matrices, and layout {layout} splits them"
        found.append(Violation("optimizer.name", rule, "Set it to adamw, or choose a layout of dp and pp alone"))
    return found


class ShardedModel:
    """One causal LM split over the ranks of a layout. Every method is called by all ranks of the layout together."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        mesh: Mesh,
        config: OptimizerConfig,
        *,
        compute_dtype: torch.dtype,
        value_head: ValueHead | None = None,
        cost: SequenceCost | None = None,
    ):
        """model: whole, the same weights on every rank; split in place. cost: that of a resumed run; else of the model.

        Raises ConfigError with every violation.
        """
        found = sharded_violations(model, layout, config)
        if found:
            raise ConfigError(found)
        self.layout, self.mesh, self.compute_dtype = layout, mesh, compute_dtype
        self.cost = cost_of(model) if cost is None else cost
        self._config = config
        self._packed = {name for name, p in model.named_parameters() if name.endswith(".experts.gate_up_proj")}
        heads = {} if value_head is None else {"value_head": value_head}
        ends = embedding_names(model) | {f"{h}.{name}" for h in heads for name, _ in heads[h].named_parameters()}
        self._parts = parallelize(model, layout, mesh, compute_dtype, value_head)
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        named |= {f"{h}.{name}": p for h, head in heads.items() for name, p in head.named_parameters()}
        self.masters: dict[str, DTensor] = {name: p for name, p in named.items() if isinstance(p, DTensor)}
        assert self.masters.keys() == named.keys(), "every parameter is sharded, if only over one rank"
        self._split = {name for name, p in self.masters.items() if is_split_beyond_data(p)}
        # Optimisers see plain tensors: what they do to each element needs nothing of the others.
        self._locals = {name: nn.Parameter(p.to_local().detach()) for name, p in self.masters.items()}
        self._optimizers = make_optimizers(self._locals, ends, config)
        self._make_moments()

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.mesh.device

    def split(self, sequences: Sequence[TokenSequence], max_tokens: int) -> list[Microbatch]:
        """This rank's microbatches; the same number on every rank, the last of some being filling alone.

        `sequences` and `sequence_R` of a microbatch are indices into `sequences`, which is the same on every rank.
        """
        lengths = [len(sequence.ids_T) for sequence in sequences]
        parts = partition([self.cost(length) for length in lengths], self.layout.data_parallel)
        rows_of = [self._rows(part, lengths, max_tokens) for part in parts]
        count = max(len(rows) for rows in rows_of)
        place = self.mesh.place("dp_replicate", "dp_shard")
        mine = rows_of[place] + [[]] * (count - len(rows_of[place]))
        multiples = row_multiple(self.layout), sequence_multiple(self.layout)
        return [cut(pack_row(sequences, row, self.device, *multiples), self.layout, self.mesh) for row in mine]

    def _rows(self, part: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Rows of one rank, the dearest first, so that ranks wait little for each other at each of them."""
        packed = [filled(lengths[i], sequence_multiple(self.layout)) for i in part]
        rows = [[part[i] for i in row] for row in plan_microbatches(packed, max_tokens)]
        return sorted(rows, key=lambda row: -sum(self.cost(lengths[i]) for i in row))

    def train_pass(
        self,
        microbatches: Sequence[Microbatch],
        loss_of: LossOf,
        temperature: float,
        *,
        entropy_needs_grad: bool = False,
    ) -> None:
        """Forward and backward of all of them; gradients are added to those of passes since the last `apply`.

        loss_of gets the scores of the loss tokens that this rank owns, none for filling. Ranks of one tp group own the
        same ones and must return the same loss.
        """
        for number, microbatch in enumerate(microbatches, start=1):
            set_last_microbatch(self._parts.root, self.layout, number == len(microbatches))
            scores = self._parts.scorer(microbatch, temperature, entropy_needs_grad)
            loss = loss_of(microbatch, scores)
            if len(scores.logprobs_R) == 0:  # filling must reach every collective of the backward pass
                loss = loss + scores.logprobs_R.sum()
            loss.backward()

    @torch.no_grad()
    def logprobs(
        self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int
    ) -> list[Tensor]:
        """Log-probabilities of the loss tokens of each sequence, complete on every rank, without gradients."""
        counts = torch.tensor([int(sequence.loss_mask_T.sum()) for sequence in sequences], device=self.device)
        starts = counts.cumsum(0) - counts
        all_R = torch.zeros(int(counts.sum()), device=self.device)
        for microbatch in self.split(sequences, max_tokens):
            scores = self._parts.scorer(microbatch, temperature)
            all_R[starts[microbatch.sequence_R] + microbatch.place_R] = scores.logprobs_R
        forget_gathered(self._parts.scorer)
        # Ranks own disjoint tokens, and those of one tp group the same.
        dist.all_reduce(all_R, group=self.mesh.group("pp", "dp_replicate", "dp_shard", "cp"))
        return list(all_R.split(counts.tolist()))

    @torch.no_grad()
    def apply(self, rate: float) -> UpdateResult:
        """Clip by the global norm and take one optimiser step at `rate`; the result is the same on every rank.

        With a norm that is not finite nothing is applied, moments included; the result names a culprit.
        """
        gradients = {name: p.grad.to_local() for name, p in self.masters.items() if p.grad is not None}
        partial = [gradients[name] for name in sorted(self._parts.partial & gradients.keys())]
        sum_partial(partial, self.mesh.group("tp"), self.device)
        total = global_norm(gradients, self._split, self.mesh)
        norm = float(total)
        nonfinite = None
        if not math.isfinite(norm):
            nonfinite = first_nonfinite(gradients, sorted(self.masters), self.mesh) or "the sum over all parameters"
        result = UpdateResult(norm, nonfinite)
        if nonfinite is None:
            for name, gradient in gradients.items():
                self._locals[name].grad = gradient
            nn.utils.clip_grads_with_norm_(self._locals.values(), self._config.max_grad_norm, total)
            self._step(rate)
        for name, master in self.masters.items():
            master.grad = self._locals[name].grad = None
        forget_gathered(self._parts.scorer)
        return result

    def _step(self, rate: float) -> None:
        self._move_moments(to_host=False)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        self._move_moments(to_host=True)

    def _make_moments(self) -> None:
        """An update of nothing at rate 0: state exists from the start, so that a checkpoint can be loaded into it."""
        for local in self._locals.values():
            local.grad = torch.zeros_like(local)
        self._step(0.0)
        for optimizer in self._optimizers:
            for entry in optimizer.state.values():
                for value in entry.values():
                    if isinstance(value, Tensor):
                        value.zero_()  # weight decay has come into SGD's
        for local in self._locals.values():
            local.grad = None

    def _move_moments(self, *, to_host: bool) -> None:
        """Between updates moments may wait in host memory."""
        if self.layout.offload != "optimizer":
            return
        for optimizer in self._optimizers:
            for parameter, entry in optimizer.state.items():
                device = torch.device("cpu") if to_host else parameter.device
                entry.update({key: value.to(device) for key, value in entry.items() if isinstance(value, Tensor)})

    def state(self) -> dict[str, Tensor]:
        """Masters and moments for torch.distributed.checkpoint, in memory that it may load into."""
        by_parameter = {id(p): entry for o in self._optimizers for p, entry in o.state.items()}
        moments = {
            name: {key: value for key, value in by_parameter[id(local)].items() if isinstance(value, Tensor)}
            for name, local in self._locals.items()
        }
        return sharded_state(self.masters, moments, self._packed)

    def loaded(self) -> None:
        """Say that `state` was loaded into: gathered parameters are old."""
        forget_gathered(self._parts.scorer)

    def gathered(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each whole parameter of the model by name, on every rank, one after the other: for export and for engines.

        dtype: cast before it is sent; None leaves fp32. A weight that is used twice comes once. All ranks iterate.
        """
        for name, master in self.masters.items():
            yield name, whole(master, name in self._packed, dtype)

    def full_state(self) -> dict[str, Tensor]:
        """All of `gathered` at once, in fp32, in host memory."""
        return {name: tensor.cpu() for name, tensor in self.gathered()}


def cost_of(model: PreTrainedModel) -> SequenceCost:
    """Work of a sequence by its length, from the model's own sizes; of experts, those that a token reaches."""
    config = model.config
    embedding = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is embedding
    num_parameters = sum(p.numel() for p in model.parameters()) - (0 if is_tied else embedding.numel())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    if experts:
        sizes = config.to_dict()
        total = sizes["num_local_experts"] if "num_local_experts" in sizes else sizes["num_experts"]
        num_parameters -= experts * (total - config.num_experts_per_tok) // total
    attention = model.base_model.layers[0].self_attn
    width = config.num_attention_heads * attention.head_dim
    return sequence_cost(num_parameters, config.num_hidden_layers, width)
