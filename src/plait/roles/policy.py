"""The policy: the model that is trained."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from plait.config import OptimizerConfig
from plait.models.value_head import ValueHead
from plait.parallel.degrees import Recompute
from plait.roles.model import TokenScores, score_tokens, sequence_logprobs
from plait.roles.trained import TrainedRole
from plait.stages.packing import Microbatch, TokenSequence

_HEAD = "value_head"


class Policy(TrainedRole):
    """A causal LM with fp32 masters and an optimiser; with a value head it is a trunk shared with the critic."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: OptimizerConfig,
        *,
        max_nonfinite_updates: int = 3,
        recompute: Recompute = "none",
        value_head: ValueHead | None = None,
    ):
        super().__init__(
            model,
            config,
            {} if value_head is None else {_HEAD: value_head},
            rate_key="optimizer.learning_rate",
            max_nonfinite_updates=max_nonfinite_updates,
            recompute=recompute,
        )
        self.value_head = value_head

    def token_scores(
        self, microbatch: Microbatch, temperature: float, *, entropy_needs_grad: bool = False
    ) -> TokenScores:
        """Scores with gradients, for a loss."""
        # transformers recomputes activations in training mode only; dropout is off in either mode.
        self.model.train(self._recomputes)
        try:
            return score_tokens(
                self.model,
                microbatch,
                temperature,
                entropy_needs_grad=entropy_needs_grad,
                value_head=self.value_head,
            )
        finally:
            self.model.eval()

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[Tensor]:
        """Log-probabilities of loss tokens per sequence, without gradients."""
        return sequence_logprobs(self.model, sequences, temperature=temperature, max_tokens=max_tokens)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything that an exact continuation needs, as named tensors."""
        masters, moments = self._optimizer.state()
        if self.value_head is None:
            return {"policy": masters, "optimizer": moments}
        # Apart, so that "policy" is the language model alone and loads as one.
        head = {name: tensor for name, tensor in masters.items() if name.startswith(f"{_HEAD}.")}
        policy = {name: tensor for name, tensor in masters.items() if name not in head}
        return {"policy": policy, _HEAD: head, "optimizer": moments}

    def load_state(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        head = {} if self.value_head is None else tensors[_HEAD]
        self._optimizer.load_state(tensors["policy"] | head, tensors["optimizer"])
