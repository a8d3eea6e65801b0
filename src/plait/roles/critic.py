"""The critic: a model of its own that predicts the return from each token on."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from plait.config import OptimizerConfig
from plait.models.value_head import ValueHead
from plait.parallel.degrees import Recompute
from plait.roles.model import model_inputs
from plait.roles.trained import TrainedRole
from plait.stages.packing import Microbatch, TokenSequence, pack


class Critic(TrainedRole):
    """The trunk of a causal LM under a value head, with fp32 masters and an optimiser."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: OptimizerConfig,
        *,
        max_nonfinite_updates: int = 3,
        recompute: Recompute = "none",
    ):
        """model: a causal LM, whose own head is left out."""
        trunk = model.base_model
        self.head = ValueHead(trunk.config.hidden_size, next(trunk.parameters()).device)
        super().__init__(
            trunk,
            config,
            {"value_head": self.head},
            rate_key="algorithm.critic.learning_rate",
            max_nonfinite_updates=max_nonfinite_updates,
            recompute=recompute,
        )

    def token_values(self, microbatch: Microbatch) -> Tensor:
        """Values before each loss token, [R], with gradients."""
        self.model.train(self._recomputes)
        try:
            return self.head(self._hidden(microbatch)[microbatch.predict_R])
        finally:
            self.model.eval()

    @torch.no_grad()
    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[tuple[Tensor, float]]:
        """Of each sequence: values before its loss tokens [R], and after its last token."""
        made: dict[int, tuple[Tensor, float]] = {}
        for microbatch in pack(sequences, max_tokens, self.device):
            hidden_TD = self._hidden(microbatch)
            values_R, values_B = self.head(hidden_TD[microbatch.predict_R]), self.head(hidden_TD[microbatch.last_B])
            for index, last in zip(microbatch.sequences, values_B.tolist(), strict=True):
                made[index] = values_R[microbatch.sequence_R == index], last
        return [made[index] for index in range(len(sequences))]

    def _hidden(self, microbatch: Microbatch) -> Tensor:
        return self.model(**model_inputs(microbatch)).last_hidden_state[0]

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything that an exact continuation needs, as named tensors."""
        masters, moments = self._optimizer.state()
        return {"critic": masters, "critic_optimizer": moments}

    def load_state(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        self._optimizer.load_state(tensors["critic"], tensors["critic_optimizer"])
