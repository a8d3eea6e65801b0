"""Our pipeline orders against those that torch.distributed.pipelining generates, and what an order must be."""

from collections import Counter

import pytest
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from plait.parallel.pipeline_orders import (
    forward_only,
    num_microbatches_run,
    pipeline_order,
    rank_of_stage,
    stages_of_rank,
)

KINDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
CLASSES = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
    "zero_bubble_v": schedules.ScheduleZBVZeroBubble,
    "dual_pipe_v": schedules.ScheduleDualPipeV,
}


class Stage(_PipelineStageBase):
    """What a schedule asks of a stage: no process group, and a log of what it is told to run."""

    def __init__(self, stage_index, num_stages, group_rank, group_size):
        self.log = []
        self.submod = nn.Identity()
        self.stage_index, self.num_stages = stage_index, num_stages
        self.group_rank, self.group_size, self.group = group_rank, group_size, None
        self.has_backward = True

    def forward_one_chunk(self, microbatch, *args, **kwargs):
        self.log.append((self.stage_index, microbatch, "forward", False))

    def backward_one_chunk(self, microbatch, *args, **kwargs):
        self.log.append((self.stage_index, microbatch, "backward", False))

    def _nothing(self, *args, **kwargs):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing
    perform_reduce_grad = _create_grad_recv_info = _prepare_forward_infra = _prepare_backward_infra = _nothing


def torch_run(name, p, m):
    """As torch_order, of the schedules with one stage per rank: what they run, since they do not read their order."""
    ran = {}
    for rank in range(p):
        stage = Stage(rank, p, rank, p)
        schedule = CLASSES[name](stage, m, loss_fn=lambda y, t: y)
        schedule._initialize_stage = schedule._maybe_compute_loss = schedule._update_losses = lambda *args: None
        schedule._maybe_get_loss = lambda *args: None
        schedule._step_microbatches([()] * m, [{}] * m)
        ran[rank] = stage.log
    return ran


def torch_order(name, p, m, v):
    """{rank: [(stage, microbatch, kind, is overlapped)]} of torch's schedules that run the order they lay out."""
    stages = [Stage(stage, p * v, 0, p) for stage in stages_of_rank(name, 0, p, v)]
    schedule = CLASSES[name](stages, m, loss_fn=lambda y, t: y)
    flat = {rank: [] for rank in range(p)}
    for rank, actions in schedule.pipeline_order.items():
        for action in actions:
            if action is None:
                continue
            for part in action.sub_actions or (action,):
                kind = part.computation_type.value
                if kind in KINDS:  # else it reduces gradients, at the end
                    flat[rank].append((part.stage_index, part.microbatch_index, KINDS[kind], part is not action))
    return flat


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5, 8])
def test_orders_equal_torchs(name, p):
    v_choices = {"gpipe": (1,), "1f1b": (1,), "interleaved_1f1b": (2, 3)}.get(name, (2,))
    num_compared = 0
    for v in v_choices:
        for m in (*range(1, 3 * p), 4 * p, 4 * p + 3):
            if (name == "1f1b" and m < p) or (name == "dual_pipe_v" and m < 2 * p):
                continue
            if name == "interleaved_1f1b" and m % max(1, m // p):
                continue
            ours = {
                rank: [(a.stage, a.microbatch, a.kind, a.is_overlapped) for a in actions]
                for rank, actions in enumerate(pipeline_order(name, p, m, v))
            }
            theirs = torch_run(name, p, m) if v == 1 else torch_order(name, p, m, v)
            assert ours == theirs, f"{name} p={p} m={m} v={v}"
            num_compared += 1
    assert num_compared >= 2


@pytest.mark.parametrize("name", CLASSES)
def test_every_stage_sees_every_microbatch_once(name):
    p, m = 4, 8
    v = {"gpipe": 1, "1f1b": 1}.get(name, 2)
    for rank, actions in enumerate(pipeline_order(name, p, m, v)):
        work = Counter()
        for action in actions:
            assert action.rank == rank == rank_of_stage(name, action.stage, p)
            parts = ("backward_input", "backward_weight") if action.kind == "backward" else (action.kind,)
            work.update((action.stage, action.microbatch, part) for part in parts)
        kinds = ("forward", "backward_input", "backward_weight")
        assert work == Counter((s, i, k) for s in stages_of_rank(name, rank, p, v) for i in range(m) for k in kinds)


def test_where_stages_are():
    assert [rank_of_stage("interleaved_1f1b", s, 3) for s in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [rank_of_stage("zero_bubble_v", s, 3) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert stages_of_rank("dual_pipe_v", 0, 3, 2) == (0, 5)


def test_inference_only_goes_forward():
    assert [[a.microbatch for a in actions] for actions in forward_only(2, 3)] == [[0, 1, 2], [0, 1, 2]]
    (first, second) = forward_only(2, 2, "zero_bubble_v", 2)
    assert [(a.stage, a.microbatch) for a in first] == [(0, 0), (0, 1), (3, 0), (3, 1)]
    assert [(a.stage, a.microbatch) for a in second] == [(1, 0), (1, 1), (2, 0), (2, 1)]


@pytest.mark.parametrize(
    ("name", "p", "m", "run"),
    [
        ("gpipe", 4, 1, 1),
        ("1f1b", 4, 1, 4),
        ("1f1b", 4, 9, 9),
        ("interleaved_1f1b", 4, 3, 3),
        ("interleaved_1f1b", 4, 9, 10),  # two rounds of 5
        ("interleaved_1f1b", 2, 5, 6),
        ("zero_bubble_v", 4, 1, 1),
        ("dual_pipe_v", 4, 1, 8),
        ("dual_pipe_v", 4, 9, 9),
    ],
)
def test_filling_makes_up_the_number(name, p, m, run):
    assert num_microbatches_run(name, p, m) == run
    pipeline_order(name, p, run, {"gpipe": 1, "1f1b": 1}.get(name, 2))
