"""Routers of mixtures of experts: computed in fp32, with recorded experts replayed, with a load-balancing loss.

`prepare_routers` wraps the routers of a model once; a pass then brings its `Routing` as a forward argument, which
transformers hands on to each decoder layer. So the right one is there whenever a layer runs, also when backward
computes it again or a pipeline has several passes in flight.

Shapes: T tokens that a router sees, L layers that route, K experts per token, E experts, B sequences of the row.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

NO_EXPERT = -1
"""Where nothing was recorded, so that the router chooses."""


@dataclass(slots=True)
class Balance:
    """A load-balancing loss per sequence, as DeepSeek-V3 has it (2412.19437, eq. 17-20), in every layer.

    Of a sequence of n tokens: weight x sum_e f_e P_e, with f_e = E/(K n) x its tokens that chose e, P_e = their mean
    normalised score of e. Sequences are its unit, so microbatches and ranks do not change it.

    weight: coefficient / number of sequences of the update. group: ranks that have the other tokens of these
    sequences; None if there are none. by_layer: this rank's part of the loss, once a pass has run.
    """

    weight: float
    group: dist.ProcessGroup | None = None
    by_layer: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Routing:
    """What routers know of the tokens of a pass.

    sequence_T: which sequence of the row each token is of, -1 for filling. num_tokens_B: of each of them, wherever
    they are. experts_TLK: experts to use, NO_EXPERT where the router chooses; None where it chooses everywhere.
    """

    sequence_T: Tensor
    num_tokens_B: Tensor
    experts_TLK: Tensor | None = None
    balance: Balance | None = None

    def of(self, tokens: Tensor | slice) -> "Routing":
        """That of some of the tokens."""
        experts = None if self.experts_TLK is None else self.experts_TLK[tokens]
        return Routing(self.sequence_T[tokens], self.num_tokens_B, experts, self.balance)

    @property
    def is_needed(self) -> bool:
        """Whether routers do anything but route."""
        return self.experts_TLK is not None or self.balance is not None


def find_routers(model: nn.Module) -> list[nn.Module]:
    """In the order of layers. transformers' routers return (logits, weights of the chosen, the chosen [T, K])."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


def prepare_routers(model: PreTrainedModel) -> None:
    """Let routers compute in fp32 and heed the `routing` argument of a forward pass; nothing in a dense model.

    Weights stay in the dtype of the model and are cast up, so that a trainer with bf16 copies and the engine agree.
    """
    number = 0
    for layer in model.base_model.layers:
        found = find_routers(layer)
        if not found:
            continue
        assert len(found) == 1, f"{len(found)} routers in one layer"
        routed = _Routed(found[0], layer, number)
        # Bound methods of one object, so that a copy of the model has a copy of them.
        found[0].forward, layer.forward = routed.forward, routed.layer_forward
        number += 1


class _Routed:
    """Forward passes of a router and of its layer, which brings what the router heeds."""

    def __init__(self, router: nn.Module, layer: nn.Module, number: int):
        self._router, self._number = router, number
        self._whole_forward, self._whole_layer_forward = router.forward, layer.forward
        self._num_experts: int = router.num_experts  # type: ignore[assignment]
        self._routing: Routing | None = None

    def layer_forward(self, *args: Any, routing: Routing | None = None, **kwargs: Any) -> Any:
        self._routing = routing
        try:
            return self._whole_layer_forward(*args, **kwargs)
        finally:
            self._routing = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routing = self._routing
        if routing is None or routing.experts_TLK is None:
            logits_TE, weights_TK, chosen_TK = self._in_fp32(hidden)
        else:
            with _Replay(routing.experts_TLK[:, self._number], self._num_experts):
                logits_TE, weights_TK, chosen_TK = self._in_fp32(hidden)
        if routing is not None and routing.balance is not None and torch.is_grad_enabled():
            loss = balance_loss(self._normalised(logits_TE), chosen_TK, routing)
            routing.balance.by_layer[self._number] = float(loss.detach())
            weights_TK = _AlsoLoss.apply(weights_TK, loss)
        return logits_TE, weights_TK, chosen_TK

    def _in_fp32(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        registered = dict(self._router._parameters)
        for name, parameter in registered.items():
            self._router._parameters[name] = None if parameter is None else parameter.float()  # type: ignore[assignment]
        try:
            made: tuple[Tensor, Tensor, Tensor] = self._whole_forward(hidden.float())
            return made
        finally:
            self._router._parameters.update(registered)

    def _normalised(self, logits_TE: Tensor) -> Tensor:
        """Scores that sum to 1: routers with groups of experts score by sigmoid (DeepSeek-V3), others by softmax."""
        if "routed_scaling_factor" not in self._router.__dict__:
            return logits_TE.softmax(-1)
        scores_TE = logits_TE.sigmoid()
        return scores_TE / scores_TE.sum(-1, keepdim=True)


def balance_loss(scores_TE: Tensor, chosen_TK: Tensor, routing: Routing) -> Tensor:
    """This rank's part of the loss of `Balance`: its sum over ranks is the loss, and so are its gradients."""
    balance = routing.balance
    assert balance is not None, "no balance was asked for"
    num_experts, per_token = scores_TE.shape[-1], chosen_TK.shape[-1]
    is_real_T = routing.sequence_T >= 0
    sequence_t, scores_tE, chosen_tK = (x[is_real_T] for x in (routing.sequence_T, scores_TE, chosen_TK))
    counts_BE = scores_TE.new_zeros(len(routing.num_tokens_B), num_experts)
    places = sequence_t[:, None] * num_experts + chosen_tK
    counts_BE.view(-1).index_add_(0, places.flatten(), torch.ones_like(places, dtype=counts_BE.dtype).flatten())
    if balance.group is not None and len(counts_BE):
        dist.all_reduce(counts_BE, group=balance.group)
    share_BE = counts_BE * num_experts / (per_token * routing.num_tokens_B[:, None])
    return balance.weight * (share_BE / routing.num_tokens_B[:, None])[sequence_t].mul(scores_tE).sum()


class _AlsoLoss(torch.autograd.Function):
    """Its first argument, whose backward pass also starts that of a loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.dtype = loss.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, Tensor]:
        return d_x, torch.ones((), dtype=ctx.dtype, device=d_x.device)


class _Replay(TorchFunctionMode):
    """While it is on, the choice among all experts is the given one where there is one.

    Everything else of a router stays its own: scores of the chosen, their normalisation, and so the gradients.
    """

    def __init__(self, chosen_TK: Tensor, num_experts: int):
        super().__init__()
        self._chosen_TK, self._num_experts = chosen_TK, num_experts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk) or args[0].ndim != 2 or args[0].shape[-1] != self._num_experts:
            return made
        assert made[1].shape == self._chosen_TK.shape, f"{made[1].shape} experts, {self._chosen_TK.shape} recorded"
        chosen_TK = torch.where(self._chosen_TK == NO_EXPERT, made[1], self._chosen_TK)
        return args[0].gather(-1, chosen_TK), chosen_TK
