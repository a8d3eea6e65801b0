"""Pipeline schedules as data: what each rank does, in order. Torch-free.

The orders equal those of torch.distributed.pipelining (schedules of the same names), which runs them; tests compare
them with what it lays out, and with what `plait.parallel.pipeline` recorded on real ranks. Two things an order does not
say: torch runs the halves of an overlapped pair one after the other, and backward_input of stage 0 is empty (nothing
that enters it has a gradient), so that its backward_weight is a whole backward.
p ranks, v stages per rank, m microbatches. Sources: GPipe 1811.06965; 1F1B and interleaved 2104.04473; zero bubble V
2401.10241, section 6; DualPipeV github.com/deepseek-ai/DualPipe.
"""

from collections import Counter, deque
from dataclasses import dataclass
from typing import Literal

from plait.parallel.degrees import V_SCHEDULES, PipelineSchedule

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
"""backward is backward_input and backward_weight in one."""


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of a rank: a stage (of p x v, in model order), a microbatch, and what is computed.

    is_overlapped: it runs together with its neighbour in the list, a forward with the backward that follows it.
    """

    rank: int
    stage: int
    microbatch: int
    kind: Kind
    is_overlapped: bool = False


Order = tuple[tuple[Action, ...], ...]
"""Actions of each rank."""


def rank_of_stage(schedule: PipelineSchedule, stage: int, p: int) -> int:
    """The rank that holds a stage: round and round, or there and back for the V-shaped schedules."""
    turn, place = divmod(stage, p)
    return p - 1 - place if schedule in V_SCHEDULES and turn % 2 else place


def stages_of_rank(schedule: PipelineSchedule, rank: int, p: int, v: int) -> tuple[int, ...]:
    """The stages of a rank, in model order."""
    return tuple(stage for stage in range(p * v) if rank_of_stage(schedule, stage, p) == rank)


def pipeline_order(schedule: PipelineSchedule, p: int, m: int, v: int = 1) -> Order:
    """The order of a schedule. Asserts what `layout_violations` reports about v and m."""
    if schedule == "gpipe":
        assert v == 1
        return gpipe(p, m)
    if schedule == "1f1b":
        assert v == 1
        return one_f_one_b(p, m)
    if schedule == "interleaved_1f1b":
        return interleaved_1f1b(p, m, v)
    assert v == 2, f"{schedule} has 2 stages per rank, not {v}"
    return zero_bubble_v(p, m) if schedule == "zero_bubble_v" else dual_pipe_v(p, m)


def num_microbatches_run(schedule: PipelineSchedule, p: int, m: int) -> int:
    """Microbatches with which a schedule runs m of them: those that are missing are filling only.

    1f1b and dual_pipe_v need as many as there are stages, interleaved_1f1b equal rounds.
    """
    if schedule == "1f1b":
        return max(m, p)
    if schedule == "dual_pipe_v":
        return max(m, 2 * p)
    while schedule == "interleaved_1f1b" and m % max(1, m // p):
        m += 1
    return m


def gpipe(p: int, m: int) -> Order:
    """All forwards, then all backwards."""
    forward, backward = "forward", "backward"
    return tuple(
        tuple(Action(rank, rank, i, kind) for kind in (forward, backward) for i in range(m))  # type: ignore[arg-type]
        for rank in range(p)
    )


def forward_only(p: int, m: int, schedule: PipelineSchedule = "1f1b", v: int = 1) -> Order:
    """Inference: each microbatch passes through once. A rank with several stages runs one after the other."""
    return tuple(
        tuple(Action(rank, stage, i, "forward") for stage in stages_of_rank(schedule, rank, p, v) for i in range(m))
        for rank in range(p)
    )


def one_f_one_b(p: int, m: int) -> Order:
    """Rank r runs p - 1 - r forwards ahead, then one forward and one backward in turn."""
    assert m >= p, f"1f1b over {p} stages needs as many microbatches, not {m}"
    return tuple(_in_turn(rank, p, m, 1, size=m, ahead=p - 1 - rank) for rank in range(p))


def interleaved_1f1b(p: int, m: int, v: int) -> Order:
    """1F1B over v stages per rank, which take turns after every round of microbatches.

    Rounds are m // p (at least one), of equal size. Rank r runs (v - 1) x round size + 2 (p - 1 - r) forwards ahead.
    """
    assert v >= 2, f"interleaved_1f1b has 2 stages per rank or more, not {v}"
    rounds = max(1, m // p)
    assert m % rounds == 0, f"{m} microbatches do not fill {rounds} equal rounds"
    size = m // rounds
    return tuple(
        _in_turn(rank, p, m, v, size=size, ahead=min((v - 1) * size + 2 * (p - 1 - rank), m * v)) for rank in range(p)
    )


def _in_turn(rank: int, p: int, m: int, v: int, *, size: int, ahead: int) -> tuple[Action, ...]:
    """Forwards ahead, one forward and one backward in turn, then the backwards that are left."""
    forwards, backwards = _Turn(rank, p, v, size), _Turn(rank, p, v, size)
    actions = [forwards.next("forward") for _ in range(ahead)]
    for _ in range(m * v - ahead):
        actions += [forwards.next("forward"), backwards.next("backward")]
    actions += [backwards.next("backward") for _ in range(ahead)]
    return tuple(actions)


class _Turn:
    """Deals out the stages of a rank in turn, `size` microbatches each; backwards in reverse order of stages."""

    def __init__(self, rank: int, p: int, v: int, size: int):
        self.rank, self.p, self.v, self.size = rank, p, v, size
        self.step = 0
        self.seen: Counter[int] = Counter()

    def next(self, kind: Kind) -> Action:
        turn = self.step // self.size % self.v
        local = turn if kind == "forward" else self.v - 1 - turn
        stage = local * self.p + self.rank
        action = Action(self.rank, stage, self.seen[stage], kind)
        self.step += 1
        self.seen[stage] += 1
        return action


class _Rank:
    """Collects the actions of one rank of a V; microbatches of a (stage, kind) go up by one each time."""

    def __init__(self, rank: int, p: int):
        self.rank = rank
        self.stages = (rank, 2 * p - 1 - rank)
        self.actions: list[Action] = []
        self.count: Counter[tuple[int, str]] = Counter()
        self.owed: deque[tuple[int, int]] = deque()

    def add(self, chunk: int, kind: Kind, is_overlapped: bool = False) -> None:
        counted = "backward_input" if kind == "backward" else kind
        microbatch = self.count[chunk, counted]
        self.count[chunk, counted] += 1
        self.actions.append(Action(self.rank, self.stages[chunk], microbatch, kind, is_overlapped))
        if kind == "backward_input":
            self.owed.append((chunk, microbatch))

    def pair(self, forward_chunk: int, backward_chunk: int) -> None:
        """A forward and a full backward that run together."""
        self.add(forward_chunk, "forward", True)
        self.add(backward_chunk, "backward", True)

    def pay(self) -> None:
        """The oldest weight gradient still owed, if any."""
        if self.owed:
            chunk, microbatch = self.owed.popleft()
            self.actions.append(Action(self.rank, self.stages[chunk], microbatch, "backward_weight"))


def zero_bubble_v(p: int, m: int) -> Order:
    """ZBV: 2 stages per rank in a V, weight gradients apart; no bubble where forward, input and weight take as long.

    Written for at least 2 p - 1 microbatches; with fewer, the work of those that are missing is left out.
    """
    return tuple(_zero_bubble_v_rank(rank, p, m) for rank in range(p))


def _zero_bubble_v_rank(rank: int, p: int, m: int) -> tuple[Action, ...]:
    r = _Rank(rank, p)
    done: Counter[tuple[int, str]] = r.count
    full = max(2 * p - 1, m)

    def backward(chunk: int) -> None:
        r.add(chunk, "backward_input")
        r.add(chunk, "backward_weight")

    for _ in range(2 * (p - rank) - 1):
        r.add(0, "forward")
    for _ in range(rank):
        r.add(1, "forward")
        r.add(0, "forward")
    for _ in range(p - rank):
        r.add(1, "forward")
        backward(1)
    while done[1, "forward"] < done[0, "forward"] or done[0, "forward"] < full:
        if done[0, "forward"] < full:
            r.add(0, "forward")
        backward(0)
        r.add(1, "forward")
        backward(1)
    for _ in range(rank):
        r.add(0, "backward_input")
        r.add(1, "backward_input")
    for _ in range(p - rank):
        r.add(0, "backward_input")
        r.add(0, "backward_weight")
    for chunk in (1, 0):
        while done[chunk, "backward_weight"] < done[chunk, "backward_input"]:
            r.add(chunk, "backward_weight")
    return tuple(action for action in r.actions if action.microbatch < m)


def dual_pipe_v(p: int, m: int) -> Order:
    """DualPipeV: as ZBV, in the middle a forward of one stage together with a backward of the other."""
    assert m >= 2 * p, f"dual_pipe_v over {2 * p} stages needs as many microbatches, not {m}"
    return tuple(_dual_pipe_v_rank(rank, p, m) for rank in range(p))


def _dual_pipe_v_rank(rank: int, p: int, m: int) -> tuple[Action, ...]:
    r = _Rank(rank, p)
    for _ in range(2 * (p - rank - 1)):
        r.add(0, "forward")
    for _ in range(rank + 1):
        r.add(0, "forward")
        r.add(1, "forward")
    for _ in range(p - rank - 1):
        r.add(1, "backward_input")
        r.pay()
        r.add(1, "forward")
    for i in range(m - 2 * p + rank + 1):
        if i == 0 and rank == p - 1:  # apart, so that the first backward starts earlier
            r.add(0, "forward")
            r.add(1, "backward")
        else:
            r.pair(0, 1)
        r.pair(1, 0)
    for _ in range(p - rank - 1):
        r.add(1, "backward")
        r.pair(1, 0)
    # The second half of what is left defers weight gradients, to fill the end.
    half, is_odd = (rank + 1) // 2, rank % 2 == 1
    for i in range(rank + 1):
        r.add(1, "backward_input" if i > half or (i == half and is_odd) else "backward")
        r.add(0, "backward_input" if i >= half else "backward")
    for _ in range(p - rank - 1):
        r.pay()
        r.add(0, "backward_input")
    for _ in range(rank + 1):
        r.pay()
    return tuple(r.actions)
