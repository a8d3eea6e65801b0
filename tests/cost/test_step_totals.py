"""A step from stages of round numbers, by hand."""

import pytest

from plait.cost.cluster_catalogue import find_cluster
from plait.cost.stage_estimate import StageEstimate
from plait.cost.step_totals import DEPENDENT_OP_S, stage_least_s, step_totals

H100 = find_cluster("8xH100")


def stage(name, *, work, depth, time_s, hbm=0.0, sent=0.0):
    return StageEstimate(
        name, work, depth, 0, work, sent, hbm, {"compute": time_s}, time_s, time_s / 2, 2 * time_s, "compute", 8, {},
        "step", 1,
    )  # fmt: skip


def test_chains_take_the_longer_sibling_and_times_add_up():
    stages = [
        stage("generate", work=8 * 989e12, depth=1000, time_s=10.0, hbm=3 * 3.35e12),
        stage("value", work=0, depth=30, time_s=1.0),
        stage("ref_logprob", work=0, depth=50, time_s=2.0),
        stage("update_policy", work=16 * 989e12, depth=100, time_s=5.0),
    ]
    before = {
        "generate": (), "value": ("generate",), "ref_logprob": ("generate",), "update_policy": ("value", "ref_logprob"),
    }  # fmt: skip
    found = step_totals(stages, before, {"main": H100}, dict.fromkeys(before, "main"), "bf16")
    assert (found.time_s, found.low_s, found.high_s) == (18.0, 9.0, 36.0)
    assert found.depth_op == 1000 + 50 + 100
    assert found.work_op == pytest.approx(24 * 989e12)
    # Three seconds of memory traffic, then two of products at peak.
    assert found.least_s == pytest.approx(3 + 2)
    assert found.brent_s[0] == pytest.approx(3.0)
    assert found.brent_s[1] == pytest.approx(3 + 1150 * DEPENDENT_OP_S)
    in_flight = 8 * 989e12 * DEPENDENT_OP_S
    assert found.brent_op == pytest.approx((24 * 989e12 / in_flight, 24 * 989e12 / in_flight + 1150))


def test_the_least_is_the_busiest_resource():
    assert stage_least_s(stage("a", work=8 * 989e12, depth=1, time_s=1), H100, "bf16") == pytest.approx(1.0)
    assert stage_least_s(stage("a", work=1, depth=1, time_s=1, hbm=3.35e12), H100, "bf16") == pytest.approx(1.0)
    assert stage_least_s(stage("a", work=1, depth=1, time_s=1, sent=900e9), H100, "bf16") == pytest.approx(2.0)
