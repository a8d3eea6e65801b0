"""A trained reward model: a sequence classifier with one label, frozen."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from plait.batch import Sample
from plait.roles.model import model_inputs
from plait.stages.packing import TokenSequence, pack


class RewardModel:
    """Scores prompt and completion, token by token as the policy wrote them: the tokenizer must be the policy's.

    The score is the classifier's logit at the last token of the sequence.
    """

    def __init__(self, name: str, weight: float, model: PreTrainedModel):
        self.name, self.weight, self._model = name, weight, model

    @torch.no_grad()
    def scores(self, samples: Sequence[Sample], *, max_tokens: int) -> list[float]:
        """One number per sample, in order; NaN or infinite where the model says so."""
        made: dict[int, float] = {}
        device = next(self._model.parameters()).device
        for microbatch in pack([TokenSequence.from_sample(sample) for sample in samples], max_tokens, device):
            hidden_TD = self._model.base_model(**model_inputs(microbatch)).last_hidden_state[0]
            # A column of one label: the head of every transformers sequence classifier for causal models.
            score_B = self._model.get_submodule("score")(hidden_TD[microbatch.last_B])[:, 0]
            made |= dict(zip(microbatch.sequences, score_B.float().tolist(), strict=True))
        return [made[index] for index in range(len(samples))]
