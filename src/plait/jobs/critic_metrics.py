"""The metrics of a critic in one training step. Definitions: `plait.telemetry.definitions`."""

import numpy as np
import torch

from plait.algorithms.value_losses import explained_variance
from plait.config import AlgorithmConfig
from plait.executor.step_state import StepState


def critic_metrics(state: StepState, algorithm: AlgorithmConfig) -> dict[str, float]:
    """Nothing without a critic."""
    if state.values is None or state.advantages is None or not state.advantages.returns:
        return {}
    returns = state.advantages.returns
    values_R = torch.cat([state.values.at_tokens[key].cpu() for key in returns])
    returns_R = torch.cat(list(returns.values()))
    metrics = {"value/mean": float(values_R.mean()), "value/return_mean": float(returns_R.mean())}
    explained = explained_variance(values_R, returns_R)
    if explained is not None:
        metrics["value/explained_variance"] = explained
    return metrics | (_own(state) if algorithm.critic.kind == "independent" else _shared(state))


def _own(state: StepState) -> dict[str, float]:
    tally = state.critic_tally
    assert tally is not None, f"the critic was not updated in step {state.step}"
    if not tally.num_tokens:
        return {}
    return {
        "loss/value": tally.value_loss / len(tally.grad_norms),
        "value/clip_binds_share": tally.binds_sum / tally.num_tokens,
        "critic/grad_norm": float(np.mean(tally.grad_norms)),
        "critic/learning_rate": tally.rate,
        "critic/updates_applied": tally.num_applied,
        "critic/updates_skipped_nonfinite": tally.num_nonfinite,
    }


def _shared(state: StepState) -> dict[str, float]:
    """The gradient of a shared trunk is one: its norm is the policy's."""
    tally = state.tally
    assert tally is not None, f"the trunk was not updated in step {state.step}"
    if not tally.num_trained_tokens:
        return {}
    return {
        "loss/value": tally.value_loss / len(tally.grad_norms),
        "value/clip_binds_share": tally.value_binds_sum / tally.num_trained_tokens,
    }
