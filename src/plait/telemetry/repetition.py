"""Text that goes round in circles, found in token ids. Numpy only."""

import numpy as np
from numpy.typing import NDArray

NUM_GRAM_TOKENS = 8
"""Length of the pieces that are compared. On healthy arithmetic, where a dozen symbols make up everything, half of the
samples repeat 2-grams (median share 0.18), and of their 8-grams never more than 0.065 (480 samples of the main job)."""

REPEATED_SHARE = 0.3
"""A sample repeats itself where more than this share of its 8-grams was there before: a text whose last two fifths are
a loop, or one that says everything twice (near 0.5)."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def repeated_share(ids_R: NDArray[np.integer]) -> float:
    """Share of the 8-grams of a completion that stood earlier in it: 1 - distinct / all; 0 where there is none.

    The grams are compared by a 64-bit polynomial hash, so that a completion of any length costs one sort.
    """
    num_grams = len(ids_R) - NUM_GRAM_TOKENS + 1
    if num_grams < 1:
        return 0.0
    # Odd and spread out: sums of small neighbouring ids would collide.
    mixed_R = (ids_R.astype(np.uint64) + np.uint64(1)) * _FACTOR
    mixed_R ^= mixed_R >> np.uint64(29)
    hashes = np.zeros(num_grams, dtype=np.uint64)
    for i in range(NUM_GRAM_TOKENS):
        hashes = hashes * _FACTOR + mixed_R[i : i + num_grams]
    return 1 - len(np.unique(hashes)) / num_grams


def is_repetitive(ids_R: NDArray[np.integer]) -> bool:
    """Whether a completion repeats itself."""
    return repeated_share(ids_R) > REPEATED_SHARE
