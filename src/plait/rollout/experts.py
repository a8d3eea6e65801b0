"""Recording which experts a mixture-of-experts model chose, token by token, so that training can replay them.

Shapes: T tokens of a forward pass, L layers that route, K experts per token.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plait.errors import ConfigError
from plait.models.routing import find_routers


class ExpertRecorder:
    """Listens to the routers of a model from `start` to `take`: the trainer's passes go through the same modules.

    transformers' routers return the chosen indices last, one row per token.
    """

    def __init__(self, model: PreTrainedModel):
        routers = find_routers(model)
        if not routers:
            raise ConfigError(
                f"expert choices were asked for, and {type(model).__name__} has no router. "
                "Record experts with mixture-of-experts models only"
            )
        self.num_layers = len(routers)
        self.num_per_token = int(routers[0].top_k)
        self._seen: list[Tensor] = []
        self._is_listening = False
        self._handles = [router.register_forward_hook(self._listen) for router in routers]

    def _listen(self, module: nn.Module, inputs: Any, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._is_listening:
            self._seen.append(outputs[-1])

    def start(self) -> None:
        """Listen to the next forward pass."""
        self._seen, self._is_listening = [], True

    def take(self) -> Tensor:
        """int16 [T, L, K] of the one forward pass since `start`."""
        self._is_listening = False
        assert len(self._seen) == self.num_layers, f"{len(self._seen)} routers answered, expected {self.num_layers}"
        chosen_TLK = torch.stack(self._seen, dim=1).to(torch.int16)
        self._seen = []
        return chosen_TLK

    def close(self) -> None:
        """Leave the model's routers alone."""
        for handle in self._handles:
            handle.remove()
