"""The published objectives once more, in plain numpy float64 and sequence by sequence, to compare with.

Nothing here is taken from the code under test: no per-token form, no packed tensors, no stop-gradient tricks.
`now` holds the log-probabilities that vary; `frozen` is the point at which stop-gradients are evaluated.
"""

import numpy as np


def reinforce(now, frozen, old, rollout, advantage, clip):
    return -advantage * now


def ppo_clip(now, frozen, old, rollout, advantage, clip):
    result = []
    for x, o in zip(now, old, strict=True):
        ratio = np.exp(x - o)
        clipped = min(max(ratio, 1 - clip["low"]), 1 + clip["high"])
        objective = min(ratio * advantage, clipped * advantage)
        if clip["dual"] is not None and advantage < 0:
            objective = max(objective, clip["dual"] * advantage)
        result.append(-objective)
    return np.array(result)


def decoupled_ppo(now, frozen, old, rollout, advantage, clip):
    weight = np.exp(old - rollout)
    if clip["cap"] is not None:
        weight = np.minimum(weight, clip["cap"])
    return weight * ppo_clip(now, frozen, old, rollout, advantage, clip)


def cispo(now, frozen, old, rollout, advantage, clip):
    weight = np.clip(np.exp(frozen - old), 1 - clip["low"], 1 + clip["high"])
    return -weight * advantage * now


def gspo(now, frozen, old, rollout, advantage, clip):
    """One number per sequence: it stands for the whole sequence."""
    ratio = np.prod(np.exp(now - old)) ** (1 / len(now))
    clipped = min(max(ratio, 1 - clip["low"]), 1 + clip["high"])
    return -min(ratio * advantage, clipped * advantage)


def gmpo(now, frozen, old, rollout, advantage, clip):
    """prod_t |min(rho A, clip(rho) A)|^(1/n) sgn(A) with the band [e^-low, e^high]: the paper's own form."""
    product = 1.0
    for x, o in zip(now, old, strict=True):
        ratio = np.exp(x - o)
        clipped = min(max(ratio, np.exp(-clip["low"])), np.exp(clip["high"]))
        product *= abs(min(ratio * advantage, clipped * advantage)) ** (1 / len(now))
    return -product * np.sign(advantage)


POLICY = {f.__name__: f for f in (reinforce, ppo_clip, decoupled_ppo, cispo, gspo, gmpo)}


def policy_objective(name, now, frozen, old, rollout, advantages, clip, reduction, max_tokens):
    """The loss of an update from lists of arrays, one per sequence."""
    totals, counts = [], []
    for x, f, o, b, a in zip(now, frozen, old, rollout, advantages, strict=True):
        loss = POLICY[name](x, f, o, b, a, clip)
        counts.append(len(x))
        totals.append(len(x) * loss if np.ndim(loss) == 0 else loss.sum())
    if reduction == "token-mean":
        return sum(totals) / sum(counts)
    if reduction == "seq-mean-token-mean":
        return sum(total / count for total, count in zip(totals, counts, strict=True)) / len(counts)
    return sum(totals) / (len(counts) * max_tokens)


def numeric_gradient(function, point, step=1e-6):
    """Central differences of a scalar function at a vector."""
    gradient = np.zeros_like(point)
    for i in range(len(point)):
        above, below = point.copy(), point.copy()
        above[i] += step
        below[i] -= step
        gradient[i] = (function(above) - function(below)) / (2 * step)
    return gradient


def gae_by_sum(rewards, values, gamma, lam, bootstrap):
    """A_t = sum_k (gamma lam)^k delta_(t+k), written out (no recursion)."""
    n = len(rewards)
    following = np.append(values[1:], bootstrap)
    deltas = rewards + gamma * following - values
    return np.array([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)])


def returns_by_sum(rewards, gamma, bootstrap):
    n = len(rewards)
    return np.array(
        [sum(gamma ** (k - t) * rewards[k] for k in range(t, n)) + gamma ** (n - t) * bootstrap for t in range(n)]
    )


def n_step_by_sum(rewards, values, gamma, steps, bootstrap):
    n = len(rewards)
    result = []
    for t in range(n):
        end = min(t + steps, n)
        total = sum(gamma ** (k - t) * rewards[k] for k in range(t, end))
        result.append(total + gamma ** (end - t) * (values[end] if end < n else bootstrap))
    return np.array(result)
