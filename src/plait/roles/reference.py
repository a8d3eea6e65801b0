"""The reference: the policy as it was at the start, frozen."""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from plait.roles.model import sequence_logprobs
from plait.stages.packing import TokenSequence


class Reference:
    """A causal LM that only scores."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[Tensor]:
        """Log-probabilities of the loss tokens per sequence."""
        return sequence_logprobs(self.model, sequences, temperature=temperature, max_tokens=max_tokens)
