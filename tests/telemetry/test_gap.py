"""Statistics of the engine/trainer gap, by hand."""

import math

import numpy as np
import pytest

from plait.telemetry.definitions import METRICS
from plait.telemetry.gap import gap_statistics


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
