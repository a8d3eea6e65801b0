"""How long n verifications take on c worker processes. Torch-free, plain arithmetic.

Seconds per sample: mean, and the longest (a time limit, if nothing better is known). Any order on identical workers,
each taking the next sample when it is free (greedy list scheduling, Graham 1969).
"""

from plait.cost.arithmetic import Number, maximum


def verifier_least_s(num_samples: Number, num_workers: Number, mean_s: Number, longest_s: Number) -> Number:
    """No order is faster: max(n mean / c, longest)."""
    return maximum(num_samples * mean_s / num_workers, longest_s)


def verifier_most_s(num_samples: Number, num_workers: Number, mean_s: Number, longest_s: Number) -> Number:
    """No greedy order is slower: (n mean - longest) / c + longest = n mean / c + (1 - 1/c) longest.

    While the last sample waits, all workers are busy with the others. At most 2 - 1/c times the least.
    """
    return num_samples * mean_s / num_workers + (1 - 1 / num_workers) * longest_s
