"""Statistics of the engine/trainer gap, by hand, and the sentence that a wide one brings."""

import math

import numpy as np
import pytest

from plait.telemetry.definitions import METRICS
from plait.telemetry.gap import BANDS, OUTSIDE_SHARE_LIMIT, gap_statistics, gap_warning


def test_by_hand():
    """0, 0.1, 0.2, 0.5: mean 0.2; squares from it 0.04 + 0.01 + 0 + 0.09 = 0.14, a quarter of it, and its root;
    p99 lies 0.97 of the way from 0.2 to 0.5; two of four are above 0.1, which itself is inside."""
    found = gap_statistics(np.array([0.5, 0.0, 0.2, 0.1]), "bfloat16")
    assert found == {
        "gap/mean": pytest.approx(0.2),
        "gap/std": pytest.approx(math.sqrt(0.035)),
        "gap/p99": pytest.approx(0.491),
        "gap/max": 0.5,
        "gap/outside_share": 0.5,
    }
    assert found.keys() <= METRICS.keys()


def test_the_band_is_that_of_the_dtype():
    gaps = np.array([5e-5, 2e-4, 1e-3, 0.09], dtype=np.float64)
    assert gap_statistics(gaps, "float32")["gap/outside_share"] == 0.75
    assert gap_statistics(gaps, "bfloat16")["gap/outside_share"] == 0.0


def test_sums_are_in_double():
    """2^24 + 1 is no float32: a float32 sum of many equal gaps would stop growing."""
    gaps = np.full(100_000, 0.1, dtype=np.float32)
    found = gap_statistics(gaps, "float32")
    assert found["gap/mean"] == pytest.approx(float(np.float32(0.1)), abs=1e-12)
    assert found["gap/std"] == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_is_outside(odd):
    found = gap_statistics(np.array([0.0, odd]), "float32")
    assert found["gap/outside_share"] == 0.5
    assert not math.isfinite(found["gap/mean"])


def test_no_tokens_is_a_mistake_of_the_caller():
    with pytest.raises(AssertionError, match="no tokens"):
        gap_statistics(np.array([]), "float32")


def test_a_warning_comes_above_the_limit_only():
    def said(share, dtype="bfloat16"):
        metrics = {"gap/outside_share": share, "gap/mean": 0.2, "gap/max": 3.0}
        return gap_warning(metrics, dtype, step=4, replay="plait replay runs/a --sample p#0")

    assert said(OUTSIDE_SHARE_LIMIT) is None
    assert gap_warning({}, "float32", step=1, replay="") is None
    text = said(0.25)
    assert "step 4: 25.0%" in text
    assert f"within {BANDS['bfloat16']:g}, the band of bfloat16 (mean 0.2, largest 3)" in text
    assert "plait replay runs/a --sample p#0" in text
    assert "compute_dtype to float32" in text
    assert "compute_dtype" not in said(0.25, "float32")
