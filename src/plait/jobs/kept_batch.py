"""Between the StepState of an executor and the batch that is kept on disk."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from plait.executor.inline import StepState
from plait.telemetry.bad_batches import StepBatch


def batch_of(state: StepState) -> StepBatch:
    """Everything that the updates of a step read, and what came of them. A step that was broken off has no tally."""
    streams = {"advantages": {key: np.array([value]) for key, value in state.advantages.items()}}
    for name, logprobs in (("old_logprobs", state.old_logprobs), ("ref_logprobs", state.ref_logprobs)):
        if logprobs is not None:
            streams[name] = {key: values.detach().cpu().numpy() for key, values in logprobs.items()}
    found = {}
    if state.tally is not None:
        norms = [str(norm) for norm in state.tally.grad_norms]
        found = {"grad_norms": norms, "nonfinite_in": state.tally.nonfinite_in}
    return StepBatch(state.step, state.groups, streams, found)


def state_of(batch: StepBatch, device: torch.device) -> StepState:
    """A StepState whose updates can be made again."""

    def tensors(name: str) -> dict[str, Tensor] | None:
        return _tensors(batch.streams[name], device) if name in batch.streams else None

    return StepState(
        step=batch.step,
        policy_version=batch.step - 1,
        groups=batch.groups,
        advantages={key: float(values[0]) for key, values in batch.streams["advantages"].items()},
        old_logprobs=tensors("old_logprobs"),
        ref_logprobs=tensors("ref_logprobs"),
    )


def _tensors(values: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    return {key: torch.from_numpy(array.copy()).to(device) for key, array in values.items()}
