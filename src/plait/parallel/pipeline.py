"""Pipeline parallelism: stages on several ranks run the microbatches of a pass in the order of a schedule.

Training runs on torch.distributed.pipelining, which sends hidden states forward and their gradients back and, where a
stage is wrapped by FSDP, reduces its gradients once, after the last microbatch. Everything else that a stage needs
(attention context, positions, what the loss reads) is on every rank already, by microbatch, and is never sent.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from plait.parallel.degrees import Layout
from plait.parallel.pipeline_orders import Kind, num_microbatches_run, rank_of_stage
from plait.parallel.pipeline_stages import Score, StageModule
from plait.roles.model import TokenScores
from plait.stages.packing import Microbatch

_ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL_STAGES = {
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble_v": ScheduleZBVZeroBubble,
    "dual_pipe_v": ScheduleDualPipeV,
}
_MAX_SENDS = 4
"""Messages that a rank has under way in a forward-only pass before it waits for their receiver. An interleaved rank
does not wait: its messages go round in a circle."""

LossOf = Callable[[Microbatch, TokenScores], Tensor]


class Slot(NamedTuple):
    """One piece of work that this rank really ran, on the clock of time.perf_counter; waiting for messages is outside.

    backward_input of stage 0 is empty: nothing enters that has a gradient, so its backward_weight is a whole backward.
    """

    stage: int
    microbatch: int
    kind: Kind
    start_s: float
    end_s: float


class _RecordedStage(PipelineStage):
    """torch's stage, which looks its microbatch up by number and writes down what it ran and when."""

    def __init__(
        self, module: StageModule, slots: list[Slot], device: torch.device, group: dist.ProcessGroup, **metas: Any
    ):
        super().__init__(module, module.number, module.num_stages, device, group=group, **metas)
        self.slots = slots
        self.microbatches: Sequence[Microbatch] = ()

    def _record(self, microbatch: int, kind: Kind, start_s: float) -> None:
        self.slots.append(Slot(self.stage_index, microbatch, kind, start_s, time.perf_counter()))

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: Any, kwargs: Any = None, save_forward_output: bool = True
    ) -> Any:
        start_s = time.perf_counter()
        own = {"microbatch": self.microbatches[fwd_chunk_id]}
        output = super().forward_one_chunk(fwd_chunk_id, args, own, save_forward_output)
        self._record(fwd_chunk_id, "forward", start_s)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        start_s = time.perf_counter()
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._record(bwd_chunk_id, "backward" if full_backward else "backward_input", start_s)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        start_s = time.perf_counter()
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._record(bwd_chunk_id, "backward_weight", start_s)


class Pipeline:
    """The stages of this rank, run together with those of the other pipeline ranks. All of them call it together.

    slots: what this rank ran in its last pass, in order.
    """

    def __init__(
        self,
        stages: Sequence[StageModule],
        layout: Layout,
        group: dist.ProcessGroup,
        device: torch.device | str,
        *,
        hidden_size: int,
        dtype: torch.dtype,
    ):
        """stages: of `split_stages`, wrapped or not. group: the ranks of pp. dtype: of the hidden states sent.

        Between stages hidden states are ordinary tensors [1, T, D], or [1, T / tp, D] where the layout has sp. Where
        FSDP wraps them, each stage is itself the outermost unit. Whatever zero says, what a pass gathers stays gathered
        until it ends: weight gradients that a schedule computes apart from a gathered backward would be lost unseen.
        """
        assert len(stages) == layout.stages_per_rank, f"{len(stages)} stages, {layout.stages_per_rank} per rank"
        self.stages, self.layout, self.device = tuple(stages), layout, torch.device(device)
        self._group, self._rank = group, dist.get_rank(group)
        self._hidden_size, self._dtype = hidden_size, dtype
        self._built: tuple[tuple[int, int], list[_RecordedStage], Any] | None = None
        self._microbatches: Sequence[Microbatch] = ()
        self._loss_of: LossOf | None = None
        self.slots: list[Slot] = []
        for stage in self.stages:
            if isinstance(stage, FSDPModule):
                stage.set_reshard_after_forward(False)
        # Taken now: while FSDP has gathered a stage, it has other parameters.
        self._tied = [s.model.get_parameter(s.tied) for s in self.stages if s.tied is not None]

    @property
    def last(self) -> StageModule | None:
        """The last stage, which scores and has the loss, if this rank holds it."""
        return self.stages[-1] if self.stages[-1].is_last else None

    def train_pass(self, microbatches: Sequence[Microbatch], loss_of: LossOf, score: Score) -> None:
        """Forward and backward of all microbatches; gradients are added to those that are there.

        microbatches: of one length, and as many as `num_microbatches_run` says (`pack_rows` makes them, with empty rows
        for those that are missing); the same on all ranks. loss_of: called where the last stage is, once for every
        microbatch that holds sequences; returns a sum over loss tokens. Messages go by microbatch: T x D numbers each.
        """
        count, lengths = len(microbatches), {m.ids_1T.shape[1] for m in microbatches}
        needed = num_microbatches_run(self.layout.pp_schedule, self.layout.pp, count)
        assert count == needed, f"{count} microbatches for {self.layout.pp_schedule}, which takes {needed}"
        assert len(lengths) == 1, f"microbatches of {sorted(lengths)} tokens in one pass"
        stages, schedule = self._schedule(count, lengths.pop())
        self._microbatches, self._loss_of = microbatches, loss_of
        self.slots.clear()
        for stage in stages:
            stage.microbatches = microbatches
        for module in self.stages:
            module.score = score
        schedule.step(target=torch.arange(count), return_outputs=False)
        self._microbatches, self._loss_of = (), None
        for stage in stages:
            stage.microbatches = ()
            stage.clear_runtime_states()

    def _schedule(self, count: int, num_tokens: int) -> tuple[list[_RecordedStage], Any]:
        """torch's schedule for passes of this many microbatches of this length; the last one is kept.

        It owns a buffer for every message that the rank receives in a pass, and counts on their shape.
        """
        if self._built is None or self._built[0] != (count, num_tokens):
            self._built = None  # frees its buffers first
            stages = [self._stage(module, num_tokens) for module in self.stages]
            name = self.layout.pp_schedule
            settings: dict[str, Any] = {"loss_fn": self._loss, "scale_grads": False}
            made: PipelineScheduleSingle | PipelineScheduleMulti
            if name in _ONE_STAGE:
                made = _ONE_STAGE[name](stages[0], count, **settings)
            else:
                made = _SEVERAL_STAGES[name](list(stages), count, **settings)
            self._built = (count, num_tokens), stages, made
        return self._built[1:]

    def _stage(self, module: StageModule, num_tokens: int) -> _RecordedStage:
        """Shapes are given, so that torch does not run a microbatch to find them."""
        shape = self._boundary_shape(num_tokens)
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        scores = (torch.empty(0, device="meta"),) * len(TokenScores._fields)  # not sent, so of any shape
        return _RecordedStage(
            module,
            self.slots,
            self.device,
            self._group,
            input_args=() if module.is_first else (hidden,),
            output_args=scores if module.is_last else (hidden,),
        )

    def _boundary_shape(self, num_tokens: int) -> tuple[int, int, int]:
        return 1, num_tokens // (self.layout.tp if self.layout.sp else 1), self._hidden_size

    def _loss(self, output: tuple[Tensor, ...], index: Tensor) -> Tensor:
        assert self.last is not None, "a loss on a rank without the last stage"
        assert self._loss_of is not None, "a loss outside of a pass"
        microbatch = self._microbatches[int(index)]
        if not microbatch.sequences:  # empty sums: they take part in backward and add nothing
            return torch.stack([score.sum() for score in output if score.requires_grad]).sum()
        return self._loss_of(microbatch, _scores(self.last, output))

    @torch.no_grad()
    def scores(self, microbatches: Sequence[Microbatch], score: Score) -> list[TokenScores]:
        """Forward only, without gradients: the scores of each microbatch where the last stage is, elsewhere none.

        Any number of microbatches of any lengths. A rank with several stages runs one after the other.
        """
        self.slots.clear()
        sends: deque[tuple[Any, Tensor]] = deque()
        most = len(microbatches) * len(self.stages) if self.layout.pp_schedule == "interleaved_1f1b" else _MAX_SENDS
        handed_on: list[Tensor] = []
        results = []
        for module in self.stages:
            module.score = score
            source, target = self._rank_of(module.number - 1), self._rank_of(module.number + 1)
            received, handed_on, waiting = handed_on, [], []
            for i, microbatch in enumerate(microbatches):
                hidden = None
                if not module.is_first:
                    hidden = received[i] if source == self._rank else self._receive(microbatch, source)
                start_s = time.perf_counter()
                output = module(hidden, microbatch=microbatch)
                self.slots.append(Slot(module.number, i, "forward", start_s, time.perf_counter()))
                if module.is_last:
                    results.append(_scores(module, output))
                elif target == self._rank:
                    handed_on.append(output)
                elif target == source:  # interleaved over two ranks: both ways in turn could wait for each other
                    waiting.append(output)
                else:
                    sends.append(self._send(output, target))
                while len(sends) > most:
                    sends.popleft()[0].wait()
            sends += [self._send(output, target) for output in waiting]
        for work, _ in sends:
            work.wait()
        if self.layout.zero == 3:
            _forget_gathered(self.stages)
        return results

    def _receive(self, microbatch: Microbatch, source: int) -> Tensor:
        shape = self._boundary_shape(microbatch.ids_1T.shape[1])
        hidden = torch.empty(shape, dtype=self._dtype, device=self.device)
        dist.recv(hidden, group=self._group, group_src=source)
        return hidden

    def _send(self, hidden: Tensor, target: int) -> tuple[Any, Tensor]:
        """What to wait for, and what must live until then."""
        hidden = hidden.contiguous()
        return dist.isend(hidden, group=self._group, group_dst=target), hidden

    def _rank_of(self, stage: int) -> int:
        """The pipeline rank of a stage; -1 before the first and after the last."""
        if not 0 <= stage < self.layout.num_stages:
            return -1
        return rank_of_stage(self.layout.pp_schedule, stage, self.layout.pp)

    def tied_parameters(self) -> list[nn.Parameter]:
        """This rank's copies of a table that is both embedding and head, in the order of its stages; often none."""
        return self._tied

    @torch.no_grad()
    def sum_tied(self, gradients: Sequence[Tensor]) -> None:
        """Add up, in place, the gradients of the copies of a tied table. Once per update, by all pipeline ranks.

        gradients: of `tied_parameters`, in that order; every copy gets the same bits. The first and last rank exchange
        their share of the table, the V-shaped schedules hold both copies on rank 0.
        """
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        assert len(local) == len(self._tied), f"{len(local)} gradients of {len(self._tied)} tied tables"
        if not local:
            return
        if len(local) == 2:
            other = local[1]
        else:
            ends = {0, self._rank_of(self.layout.num_stages - 1)}
            (peer,) = ends - {self._rank}
            other = self._exchange(local[0].to(self.device).contiguous(), peer).to(local[0].device)
        local[0].add_(other)
        for copied in local[1:]:
            copied.copy_(local[0])

    def _exchange(self, value: Tensor, peer: int) -> Tensor:
        received = torch.empty_like(value)
        ops = [
            dist.P2POp(dist.isend, value, group=self._group, group_peer=peer),
            dist.P2POp(dist.irecv, received, group=self._group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return received


def _forget_gathered(stages: Sequence[nn.Module]) -> None:
    for stage in stages:
        for unit in stage.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _scores(module: StageModule, output: tuple[Tensor, ...]) -> TokenScores:
    return TokenScores(**dict(zip(module.score_fields, output, strict=True)))
