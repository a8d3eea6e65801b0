"""The policy: the model that is trained."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plait.config import OptimizerConfig
from plait.errors import NonFiniteError
from plait.models.load import enable_recompute
from plait.models.optimizer import MasterOptimizer, UpdateResult
from plait.parallel.degrees import Recompute
from plait.roles.model import TokenScores, score_tokens, sequence_logprobs
from plait.stages.packing import Microbatch, TokenSequence


class Policy:
    """A causal LM with fp32 masters and an optimiser."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: OptimizerConfig,
        *,
        max_nonfinite_updates: int = 3,
        recompute: Recompute = "none",
    ):
        self.model = model
        self.optimizer_config = config
        self._optimizer = MasterOptimizer(model, config)
        self._max_nonfinite = max_nonfinite_updates
        self._nonfinite_in_a_row = 0
        self._recomputes = recompute == "full"
        if self._recomputes:
            enable_recompute(model)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def token_scores(
        self, microbatch: Microbatch, temperature: float, *, entropy_needs_grad: bool = False
    ) -> TokenScores:
        """Scores with gradients, for a loss."""
        # transformers recomputes activations in training mode only; dropout is off in either mode.
        self.model.train(self._recomputes)
        try:
            return score_tokens(self.model, microbatch, temperature, entropy_needs_grad=entropy_needs_grad)
        finally:
            self.model.eval()

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[Tensor]:
        """Log-probabilities of loss tokens per sequence, without gradients."""
        return sequence_logprobs(self.model, sequences, temperature=temperature, max_tokens=max_tokens)

    def backward(self, loss: Tensor) -> None:
        """Add one microbatch's gradients to the update being made."""
        loss.backward()
        self._optimizer.accumulate()

    def apply(self, rate: float) -> UpdateResult:
        """Finish the update. A gradient that is not finite is not applied; too many in a row end the run."""
        result = self._optimizer.apply(rate)
        self._nonfinite_in_a_row = 0 if result.nonfinite is None else self._nonfinite_in_a_row + 1
        if self._nonfinite_in_a_row >= self._max_nonfinite:
            raise NonFiniteError(
                f"{self._nonfinite_in_a_row} updates in a row had gradients that are not finite (norm "
                f"{result.grad_norm}, first in {result.nonfinite}); none was applied. "
                "Lower optimizer.learning_rate, or set model.compute_dtype to float32"
            )
        return result

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything that an exact continuation needs, as named tensors."""
        masters, moments = self._optimizer.state()
        return {"policy": masters, "optimizer": moments}

    def load_state(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self._optimizer.load_state(tensors["policy"], tensors["optimizer"])
