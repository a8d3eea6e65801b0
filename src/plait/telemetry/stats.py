"""Statistics of evaluations, in numpy."""

import math
from collections.abc import Sequence

import numpy as np


def bootstrap_interval(
    per_prompt_scores: Sequence[Sequence[float]], *, level: float = 0.95, num_resamples: int = 2000, seed: int
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean score over all samples (Efron 1979), resampling prompts.

    Prompts are drawn with replacement and keep all their samples: samples of one prompt are alike, so
    treating them as independent would make the interval too narrow. For accuracy pass 1 and 0.
    Where all scores are equal the interval has no width; that is a property of the bootstrap, not certainty.

    per_prompt_scores: for each prompt the scores of its samples; counts may differ, but none may be empty.
    level: share of the resampled means inside the interval, between 0 and 1.
    Returns (low, high). ValueError for no prompts, a prompt without samples, or a level outside (0, 1).
    """
    if not per_prompt_scores or any(len(scores) == 0 for scores in per_prompt_scores):
        raise ValueError("bootstrap_interval needs at least one prompt, and one score for each prompt")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; it must lie between 0 and 1, for example 0.95")
    sums_P = np.array([math.fsum(scores) for scores in per_prompt_scores], dtype=np.float64)
    counts_P = np.array([len(scores) for scores in per_prompt_scores], dtype=np.float64)
    rng = np.random.default_rng(seed)
    num_prompts = len(sums_P)
    means = np.empty(num_resamples, dtype=np.float64)
    for i in range(num_resamples):  # one draw at a time: memory stays at one integer per prompt
        drawn_P = rng.integers(0, num_prompts, size=num_prompts)
        means[i] = sums_P[drawn_P].sum() / counts_P[drawn_P].sum()
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is correct (arXiv 2107.03374, eq. 1).

    pass@k = 1 - C(n - c, k) / C(n, k), for n samples of which c are correct. The plug-in 1 - (1 - c/n)^k is
    biased low. ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not 0 <= c <= n:
        raise ValueError(f"{c} correct of {n} samples: the number correct must lie between 0 and {n}")
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be estimated from {n} samples: k must lie between 1 and {n}")
    return 1 - math.comb(n - c, k) / math.comb(n, k)
