"""One causal LM split over the ranks of a layout: what the training stage and the engine talk to."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

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
from plait.parallel.balance import SequenceCost, partition, sequence_cost
from plait.parallel.context import balanced, cut, row_multiple, sequence_multiple
from plait.parallel.data import forget_gathered, set_last_microbatch
from plait.parallel.degrees import Layout
from plait.parallel.gradients import first_nonfinite, global_norm, is_split_beyond_data, local_gradients, sum_partial
from plait.parallel.mesh import Mesh
from plait.parallel.pipeline_orders import num_microbatches_run
from plait.parallel.pipeline_stages import Score, StageModule
from plait.parallel.state import sharded_state, whole
from plait.roles.model import TokenScores, score_tokens
from plait.stages.packing import Microbatch, TokenSequence, filled, pack_rows, plan_microbatches


class SequenceScores(NamedTuple):
    """Of each sequence: log-probabilities and values at its loss tokens, the value after its last token.

    Values are 0 without a value head.
    """

    logprobs: list[Tensor]
    values: list[Tensor]
    last_values: list[float]


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
        ends = embedding_names(model)
        table = next(name for name, p in model.named_parameters() if p is model.get_input_embeddings().weight)
        self._parts = parallelize(model, layout, mesh, compute_dtype, value_head)
        named = {name: p for stage in self._parts.stages for name, p in stage.all_parameters().items()}
        self.masters: dict[str, DTensor] = {name: p for name, p in named.items() if isinstance(p, DTensor)}
        assert self.masters.keys() == named.keys(), "every parameter is sharded, if only over one rank"
        owned = [name for stage in self._parts.stages for name in stage.owned_parameters()]
        self._copies = {name: table for name in self.masters if name not in owned}
        ends |= {name for name in named if name in self._copies or name.startswith("value_head.")}
        self._split = {name for name, p in self.masters.items() if is_split_beyond_data(p)}
        self._owner = self._pipeline_ranks(owned)
        # Optimisers see plain tensors: what they do to each element needs nothing of the others.
        self._locals: dict[str, Tensor] = {
            name: nn.Parameter(p.to_local().detach()) for name, p in self.masters.items()
        }
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
        count = max(1, *(len(rows) for rows in rows_of))
        if self.layout.pp > 1:
            count = num_microbatches_run(self.layout.pp_schedule, self.layout.pp, count)
        place = self.mesh.place("dp_replicate", "dp_shard")
        rows = rows_of[place] + [[]] * (count - len(rows_of[place]))
        multiples = row_multiple(self.layout), sequence_multiple(self.layout)
        groups = [rows] if self.layout.pp > 1 else [[row] for row in rows]  # a pipeline's rows have one length
        packed = [made for group in groups for made in pack_rows(sequences, group, self.device, *multiples)]
        if self.layout.cp == 1:
            return [cut(microbatch, self.layout, self.mesh) for microbatch in packed]
        return [replace(cut(microbatch, self.layout, self.mesh), whole=microbatch) for microbatch in packed]

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
        expert_balance: float = 0.0,
    ) -> None:
        """Forward and backward of all of them; gradients are added to those of passes since the last `apply`.

        loss_of gets the scores of the loss tokens that this rank owns, none for filling. Ranks of one tp group own the
        same ones and must return the same loss. expert_balance: weight of the experts' load-balancing loss, which is
        added: its coefficient / number of sequences of the update (`plait.models.routing.Balance`).
        """
        if expert_balance:
            microbatches = [balanced(m, expert_balance, self.layout, self.mesh) for m in microbatches]
        score = self._score(temperature, entropy_needs_grad)
        if self._parts.pipeline is not None:
            self._parts.pipeline.train_pass(microbatches, loss_of, score)
            return
        (stage,) = self._parts.stages
        for number, microbatch in enumerate(microbatches, start=1):
            set_last_microbatch(stage, self.layout, number == len(microbatches))
            scores = self._forward(stage, microbatch, score)
            loss = loss_of(microbatch, scores)
            if len(scores.logprobs_R) == 0:  # filling must reach every collective of the backward pass
                loss = loss + scores.logprobs_R.sum()
            loss.backward()

    def _score(self, temperature: float, entropy_needs_grad: bool = False) -> Score:
        """What the last stage does with its hidden states."""
        value_head = None if self._parts.last is None else self._parts.last.value_head

        def score(model: PreTrainedModel, microbatch: Microbatch, hidden_1TD: Tensor | None) -> TokenScores:
            return score_tokens(
                model,
                microbatch,
                temperature,
                entropy_needs_grad=entropy_needs_grad,
                value_head=value_head,
                reduce=self._parts.reduce,
                hidden_1TD=hidden_1TD,
            )

        return score

    @staticmethod
    def _forward(stage: StageModule, microbatch: Microbatch, score: Score) -> TokenScores:
        stage.score = score
        output = stage(microbatch=microbatch)
        return TokenScores(**dict(zip(stage.score_fields, output, strict=True)))

    def _pipeline_ranks(self, owned: list[str]) -> dict[str, tuple[int, torch.Size]]:
        """(pipeline rank that has it, shape) of every parameter of the whole model, in its order."""
        mine = {name: (self.mesh.place("pp"), self.masters[name].shape) for name in owned}
        if self.layout.pp == 1:
            return mine
        of_rank: list[dict[str, tuple[int, torch.Size]]] = [{} for _ in range(self.layout.pp)]
        dist.all_gather_object(of_rank, mine, group=self.mesh.group("pp"))
        return {name: entry for part in of_rank for name, entry in part.items()}

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[Tensor]:
        """Log-probabilities of the loss tokens of each sequence, complete on every rank, without gradients."""
        return self.scores(sequences, temperature=temperature, max_tokens=max_tokens).logprobs

    @torch.no_grad()
    def scores(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> SequenceScores:
        """Scores of the loss tokens of each sequence, complete on every rank, without gradients."""
        counts = torch.tensor([int(sequence.loss_mask_T.sum()) for sequence in sequences], device=self.device)
        starts = counts.cumsum(0) - counts
        # Rows: log-probabilities, values. The values after each last token come behind.
        all_2R = torch.zeros(2, int(counts.sum()) + len(sequences), device=self.device)
        microbatches, score = self.split(sequences, max_tokens), self._score(temperature)
        if self._parts.pipeline is None:
            (stage,) = self._parts.stages
            scores = [self._forward(stage, microbatch, score) for microbatch in microbatches]
        else:
            scores = self._parts.pipeline.scores(microbatches, score)
        if self._parts.last is not None:
            for microbatch, one in zip(microbatches, scores, strict=True):
                places_R = starts[microbatch.sequence_R] + microbatch.place_R
                all_2R[0, places_R] = one.logprobs_R
                if one.values_R is not None and one.values_B is not None:
                    all_2R[1, places_R] = one.values_R
                    all_2R[1, int(counts.sum()) + microbatch.ends_B] = one.values_B
        self._forget_gathered()
        # Ranks own disjoint tokens, and those of one tp group the same.
        dist.all_reduce(all_2R, group=self.mesh.group("pp", "dp_replicate", "dp_shard", "cp"))
        logprobs_R, values_R = all_2R[:, : int(counts.sum())]
        parts = counts.tolist()
        return SequenceScores(
            list(logprobs_R.split(parts)), list(values_R.split(parts)), all_2R[1, int(counts.sum()) :].tolist()
        )

    def _forget_gathered(self) -> None:
        for stage in self._parts.stages:
            forget_gathered(stage)

    def sum_shared(self) -> None:
        """Complete the gradients that ranks share: parts of whole tensors over tp, copies of a tied table over pp."""
        partial = local_gradients({name: self.masters[name] for name in sorted(self._parts.partial)})
        sum_partial(list(partial.values()), self.mesh.group("tp"), self.device)
        if self._parts.pipeline is not None:
            tied = [p.grad for p in self._parts.pipeline.tied_parameters()]
            self._parts.pipeline.sum_tied([gradient for gradient in tied if gradient is not None])

    @torch.no_grad()
    def apply(self, rate: float) -> UpdateResult:
        """Clip by the global norm and take one optimiser step at `rate`; the result is the same on every rank.

        With a norm that is not finite nothing is applied, moments included; the result names a culprit.
        """
        self.sum_shared()
        gradients = local_gradients(self.masters)
        counted = {name: gradient for name, gradient in gradients.items() if name not in self._copies}
        total = global_norm(counted, self._split, self.mesh)
        norm = float(total)
        nonfinite = None
        if not math.isfinite(norm):
            nonfinite = first_nonfinite(counted, list(self._owner), self.mesh) or "the sum over all parameters"
        result = UpdateResult(norm, nonfinite)
        if nonfinite is None:
            for name, gradient in gradients.items():
                self._locals[name].grad = gradient
            nn.utils.clip_grads_with_norm_(self._locals.values(), self._config.max_grad_norm, total)
            self._step(rate)
        for name, master in self.masters.items():
            master.grad = self._locals[name].grad = None
        self._forget_gathered()
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
        """Masters and moments for torch.distributed.checkpoint, in memory that it may load into; then call `loaded`."""
        by_parameter = {id(p): entry for o in self._optimizers for p, entry in o.state.items()}
        moments = {
            name: {key: value for key, value in by_parameter[id(local)].items() if isinstance(value, Tensor)}
            for name, local in self._locals.items()
        }
        # A copy of a tied table is saved, and loaded, as the table itself.
        own = {name: name for name in self.masters if name not in self._copies}
        own |= {table: name for name, table in self._copies.items() if table not in own}
        masters = {saved: self.masters[name] for saved, name in own.items()}
        return sharded_state(masters, {saved: moments[name] for saved, name in own.items()}, self._packed)

    @torch.no_grad()
    def loaded(self) -> None:
        """Take over what was loaded into `state`."""
        for copied, table in self._copies.items():
            if table in self.masters:  # a V-shaped pipeline has both on one rank
                self._locals[copied].copy_(self._locals[table])
                for optimizer in self._optimizers:
                    if self._locals[copied] in optimizer.state:
                        source = optimizer.state[self._locals[table]]
                        for key, value in optimizer.state[self._locals[copied]].items():
                            if isinstance(value, Tensor):
                                value.copy_(source[key])
        self._forget_gathered()

    @torch.no_grad()
    def gathered(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each whole parameter of the model by name, on every rank, one after the other: for export and for engines.

        dtype: cast before it is sent; None leaves fp32. A weight that is used twice comes once. All ranks iterate.
        """
        for name, (owner, shape) in self._owner.items():
            if owner == self.mesh.place("pp"):
                tensor = whole(self.masters[name], name in self._packed, dtype).to(self.device)
            else:
                size = (shape[0], -1, *shape[3:]) if len(shape) == 4 else shape
                tensor = torch.empty(shape, dtype=dtype or torch.float32, device=self.device).view(size)
            if self.layout.pp > 1:
                tensor = tensor.contiguous()
                dist.broadcast(tensor, group=self.mesh.group("pp"), group_src=owner)
            yield name, tensor

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
