"""A model cut into pipeline stages against the same model on one process; what the stages sent, and in which order."""

from collections import Counter
from functools import cache

import pipeline_cases
import pytest
import torch

from plait.cost.traffic.pipeline import pp_terms, pp_tied_embedding_terms
from plait.parallel.degrees import Layout
from plait.parallel.pipeline_orders import forward_only, pipeline_order

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble_v", "dual_pipe_v")
LENGTHS = (23, 5, 40, 17, 31, 9, 12, 28)


@cache
def unsharded(kind, lengths, changes):
    return pipeline_cases.unsharded(kind, lengths, **dict(changes))


def _cases():
    for schedule in SCHEDULES:
        yield pytest.param(2, schedule, "qwen3", (("tie_word_embeddings", True),), LENGTHS, id=f"pp2-{schedule}-tied")
        yield pytest.param(2, schedule, "llama", (), LENGTHS, id=f"pp2-{schedule}-untied")
    yield pytest.param(4, "1f1b", "qwen3", (("tie_word_embeddings", True), ("num_hidden_layers", 6)), LENGTHS, id="pp4")
    for schedule in SCHEDULES:  # one microbatch: the others, if the schedule needs more, are filling
        yield pytest.param(2, schedule, "llama", (), LENGTHS[:2], id=f"pp2-{schedule}-few")


@pytest.mark.parametrize(("p", "schedule", "kind", "changes", "lengths"), list(_cases()))
def test_equals_the_whole_model(groups, p, schedule, kind, changes, lengths):
    layout = Layout(pp=p, pp_schedule=schedule)
    loss, gradients, logprobs = unsharded(kind, lengths, changes)
    ranks = groups[p].run(pipeline_cases.run, layout, kind, lengths, dict(changes), 2)
    assert sum(rank["loss"] for rank in ranks) == pytest.approx(loss, rel=1e-5)
    assert sum(len(rank["gradients"]) for rank in ranks) == len(gradients)
    _check_gradients([rank["gradients"] for rank in ranks], gradients)
    (scored,) = (rank["logprobs"] for rank in ranks if rank["logprobs"])
    for index, expected in enumerate(logprobs):
        torch.testing.assert_close(scored[index], expected, rtol=1e-5, atol=1e-5)
    _check_order(ranks, layout)
    _check_traffic(ranks, layout, dict(changes))
    copies = [copy for rank in ranks for copy in rank["copies"]]
    assert len(copies) == (2 if dict(changes) else 0)
    assert all(torch.equal(copy, copies[0]) for copy in copies)
    whole = sum(g.numel() for g in gradients.values()) + sum(copy.numel() for copy in copies[1:])
    assert sum(rank["parameters"] for rank in ranks) == whole
    assert max(rank["parameters"] for rank in ranks) < whole


def _check_gradients(found, gradients):
    """found: by name, of each rank."""
    assert {name for rank in found for name in rank} == gradients.keys()
    for name, gradient in (item for rank in found for item in rank.items()):
        error = (gradient - gradients[name]).norm() / gradients[name].norm()
        assert error < 1e-4, f"{name}: {error}"


def _check_order(ranks, layout):
    m, v = ranks[0]["num_microbatches"], layout.stages_per_rank
    orders = pipeline_order(layout.pp_schedule, layout.pp, m, v), forward_only(layout.pp, m, layout.pp_schedule, v)
    for key, order in zip(("order", "forward_order"), orders, strict=True):
        for rank, actions in zip(ranks, order, strict=True):
            assert rank[key] == [(a.stage, a.microbatch, a.kind) for a in actions]


def _check_traffic(ranks, layout, changes):
    p, schedule, m = layout.pp, layout.pp_schedule, ranks[0]["num_microbatches"]
    boundary_bytes = 64 * ranks[0]["num_tokens"] * 4
    for place, rank in enumerate(ranks):
        for calls, is_training in (("calls", True), ("inference_calls", False)):
            settings = {"schedule": schedule, "p": p, "v": layout.stages_per_rank, "m": m, "rank": place}
            terms = pp_terms(boundary_bytes, **settings, is_training=is_training)
            expected = Counter()
            for term in terms:
                expected["send", p, boundary_bytes] += term.num_calls
            assert Counter(call for call in rank[calls] if call[0] == "send") == +expected
        terms = pp_tied_embedding_terms(96 * 64 * 4, schedule=schedule, p=p, rank=place)
        assert rank["tied_calls"] == [
            (t.collective, p, t.payload_bytes) for t in terms for _ in range(t.num_calls * bool(changes))
        ]


@pytest.mark.parametrize(("schedule", "zero"), [*((schedule, 3) for schedule in SCHEDULES), ("dual_pipe_v", 2)])
def test_stages_wrapped_by_fsdp(ranks4, schedule, zero):
    """Each pass gathers a unit once, and reduces its gradients once, after the last microbatch."""
    changes = (("tie_word_embeddings", True),)
    _, gradients, logprobs = unsharded("qwen3", LENGTHS, changes)
    layout = Layout(pp=2, dp_shard=2, pp_schedule=schedule, zero=zero)
    ranks = ranks4.run(pipeline_cases.run_sharded, layout, "qwen3", LENGTHS, dict(changes))
    _check_gradients([rank["gradients"] for rank in ranks], gradients)
    scored = {index: values for rank in ranks for index, values in rank["logprobs"].items()}
    for index, expected in enumerate(logprobs):
        torch.testing.assert_close(scored[index], expected, rtol=1e-5, atol=1e-5)
    assert [rank["num_scattered"] for rank in ranks] == [2 * rank["num_units"] for rank in ranks]
    assert [rank["num_gathered"] for rank in ranks] == [[2 * rank["num_units"], rank["num_units"]] for rank in ranks]


RECOMPUTED = [(schedule, "full") for schedule in SCHEDULES] + [("1f1b", "selective"), ("interleaved_1f1b", "selective")]


@pytest.mark.parametrize(("schedule", "recompute"), RECOMPUTED)
def test_stages_that_recompute(ranks2, schedule, recompute):
    _, gradients, _ = unsharded("llama", LENGTHS, ())
    layout = Layout(pp=2, pp_schedule=schedule, recompute=recompute)
    ranks = ranks2.run(pipeline_cases.run_recomputed, layout, "llama", LENGTHS, {})
    _check_gradients(ranks, gradients)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_scores_in_chunks(ranks2, schedule):
    """The last stage computes logits of 128 loss tokens at a time, again in each part of backward."""
    lengths = (230, 120, 240)
    _, gradients, _ = unsharded("llama", lengths, ())
    layout = Layout(pp=2, pp_schedule=schedule)
    ranks = ranks2.run(pipeline_cases.run_recomputed, layout, "llama", lengths, {}, 128 * 96)
    _check_gradients(ranks, gradients)
