"""What every trained role does with a loss: add its gradients up, and apply them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plait.config import OptimizerConfig
from plait.errors import NonFiniteError
from plait.models.load import enable_recompute
from plait.models.optimizer import MasterOptimizer, UpdateResult
from plait.parallel.degrees import Recompute
from plait.stages.packing import Microbatch, TokenSequence, pack


class FailedUpdates:
    """Ends a run after too many updates in a row whose gradient is not finite. rate_key: the setting of the rate."""

    def __init__(self, rate_key: str, most_in_a_row: int):
        self._rate_key, self._most, self._in_a_row = rate_key, most_in_a_row, 0

    def see(self, result: UpdateResult) -> None:
        """Raises NonFiniteError at one too many."""
        self._in_a_row = 0 if result.nonfinite is None else self._in_a_row + 1
        if self._in_a_row >= self._most:
            raise NonFiniteError(
                f"{self._in_a_row} updates in a row had gradients that are not finite (norm "
                f"{result.grad_norm}, first in {result.nonfinite}); none was applied. "
                f"Lower {self._rate_key}, or set model.compute_dtype to float32"
            )


class TrainedRole:
    """A model (and heads on top of it) with fp32 masters and an optimiser. Abstract: a role adds its passes."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: OptimizerConfig,
        heads: Mapping[str, nn.Module],
        *,
        rate_key: str,
        max_nonfinite_updates: int,
        recompute: Recompute,
    ):
        """rate_key: the setting of its learning rate, for a message."""
        self.model = model
        self.optimizer_config = config
        self._optimizer = MasterOptimizer(model, config, heads)
        self._failed = FailedUpdates(rate_key, max_nonfinite_updates)
        self._recomputes = recompute == "full"
        if self._recomputes:
            enable_recompute(model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def split(self, sequences: Sequence[TokenSequence], max_tokens: int, *, together: int = 1) -> list[Microbatch]:
        """The microbatches of an update, of at most max_tokens tokens each. together: so many are never parted."""
        return pack(sequences, max_tokens, self.device, together=together)

    def backward(self, loss: Tensor) -> None:
        """Add one microbatch's gradients to the update being made."""
        loss.backward()
        self._optimizer.accumulate()

    def apply(self, rate: float) -> UpdateResult:
        """Finish the update. A gradient that is not finite is not applied; too many in a row end the run."""
        result = self._optimizer.apply(rate)
        self._failed.see(result)
        return result
