import pytest

from plait.stages.graph import Stage, StageGraphError, StepGraph


def stage(name, reads=(), writes=(), **more):
    return Stage(name, ("policy",), "host", frozenset(reads), frozenset(writes), "step", **more)


def test_order_follows_what_is_read_and_written():
    graph = StepGraph(
        [stage("c", {"y"}, {"z"}), stage("b", {"x"}, {"y"}), stage("a", {"in"}, {"x"})],
        inputs={"in"},
        outputs={"z"},
    )
    assert [s.name for s in graph.stages] == ["a", "b", "c"]
    assert graph.predecessors["c"] == {"b"}


@pytest.mark.parametrize(
    ("stages", "outputs", "message"),
    [
        ([stage("a", {"y"}, {"x"}), stage("b", {"x"}, {"y"})], {"x"}, "cycle"),
        ([stage("a", {"nowhere"}, {"x"})], {"x"}, "nobody writes"),
        ([stage("a", {"in"}, {"x", "waste"})], {"x"}, "nobody reads"),
        ([stage("a", {"in"}, {"x"}), stage("b", {"in"}, {"x"})], {"x"}, "is written by"),
        ([stage("a", {"in"}, {"x"})], {"x", "y"}, "no stage writes"),
        ([stage("a", {"in"}, {"x"}), stage("a", {"x"}, {"y"})], {"y"}, "same name"),
        ([stage("a", {"x"}, {"in"})], {"in"}, "written by"),
    ],
)
def test_broken_graphs_fail_at_the_start(stages, outputs, message):
    with pytest.raises(StageGraphError, match=message):
        StepGraph(stages, inputs={"in"}, outputs=outputs)


def test_a_stage_may_not_read_what_it_writes():
    with pytest.raises(StageGraphError, match="reads what it writes"):
        stage("a", {"x"}, {"x"})


def test_repeat_is_at_least_one():
    with pytest.raises(StageGraphError, match="repeat"):
        stage("a", repeat=0)
