"""The gap between engine and trainer on sampled tokens: its statistics, and what is usual per dtype. Torch-free.

Both compute the log-probability of the same token under the same weights, so any difference is rounding or a fault.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

BANDS: dict[str, float] = {"float32": 1e-4, "bfloat16": 0.1}
"""Largest usual gap of one token in nats, by compute dtype.

Measured on the starter model (4 layers, width 256) on a CPU, 17,000 tokens each; docs/gap.md has the figures and the
command. float32: largest 7e-6, so 1e-4 leaves a factor of ten for deeper models and longer sequences. bfloat16: one in
a thousand above 0.05 and one token above 0.1, since a logit between 8 and 16 is a multiple of 1/16.
"""

OUTSIDE_SHARE_LIMIT = 0.01
"""Share of a step's tokens outside the band above which a run says so.

Right runs had one in 17,000 tokens; a temperature of 1.1 where 1 was sampled gave 0.007, weights that were one update
old 0.014 (starter model, bfloat16), although most of their tokens are too sure to show anything.
"""


def gap_statistics(gaps_T: NDArray[np.floating], dtype: str) -> dict[str, float]:
    """Mean, spread, tail and share outside the band of |trainer logprob - rollout logprob|, under metric names.

    gaps_T: one per sampled token, at least one. A gap that is not a number lies outside every band.
    """
    gaps = np.asarray(gaps_T, dtype=np.float64)
    assert gaps.size, "there are no tokens to compare"
    is_outside = ~(gaps <= BANDS[dtype])
    # An infinite gap is reported as it is; numpy need not warn of it as well.
    with np.errstate(invalid="ignore"):
        return {
            "gap/mean": float(gaps.mean()),
            "gap/std": float(gaps.std()),
            "gap/p99": float(np.percentile(gaps, 99)),
            "gap/max": float(gaps.max()),
            "gap/outside_share": float(is_outside.mean()),
        }


def gap_warning(metrics: Mapping[str, float], dtype: str, *, step: int, replay: str) -> str | None:
    """What to say of a step whose gap is not rounding; None while it is, or where nothing was compared.

    replay: the command that looks at one of the step's samples.
    """
    if "gap/outside_share" not in metrics or metrics["gap/outside_share"] <= OUTSIDE_SHARE_LIMIT:
        return None
    other = " Or set model.compute_dtype to float32, whose rounding is a thousand times finer." * (dtype != "float32")
    return (
        f"step {step}: {metrics['gap/outside_share']:.1%} of the sampled tokens have log-probabilities that engine and "
        f"trainer do not agree on within {BANDS[dtype]:g}, the band of {dtype} (mean {metrics['gap/mean']:.2g}, "
        f"largest {metrics['gap/max']:.2g}). Likely causes: the engine holds other weights, the two attend or place "
        f"positions differently, or they use another temperature. See which by: {replay}.{other}"
    )
