"""What goes through a model in one pass: tokens, and the (query, key) pairs of its attention. Torch-free.

Lengths s may be numbers, numpy arrays (over sequences or over plans) or symbols. Sequences that are packed into one
row see only themselves: pairs are added over sequences, never (sum s)^2.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from plait.cost.arithmetic import Number, minimum

Mode = Literal["causal", "square"]
"""square: every query against every key, as a mask over a full matrix computes it (eager attention)."""


def attended_pairs(s: Number, window: int | None = None, mode: Mode = "causal") -> Number:
    """(query, key) pairs of one sequence of s tokens.

    causal: s (s + 1) / 2; with a window w the first m = min(s, w) queries see m (m + 1) / 2, the others w each.
    square: s^2, window or not.
    """
    if mode == "square":
        return s * s
    if window is None:
        return s * (s + 1) / 2
    m = minimum(s, window)
    return m * (m + 1) / 2 + (s - m) * window


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """One pass over several sequences.

    num_tokens: queries. num_head_tokens: positions whose logits are computed. longest: most keys of one query.
    pairs: window (None for all) -> pairs of one head. is_decode: keys and values come from the cache, so as many are
    read as there are pairs; else each token's are read once. is_square: a window masks keys, and none is left out.
    """

    num_tokens: Number
    num_head_tokens: Number
    longest: Number
    pairs: Mapping[int | None, Number]
    is_decode: bool = False
    is_square: bool = False

    def num_keys(self, window: int | None) -> Number:
        """Tokens whose keys and values are read."""
        return self.pairs[window] if self.is_decode else self.num_tokens

    def longest_within(self, window: int | None) -> Number:
        """Most keys that one query sees under this window."""
        return self.longest if window is None or self.is_square else minimum(self.longest, window)

    def __mul__(self, share: Number) -> "TokenCounts":
        """So many times as many, or the given share of them; sequences stay as long."""
        return replace(
            self,
            num_tokens=self.num_tokens * share,
            num_head_tokens=self.num_head_tokens * share,
            pairs={window: pairs * share for window, pairs in self.pairs.items()},
        )


def uniform_tokens(
    num_sequences: Number,
    s: Number,
    windows: Iterable[int | None] = (None,),
    *,
    num_head_tokens: Number | None = None,
    mode: Mode = "causal",
) -> TokenCounts:
    """num_sequences of s tokens each. num_head_tokens: of one sequence, all s if None."""
    head = s if num_head_tokens is None else num_head_tokens
    pairs = {window: num_sequences * attended_pairs(s, window, mode) for window in windows}
    return TokenCounts(num_sequences * s, num_sequences * head, s, pairs, is_square=mode == "square")


def packed_tokens(
    lengths_B: np.ndarray,
    windows: Iterable[int | None] = (None,),
    *,
    num_head_tokens: Number | None = None,
    mode: Mode = "causal",
) -> TokenCounts:
    """Sequences of the given lengths in one row. num_head_tokens: of all together, every token if None."""
    total = float(lengths_B.sum())
    pairs = {window: float(attended_pairs(lengths_B.astype(float), window, mode).sum()) for window in windows}
    head = total if num_head_tokens is None else num_head_tokens
    return TokenCounts(total, head, float(lengths_B.max()), pairs, is_square=mode == "square")


def expected_tokens(
    num_sequences: Number,
    prompt_tokens: Number,
    expect: Callable[[Callable[[Number], Number]], Number],
    longest: Number,
    windows: Iterable[int | None] = (None,),
) -> TokenCounts:
    """Sequences of a prompt and a random response, on average; logits for the response.

    expect: expectation over the response length of a function of it (`Lengths.expect`).
    """
    response = expect(lambda t: t)

    def pairs_within(window: int | None) -> Number:
        return num_sequences * expect(lambda t: attended_pairs(prompt_tokens + t, window))

    pairs = {window: pairs_within(window) for window in windows}
    return TokenCounts(num_sequences * (prompt_tokens + response), num_sequences * response, longest, pairs)


def decode_tokens(num_active: Number, context: Number, windows: Iterable[int | None] = (None,)) -> TokenCounts:
    """One decode step of num_active sequences that see `context` keys each (on average), their new token included."""
    pairs = {w: num_active * (context if w is None else minimum(context, w)) for w in windows}
    return TokenCounts(num_active, num_active, context, pairs, is_decode=True)
