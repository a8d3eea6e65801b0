"""Distributions of response lengths in whole tokens, and what follows from them: maximum, moments, residual lives.

Torch-free. Everything is a sum over the survival function S_t = P(length > t), t = 0 ... cap - 1, so a cap on the
number of tokens is exact.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from plait.cost.arithmetic import Number


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths between 1 and cap. survival_T: P(length > t) for t = 0 ... cap - 1; it starts at 1 and never rises."""

    survival_T: np.ndarray

    def __post_init__(self) -> None:
        survival = self.survival_T
        assert survival.ndim == 1, "one value per token"
        assert survival[0] == 1, "no response is empty"
        assert (np.diff(survival) <= 0).all(), "P(length > t) never rises"

    @property
    def cap(self) -> int:
        """The longest possible."""
        return len(self.survival_T)

    @cached_property
    def mean(self) -> float:
        """E[length] = sum S_t."""
        return float(self.survival_T.sum())

    @cached_property
    def second_moment(self) -> float:
        """E[length^2] = sum (2 t + 1) S_t."""
        return float(((2 * np.arange(self.cap) + 1) * self.survival_T).sum())

    def expected_max(self, num_samples: float) -> float:
        """E[max of n independent lengths] = sum (1 - (1 - S_t)^n): exact, with the cap (no tail approximation)."""
        return float(any_alive(self.survival_T, num_samples).sum())

    def expect(self, of: Callable[[Number], Number]) -> float:
        """E[of(length)]; `of` takes an array of lengths."""
        probabilities = self.survival_T - np.append(self.survival_T[1:], 0.0)
        return float((probabilities * of(np.arange(1.0, self.cap + 1))).sum())

    @cached_property
    def residual(self) -> tuple[np.ndarray, np.ndarray]:
        """(P(tokens still to come > t), mean tokens already there of those) of a response seen at a random moment.

        Renewal theory: P(age = a and more than t to come) = S_(a + t + 1) / E[length], which is the same for age and
        rest exchanged.
        """
        after = np.append(self.survival_T[1:], 0.0)
        tail = np.cumsum(after[::-1])[::-1]
        index = np.arange(self.cap)
        weighted = np.cumsum((index * after)[::-1])[::-1]
        with np.errstate(invalid="ignore", divide="ignore"):
            age = np.where(tail > 0, weighted / tail - index, 0.0)
        return tail / self.mean, age


def any_alive(survival_T: np.ndarray, num_samples: float) -> np.ndarray:
    """P(at least one of n is longer than t) = 1 - (1 - S_t)^n, without loss where S_t is small."""
    with np.errstate(divide="ignore"):
        return -np.expm1(num_samples * np.log1p(-survival_T))


def constant_length(length: int) -> Lengths:
    """Every response has this many tokens."""
    return Lengths(np.ones(length))


def observed_lengths(lengths: Sequence[int]) -> Lengths:
    """The lengths of responses that were seen, each as likely."""
    counts = np.bincount(np.asarray(lengths))
    assert counts[0] == 0, "a response has at least one token"
    survival = 1 - np.cumsum(counts) / counts.sum()
    return Lengths(np.minimum(np.maximum(survival[:-1], 0.0), 1.0))


def log_normal_lengths(mean: float, cv: float, cap: int) -> Lengths:
    """Log-normal with this mean and coefficient of variation before the cap, rounded to tokens, cut off at cap.

    sigma^2 = ln(1 + cv^2), median = mean exp(-sigma^2 / 2).
    """
    sigma = math.sqrt(math.log1p(cv * cv))
    if sigma == 0:
        return constant_length(min(cap, round(mean)))
    middle = math.log(mean) - sigma * sigma / 2
    scores = (np.log(np.arange(cap) + 0.5) - middle) / (sigma * math.sqrt(2))
    survival = 0.5 * np.array([math.erfc(score) for score in scores])
    survival[0] = 1.0
    return Lengths(survival)
