"""Times of composed steps: against a simulation of every piece, and properties that hold for every input."""

import numpy as np
import pytest
import sympy
from event_simulation import Stage as Task
from event_simulation import simulate
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.cost.composition.bounds import steady_step_s
from plait.cost.composition.flow import interleaved_pipelines_s, stream_s
from plait.cost.composition.fusion import PieceCounts
from plait.cost.composition.timeline import StageTime, timeline
from plait.cost.pipeline import simulate_pipeline
from plait.parallel.pipeline_orders import Action
from plait.stages.graph import Stage, StepGraph

settings.register_profile("plait", deadline=None, derandomize=True)
settings.load_profile("plait")
GRANULARITIES = ("sample", "group", "minibatch", "step")
PIECES = PieceCounts(num_samples=24, num_groups=8, num_minibatches=2)
COUNTS = {"sample": 24, "group": 8, "minibatch": 2, "step": 1}
seconds = st.floats(0.1, 10)


def stage(name, reads=(), granularity="sample", kind="inference", writes=None):
    written = frozenset({name} if writes is None else writes)
    return Stage(name, ("policy",), kind, frozenset(reads), written, granularity)


def end_of(spans):
    return max(span.end_s for span in spans.values())


@st.composite
def random_steps(draw):
    """A random graph of up to six stages in order, on up to three pools, each with a granularity and a fusion."""
    count = draw(st.integers(2, 6))
    stages, tasks, pools, fuse = [], {}, {}, {}
    emitted, num_passes = {}, {}
    for index in range(count):
        name = f"s{index}"
        producers = draw(st.sets(st.sampled_from([f"s{i}" for i in range(index)]), max_size=2)) if index else set()
        own = draw(st.sampled_from(GRANULARITIES))
        asked = draw(st.sampled_from(GRANULARITIES))
        if asked != "step":
            fuse[name] = asked
        stages.append(stage(name, producers or {"input"}, own, writes={name}))
        pool = draw(st.sampled_from(["a", "b", "c", "ab"]))
        pools[name] = tuple(pool)
        # Pieces by hand: as fine as asked, as the producer delivers, as the stage works; the coarsest of all inputs.
        passed = {p: max(asked, emitted[p], own, key=GRANULARITIES.index) for p in producers}
        streaming = [g for g in passed.values() if g != "step"]
        emitted[name] = max(own, *streaming, key=GRANULARITIES.index) if streaming else own
        num_passes[name] = draw(st.sampled_from([1, 1, 2, 3]))
        tasks[1, name] = Task(
            name,
            draw(seconds),
            COUNTS[emitted[name]],
            num_passes[name],
            pools[name],
            {p: g != "step" for p, g in passed.items()},
        )
    everything = {s.name for s in stages}
    read = set().union(*(s.reads for s in stages))
    graph = StepGraph(stages, inputs={"input"}, outputs=everything - read)
    return graph, tasks, pools, fuse


@settings(max_examples=1000)
@given(random_steps(), st.integers(0, 3))
def test_one_step_takes_what_its_pieces_take(step, seed):
    graph, tasks, pools, fuse = step
    times = {task.name: StageTime(task.seconds, task.num_passes) for task in tasks.values()}
    found = timeline(graph, times, pools, fuse=fuse, pieces=PIECES)
    orders = {p: [(1, s.name) for s in graph.stages if p in pools[s.name]] for p in "abc"}
    simulated = simulate(tasks, orders, seed=seed)
    for run, (start, end) in simulated.items():
        assert found[run].end_s == pytest.approx(end), run
        assert found[run].start_s == pytest.approx(start), run


@given(st.lists(seconds, min_size=1, max_size=5), st.integers(1, 20))
def test_a_stream_is_fill_and_slowest(pieces, n):
    stages = [stage(f"s{i}", [f"s{i - 1}"] if i else ["input"]) for i in range(len(pieces))]
    graph = StepGraph(stages, inputs={"input"}, outputs={stages[-1].name})
    times = {f"s{i}": StageTime(piece * n) for i, piece in enumerate(pieces)}
    pools = {s.name: (s.name,) for s in stages}
    found = timeline(graph, times, pools, fuse=dict.fromkeys(times, "sample"), pieces=PieceCounts(num_samples=n))
    assert end_of(found) == pytest.approx(stream_s(pieces, n))
    # And the arrival of every piece, one after the other.
    done = [0.0] * n
    for piece in pieces:
        clock = 0.0
        for k in range(n):
            clock = done[k] = max(clock, done[k]) + piece
    assert end_of(found) == pytest.approx(done[-1])


def rl_stage(name, kind, reads, writes, granularity):
    return Stage(name, ("policy",), kind, frozenset(reads.split()), frozenset(writes.split()), granularity)


RL = StepGraph(
    [
        rl_stage("generate", "generation", "prompts engine_weights@v", "samples", "sample"),
        rl_stage("ref_logprob", "inference", "samples", "ref_logprobs", "sample"),
        rl_stage(
            "update_policy", "training", "samples ref_logprobs policy_weights@v", "policy_weights@v+1", "minibatch"
        ),
        rl_stage("sync_weights", "transfer", "policy_weights@v+1", "engine_weights@v+1", "step"),
    ],
    inputs={"prompts", "engine_weights@v", "policy_weights@v"},
    outputs={"policy_weights@v+1", "engine_weights@v+1"},
)
APART = {
    "generate": ("rollout",),
    "ref_logprob": ("train",),
    "update_policy": ("train",),
    "sync_weights": ("train", "rollout"),
}
TOGETHER = dict.fromkeys(APART, ("all",))
rl_times = st.fixed_dictionaries(dict.fromkeys(APART, seconds))


def compose(times, pools, num_steps=1, max_staleness=0, **options):
    times = {name: StageTime(value) for name, value in times.items()}
    return timeline(RL, times, pools, num_steps=num_steps, max_staleness=max_staleness, pieces=PIECES, **options)


@settings(max_examples=150)
@given(rl_times, st.integers(1, 6), st.integers(1, 4), st.booleans(), st.integers(0, 3))
def test_asynchronous_steps_take_what_their_pieces_take(times, num_steps, staleness, is_fused, seed):
    fuse = {"ref_logprob": "group", "update_policy": "minibatch"} if is_fused else {}
    found = compose(times, APART, num_steps, staleness, fuse=fuse)
    tasks, waits = {}, {}
    pieces = {"generate": 24, "ref_logprob": 8 if is_fused else 24, "update_policy": 2, "sync_weights": 1}
    inputs = {
        "generate": {},
        "ref_logprob": {"generate": is_fused},
        "update_policy": {"generate": is_fused, "ref_logprob": is_fused},
        "sync_weights": {"update_policy": False},
    }
    train, rollout = [], []
    for k in range(1, num_steps + 1):
        for name in APART:
            # The engine takes new weights beside its work, into a shadow copy.
            pools = ("train",) if name == "sync_weights" else APART[name]
            tasks[k, name] = Task(name, times[name], pieces[name], 1, pools, inputs[name])
        train += [(k, "ref_logprob"), (k, "update_policy"), (k, "sync_weights")]
        waits[k, "update_policy"] = [(k - 1, "update_policy")] if k > 1 else []
        waits[k, "generate"] = [(k - 1 - staleness, "sync_weights")] if k > 1 + staleness else []
        rollout.append((k, "generate"))
    simulated = simulate(tasks, {"train": train, "rollout": rollout}, waits, seed)
    for run, (start, end) in simulated.items():
        assert found[run].end_s == pytest.approx(end), run
        assert found[run].start_s == pytest.approx(start), run


@given(rl_times, st.integers(1, 8), st.sampled_from([APART, TOGETHER]))
def test_synchronous_steps_follow_each_other(times, num_steps, pools):
    assert end_of(compose(times, pools, num_steps)) == pytest.approx(num_steps * end_of(compose(times, pools)))


@given(rl_times)
def test_one_pool_takes_turns_whatever_its_name(times):
    total = sum(times.values())
    assert end_of(compose(times, TOGETHER)) == pytest.approx(total)
    # Four pools and no fusion: a chain, too. Two names for one pool are still one pool.
    assert end_of(compose(times, {name: (name,) for name in times})) == pytest.approx(total)
    assert end_of(compose(times, dict.fromkeys(APART, ("one", "two")))) == pytest.approx(total)


@given(rl_times, st.integers(1, 8), st.integers(0, 4), st.booleans())
def test_asynchronous_time_lies_between_its_pools_and_synchronous_time(times, num_steps, staleness, is_fused):
    fuse = {"ref_logprob": "group"} if is_fused else {}
    took = end_of(compose(times, APART, num_steps, staleness, fuse=fuse))
    train = times["ref_logprob"] + times["update_policy"] + times["sync_weights"]
    slower = max(train, times["generate"])
    assert took <= end_of(compose(times, APART, num_steps, 0, fuse=fuse)) * (1 + 1e-9)
    assert took >= num_steps * slower * (1 - 1e-9)
    if staleness:
        # Fill once, then the slower pool decides.
        assert took <= sum(times.values()) + (num_steps - 1) * slower + 1e-9
        steady = steady_step_s([train, times["generate"]], sum(times.values()), staleness)
        assert steady == pytest.approx(slower)


@given(rl_times, st.integers(0, 3))
def test_an_endless_run_takes_its_slowest_cycle_per_step(times, staleness):
    """Every pool is a cycle of one step; generation, update and publication are one of max_staleness + 1 steps."""
    train = times["ref_logprob"] + times["update_policy"] + times["sync_weights"]
    steady = steady_step_s([train, times["generate"]], sum(times.values()), staleness)
    spans = compose(times, APART, 60, staleness)
    took = (spans[60, "sync_weights"].end_s - spans[36, "sync_weights"].end_s) / 24
    assert took == pytest.approx(steady, rel=1e-6)


@given(rl_times, st.integers(1, 6), st.integers(0, 3))
def test_more_staleness_and_finer_fusion_never_take_longer(times, num_steps, staleness):
    for fuse in ({}, {"ref_logprob": "sample", "update_policy": "minibatch"}):
        one, more = (end_of(compose(times, APART, num_steps, s, fuse=fuse)) for s in (staleness, staleness + 1))
        assert more <= one * (1 + 1e-9)
    whole = end_of(compose(times, APART, num_steps, staleness))
    for fine in ("group", "sample"):
        assert end_of(compose(times, APART, num_steps, staleness, fuse={"ref_logprob": fine})) <= whole * (1 + 1e-9)


def test_one_step_off_policy_by_hand():
    # Generation 10, training 6, published in 0: after the fill, a step takes the longer of the two.
    times = {"generate": 10.0, "ref_logprob": 1.0, "update_policy": 5.0, "sync_weights": 0.0}
    spans = compose(times, APART, 4, 1)
    assert [spans[k, "generate"].end_s for k in (1, 2, 3, 4)] == [10, 20, 30, 40]
    assert [spans[k, "update_policy"].end_s for k in (1, 2, 3, 4)] == [16, 26, 36, 46]
    assert end_of(compose(times, APART, 4, 0)) == 64


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(1, 6), seconds, seconds), min_size=1, max_size=3))
def test_interleaved_pipelines(p, models):
    """GPipe over all models' microbatches, by the simulation of pipeline orders, which knows nothing of the formula."""
    jobs = [(f, b) for m, f, b in models for _ in range(m)]
    forwards = [[Action(r, r, i, "forward") for i in range(len(jobs))] for r in range(p)]
    backwards = [[Action(r, r, i, "backward") for i in range(len(jobs))] for r in range(p)]
    order = tuple(tuple(f + b) for f, b in zip(forwards, backwards, strict=True))
    times = simulate_pipeline(order, lambda a: jobs[a.microbatch][0 if a.kind == "forward" else 1])
    together = interleaved_pipelines_s(p, *models)
    assert times.makespan_s == pytest.approx(together)
    apart = sum(interleaved_pipelines_s(p, model) for model in models)
    assert together <= apart * (1 + 1e-12)


def test_floats_arrays_and_symbols_agree():
    g, r, u, w, n = sympy.symbols("g r u w n", positive=True)
    names = ("generate", "ref_logprob", "update_policy", "sync_weights")
    fuse = {"ref_logprob": "group", "update_policy": "minibatch"}
    rows = np.random.default_rng(1).uniform(0.1, 5, (4, 50))

    def last(values, groups=8, num_steps=1):
        times = {name: StageTime(value) for name, value in zip(names, values, strict=True)}
        pieces = PieceCounts(24, groups, 2)
        spans = timeline(RL, times, APART, fuse=fuse, pieces=pieces, num_steps=num_steps, max_staleness=1)
        return spans[num_steps, "sync_weights"].end_s

    # Symbols for one step: the largest of many sums is slow to write down.
    arrays, later, symbolic = last(rows), last(rows, num_steps=3), last((g, r, u, w), n)
    for column in range(0, 50, 10):
        values = rows[:, column]
        assert arrays[column] == pytest.approx(last([float(v) for v in values]))
        assert later[column] == pytest.approx(last([float(v) for v in values], num_steps=3))
        filled = symbolic.subs(dict(zip((g, r, u, w, n), (*map(float, values), 8), strict=True)))
        assert float(filled) == pytest.approx(arrays[column])


def test_inputs_in_different_pieces_by_hand():
    # 8 samples of 1 s and 4 groups of 1 s; the consumer takes groups of 2 samples: the samples' 2, 4, 6, 8 s decide.
    stages = [stage("a", ["input"], "sample"), stage("b", ["input"], "group"), stage("c", ["a", "b"], "sample")]
    graph = StepGraph(stages, inputs={"input"}, outputs={"c"})
    times = {"a": StageTime(8.0), "b": StageTime(4.0), "c": StageTime(4.0)}
    pools = {name: (name,) for name in times}
    found = timeline(graph, times, pools, fuse={"c": "sample"}, pieces=PieceCounts(8, 4, 1))
    assert (found[1, "c"].start_s, found[1, "c"].end_s) == (2, 9)
