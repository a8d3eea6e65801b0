"""Between the StepState of an executor and the batch that is kept on disk."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.executor.step_state import StepState
from plait.stages.advantage import Advantages, Values
from plait.telemetry.bad_batches import StepBatch


def batch_of(state: StepState) -> StepBatch:
    """Everything that the updates of a step read, and what came of them. A step that was broken off has no tally."""
    made = state.advantages
    streams = {
        "advantages": None if made is None else made.advantages,
        "returns": None if made is None else made.returns or None,
        "values": None if state.values is None else state.values.at_tokens,
        "old_logprobs": state.old_logprobs,
        "ref_logprobs": state.ref_logprobs,
    }
    found: dict[str, Any] = {}
    for role, tally in (("", state.tally), ("critic_", state.critic_tally)):
        if tally is not None:
            found[f"{role}grad_norms"] = [str(norm) for norm in tally.grad_norms]
            found[f"{role}nonfinite_in"] = tally.nonfinite_in
    arrays = {name: _arrays(tensors) for name, tensors in streams.items() if tensors is not None}
    return StepBatch(state.step, state.groups, arrays, state.kl_coefficient, found)


def state_of(batch: StepBatch, device: torch.device) -> StepState:
    """A StepState whose updates can be made again."""

    def tensors(name: str) -> dict[str, Tensor] | None:
        return _tensors(batch.streams[name], device) if name in batch.streams else None

    values = tensors("values")
    return StepState(
        step=batch.step,
        policy_version=batch.step - 1,
        kl_coefficient=batch.kl_coefficient,
        groups=batch.groups,
        advantages=Advantages(tensors("advantages") or {}, tensors("returns") or {}),
        values=None if values is None else Values(values, {}),
        old_logprobs=tensors("old_logprobs"),
        ref_logprobs=tensors("ref_logprobs"),
    )


def _arrays(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {key: values.detach().cpu().numpy() for key, values in tensors.items()}


def _tensors(values: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    return {key: torch.from_numpy(array.copy()).to(device) for key, array in values.items()}
