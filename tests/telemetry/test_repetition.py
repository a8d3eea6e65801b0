"""Repeated 8-grams: by hand, and against sets of tuples."""

import numpy as np
import pytest

from plait.telemetry.repetition import is_repetitive, repeated_share


def by_sets(ids):
    grams = [tuple(ids[i : i + 8]) for i in range(len(ids) - 7)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def test_by_hand():
    assert repeated_share(np.arange(100)) == 0
    # 16 ids twice: 25 grams, 16 of them distinct (they begin at 0 .. 15), since the text has period 16.
    assert repeated_share(np.tile(np.arange(16), 2)) == pytest.approx(9 / 25)
    # One token for ever: 93 grams, one of them distinct.
    assert repeated_share(np.full(100, 7)) == pytest.approx(92 / 93)
    # Too short to hold two 8-grams.
    for length in (0, 1, 7, 8):
        assert repeated_share(np.zeros(length, dtype=np.int32)) == 0


def test_a_loop_at_the_end_is_repetitive_and_a_line_said_twice_in_many_is_not():
    """100 tokens, then 67 of a loop of 3: of 160 grams 60 lie in the loop, and 3 of them are distinct."""
    ids = np.concatenate([np.arange(100), np.tile([201, 202, 203], 23)[:67]])
    assert repeated_share(ids) == pytest.approx(57 / 160)
    assert is_repetitive(ids)
    assert not is_repetitive(np.concatenate([np.arange(100), np.arange(20, 40)]))


@pytest.mark.parametrize("num_symbols", [2, 3, 12])
def test_as_sets_of_tuples_find_them(num_symbols):
    """Few symbols, so that equal grams are common and a hash that confuses neighbours would show."""
    generator = np.random.default_rng(num_symbols)
    for length in (9, 64, 500, 3000):
        ids = generator.integers(0, num_symbols, length).astype(np.int32)
        assert repeated_share(ids) == pytest.approx(by_sets(ids.tolist()))
