"""Time and idle time of a pipeline: any order with any durations, and the closed formulas for equal ones. Torch-free.

p ranks, v stages per rank, m microbatches. Durations of one stage and one microbatch: F forward, B whole backward, W
the part of B that computes weight gradients. With v stages per rank each has 1/v of a rank's layers, and F, B, W
mean those of a whole rank. Sources: 2104.04473 (GPipe, 1F1B, interleaved), 2401.10241 (zero bubble), DualPipe's README.
"""

from collections.abc import Callable
from dataclasses import dataclass

from plait.cost.arithmetic import Number
from plait.parallel.pipeline_orders import Action, Order


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """What one pass through an order took.

    busy_s, first_start_s, last_end_s, peak_live: per rank. peak_live counts stage inputs held at once: from the start
    of a forward to the end of its backward (its weight part, if apart); forward-only work holds nothing.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    first_start_s: tuple[float, ...]
    last_end_s: tuple[float, ...]
    peak_live: tuple[int, ...]

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Idle time of each rank until all have ended."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def bubble_s(self) -> float:
        """The longest idle time of a rank between its own first start and last end: what zero-bubble work measures.

        Ranks that need not meet at the end of a step begin the next one by so much earlier.
        """
        spans = zip(self.first_start_s, self.last_end_s, self.busy_s, strict=True)
        return max(end - start - busy for start, end, busy in spans)


def simulate_pipeline(
    order: Order,
    duration_s: Callable[[Action], float],
    *,
    hop_s: float = 0.0,
    overlapped_s: Callable[[Action, Action], float] | None = None,
) -> PipelineTimes:
    """Run an order: each rank works through its list, an action starts when what it needs has arrived.

    A forward needs the forward of the stage before; a backward (or backward_input) that of the stage after, and its own
    forward; a backward_weight its own backward_input. hop_s passes between ranks. An overlapped pair starts when both
    have what they need and takes overlapped_s(forward, backward) (their sum, if left out). An order that waits for
    itself is an assertion.
    """
    num_stages = 1 + max(action.stage for actions in order for action in actions)
    blocks = [_blocks(actions) for actions in order]
    ended: dict[tuple[int, int, str], tuple[float, int]] = {}
    clock, busy, next_block = [0.0] * len(order), [0.0] * len(order), [0] * len(order)
    first_start: list[float | None] = [None] * len(order)
    left = sum(len(rank) for rank in blocks)
    while left:
        before = left
        for rank, waiting in enumerate(blocks):
            while next_block[rank] < len(waiting):
                block = waiting[next_block[rank]]
                arrivals = [_arrival(action, num_stages, ended, hop_s) for action in block]
                if any(arrival is None for arrival in arrivals):
                    break
                start = max(clock[rank], *(a for a in arrivals if a is not None))
                if len(block) == 2 and overlapped_s is not None:
                    took = overlapped_s(*block)
                else:
                    took = sum(duration_s(action) for action in block)
                if first_start[rank] is None:
                    first_start[rank] = start
                clock[rank] = start + took
                busy[rank] += took
                for action in block:
                    ended[_product(action)] = (clock[rank], rank)
                next_block[rank] += 1
                left -= 1
        assert left < before, "the order waits for itself"
    return PipelineTimes(
        makespan_s=max(clock),
        busy_s=tuple(busy),
        first_start_s=tuple(start or 0.0 for start in first_start),
        last_end_s=tuple(clock),
        peak_live=tuple(_peak_live(actions) for actions in order),
    )


def _blocks(actions: tuple[Action, ...]) -> list[tuple[Action, ...]]:
    blocks: list[tuple[Action, ...]] = []
    for action in actions:
        is_second = action.is_overlapped and bool(blocks) and len(blocks[-1]) == 1 and blocks[-1][0].is_overlapped
        if is_second:
            blocks[-1] = (*blocks[-1], action)
        else:
            blocks.append((action,))
    return blocks


def _product(action: Action) -> tuple[int, int, str]:
    kind = "backward_input" if action.kind == "backward" else action.kind
    return action.stage, action.microbatch, kind


def _arrival(
    action: Action, num_stages: int, ended: dict[tuple[int, int, str], tuple[float, int]], hop_s: float
) -> float | None:
    """When everything an action needs is on its rank; None if some of it is not computed yet."""
    stage, microbatch = action.stage, action.microbatch
    needed = []
    if action.kind == "forward":
        if stage > 0:
            needed.append((stage - 1, microbatch, "forward"))
    elif action.kind == "backward_weight":
        needed.append((stage, microbatch, "backward_input"))
    else:
        needed.append((stage, microbatch, "forward"))
        if stage < num_stages - 1:
            needed.append((stage + 1, microbatch, "backward_input"))
    latest = 0.0
    for key in needed:
        if key not in ended:
            return None
        end, rank = ended[key]
        latest = max(latest, end + (hop_s if rank != action.rank else 0.0))
    return latest


def _peak_live(actions: tuple[Action, ...]) -> int:
    if all(action.kind == "forward" for action in actions):
        return 0
    live = peak = 0
    for action in actions:
        if action.kind == "forward":
            live += 1
            peak = max(peak, live)
        elif action.kind in ("backward", "backward_weight"):
            live -= 1
    return peak


def equal_durations(F: float, B: float, W: float, v: int = 1) -> Callable[[Action], float]:
    """The same durations for every stage and microbatch; F, B, W of a whole rank, so each stage takes 1/v of them."""
    took = {"forward": F / v, "backward": B / v, "backward_input": (B - W) / v, "backward_weight": W / v}
    return lambda action: took[action.kind]


def gpipe_idle_s(p: Number, F: Number, B: Number) -> Number:
    """(p - 1)(F + B) on each rank (2104.04473)."""
    return (p - 1) * (F + B)


def one_f_one_b_idle_s(p: Number, F: Number, B: Number) -> Number:
    """(p - 1)(F + B), as GPipe: 1F1B saves memory, not time (2104.04473)."""
    return (p - 1) * (F + B)


def interleaved_idle_s(p: Number, v: Number, F: Number, B: Number) -> Number:
    """(p - 1)(F + B) / v, where m is a multiple of p (2104.04473)."""
    return (p - 1) * (F + B) / v


def zero_bubble_v_idle_s(p: Number, F: Number) -> Number:
    """(p - 1) F/2 until all have ended, where F = B - W = W; for other durations simulate.

    The published 0 (2401.10241) is the bubble between a rank's own first start and last end. The ranks start up to
    (p - 1) F/2 apart, which a step that ends for all at once still pays.
    """
    return (p - 1) * F / 2


def dual_pipe_v_idle_s(p: Number, B: Number, W: Number, F_and_B: Number) -> Number:
    """(p - 1)(F&B + B - 3 W) / 2 on the most idle rank, exact where F = B - W = W; too much where W < B - W.

    p in ranks, F&B an overlapped pair. DualPipe's README writes PP/2 - 1 with PP stages on PP/2 ranks, and durations of
    one stage, here half a rank's.
    """
    return (p - 1) * (F_and_B + B - 3 * W) / 2


def forward_only_idle_s(p: Number, F: Number) -> Number:
    """(p - 1) F: an inference pass fills and drains once."""
    return (p - 1) * F


def peak_live_microbatches(schedule: str, p: Number, m: Number, v: Number = 1) -> Number:
    """Microbatches of a rank's whole share of layers that its activations amount to, at the most loaded rank, m >= 2 p.

    gpipe m; 1f1b p; interleaved p (1 + (p - 1)/(p v)); zero_bubble_v p; dual_pipe_v p + 1/2.
    """
    if schedule == "gpipe":
        return m
    if schedule == "interleaved_1f1b":
        return p + (p - 1) / v
    assert schedule in ("1f1b", "zero_bubble_v", "dual_pipe_v"), f"no formula for {schedule}"
    return p + 0.5 if schedule == "dual_pipe_v" else p
