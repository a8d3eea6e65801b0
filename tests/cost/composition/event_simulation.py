"""A small discrete-event simulation of steps, piece by piece, to check the closed composition against.

Nothing of `plait.cost.composition` is used here. Every piece of every stage is a task of its own with explicit
predecessors; pools are servers that a stage holds from its turn on until its last piece is done. Events of equal time
are taken in a random order (seeded): the result must not depend on it.
"""

import heapq
import random
from dataclasses import dataclass, field


@dataclass
class Stage:
    """seconds: of all passes. num_pieces: of one pass. inputs: producer -> True if pieces stream, False if not."""

    name: str
    seconds: float
    num_pieces: int = 1
    num_passes: int = 1
    pools: tuple = ()
    inputs: dict = field(default_factory=dict)


@dataclass
class _Run:
    stage: Stage
    done: list  # times at which pieces of all passes are done, as they happen
    start: float | None = None

    @property
    def is_over(self):
        return len(self.done) == self.stage.num_pieces * self.stage.num_passes


def simulate(steps, orders, waits=None, seed=0):
    """{(step, stage): (start, end)}.

    steps: {(step, stage name): Stage}; orders: {pool: [(step, stage name), ...]}; waits: {(step, stage name): other
    runs that must be over}, beside the inputs of the same step.
    """
    rng = random.Random(seed)
    runs = {key: _Run(stage, []) for key, stage in steps.items()}
    turn = dict.fromkeys(orders, 0)
    busy = set()
    events, clock = [(0.0, 0.0, None)], 0.0
    while events:
        clock, _, finished = heapq.heappop(events)
        batch = [finished]
        while events and events[0][0] <= clock + 1e-12:
            batch.append(heapq.heappop(events)[2])
        for key in batch:
            if key is None:
                continue
            runs[key].done.append(clock)
            busy.discard(key)
            if runs[key].is_over:
                for pool in steps[key].pools:
                    turn[pool] += 1
        waiting = [key for key in runs if not runs[key].is_over and key not in busy]
        rng.shuffle(waiting)
        for key in waiting:
            if _may_start(key, runs, orders, turn, waits or {}):
                run = runs[key]
                run.start = clock if run.start is None else run.start
                busy.add(key)
                took = run.stage.seconds / run.stage.num_passes / run.stage.num_pieces
                heapq.heappush(events, (clock + took, rng.random(), key))
    assert all(run.is_over for run in runs.values()), "some runs wait for ever"
    return {key: (run.start, run.done[-1]) for key, run in runs.items()}


def _may_start(key, runs, orders, turn, waits):
    step, _ = key
    run = runs[key]
    if any(not runs[other].is_over for other in waits.get(key, ())):
        return False
    for pool in run.stage.pools:
        if turn[pool] >= len(orders[pool]) or orders[pool][turn[pool]] != key:
            return False
    piece = len(run.done) + 1
    if piece > run.stage.num_pieces:
        return True  # a later pass: everything is here
    for producer, streams in run.stage.inputs.items():
        other = runs[step, producer]
        if other.is_over:
            continue
        if not streams or other.stage.num_passes > 1:
            return False
        if len(other.done) < piece * other.stage.num_pieces // run.stage.num_pieces:
            return False
    return True


def greedy_makespan(durations, predecessors, num_processors, seed=0):
    """Time that tasks take on p processors, each taking any ready task (at random) as soon as it is free."""
    rng = random.Random(seed)
    missing = {task: len(predecessors[task]) for task in durations}
    followers = {task: [] for task in durations}
    for task, before in predecessors.items():
        for other in before:
            followers[other].append(task)
    ready = [task for task, count in missing.items() if count == 0]
    running, clock = [], 0.0
    while ready or running:
        rng.shuffle(ready)
        while ready and len(running) < num_processors:
            task = ready.pop()
            heapq.heappush(running, (clock + durations[task], task))
        clock, task = heapq.heappop(running)
        for follower in followers[task]:
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    return clock
