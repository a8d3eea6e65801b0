"""fp32 master weights behind a compute copy: gradients are added up and applied in fp32, the copy is derived.

A weight near 1 does not move under updates of 1e-6 in bf16 (its spacing there is 8e-3), so the masters are always
fp32, whatever type computes.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from plait.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, update: int, num_updates: int) -> float:
    """Rate of update number `update` (from 0) of `num_updates`: linear warm-up, then constant, linear or cosine.

    A pure function of the planned update, so that resuming needs no scheduler state.
    """
    warmup = config.num_warmup_updates(num_updates)
    if update < warmup:
        return config.learning_rate * (update + 1) / warmup
    if config.schedule == "constant":
        return config.learning_rate
    progress = (update - warmup) / max(num_updates - warmup, 1)
    fall = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_share + (1 - config.final_share) * fall)


class UpdateResult(NamedTuple):
    """grad_norm before clipping. nonfinite: the first parameter with a gradient that is not finite; None if applied."""

    grad_norm: float
    nonfinite: str | None


class MasterOptimizer:
    """Owns the fp32 masters of a model's parameters (and of heads on top of it) and the optimiser's moments.

    One update: backward passes fill the compute copy's gradients, `accumulate` adds them to the fp32 ones after each
    microbatch, `apply` clips, steps and refreshes the copy.
    """

    def __init__(self, model: PreTrainedModel, config: OptimizerConfig, heads: Mapping[str, nn.Module] | None = None):
        """heads: further modules on top of the model, by the name under which their parameters are kept."""
        parts = {"": model, **{f"{name}.": head for name, head in (heads or {}).items()}}
        named = {
            f"{prefix}{name}": p
            for prefix, part in parts.items()
            for name, p in part.named_parameters()
            if p.requires_grad
        }
        self._config = config
        self._copies: list[Tensor] = list(named.values())
        self._is_separate = any(p.dtype != torch.float32 for p in self._copies)
        masters = [p.detach().float().clone() if self._is_separate else p for p in self._copies]
        self.masters: dict[str, Tensor] = dict(zip(named, masters, strict=True))
        ends = embedding_names(model) | {
            name for name in named for prefix in parts if prefix and name.startswith(prefix)
        }
        self._optimizers = make_optimizers(self.masters, ends, config)

    def accumulate(self) -> None:
        """Add the compute copy's gradients to the masters' and clear them."""
        if not self._is_separate:
            return
        for master, copy in zip(self.masters.values(), self._copies, strict=True):
            if copy.grad is not None:
                gradient = copy.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                copy.grad = None

    def apply(self, rate: float) -> UpdateResult:
        """Clip by global norm, take one optimiser step at `rate` and refresh the copy.

        With a norm that is not finite nothing is applied, moments included; the result names a culprit.
        """
        masters = list(self.masters.values())
        gradients = [m.grad for m in masters if m.grad is not None]
        total = nn.utils.get_total_norm(gradients)
        norm = float(total)
        result = UpdateResult(norm, None if math.isfinite(norm) else self._first_nonfinite())
        if result.nonfinite is None:
            nn.utils.clip_grads_with_norm_(masters, self._config.max_grad_norm, total)
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
            self._refresh()
        for master in masters:
            master.grad = None
        return result

    def _first_nonfinite(self) -> str:
        for name, master in self.masters.items():
            if master.grad is not None and not bool(master.grad.isfinite().all()):
                return name
        return "the sum over all parameters"

    @torch.no_grad()
    def _refresh(self) -> None:
        if self._is_separate:
            torch._foreach_copy_(self._copies, list(self.masters.values()))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(masters by parameter name, moments as "parameter name/moment name")."""
        names = {id(master): name for name, master in self.masters.items()}
        moments = {
            f"{names[id(parameter)]}/{key}": value
            for optimizer in self._optimizers
            for parameter, entry in optimizer.state.items()
            for key, value in entry.items()
            if isinstance(value, Tensor)
        }
        return {name: master.detach() for name, master in self.masters.items()}, moments

    @torch.no_grad()
    def load_state(self, masters: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Take over what `state` returned, exactly."""
        assert masters.keys() == self.masters.keys(), "the checkpoint belongs to another model"
        for name, value in masters.items():
            self.masters[name].copy_(value)
        by_parameter: dict[str, dict[str, Any]] = {}
        for key, value in moments.items():
            name, moment = key.rsplit("/", 1)
            by_parameter.setdefault(name, {})[moment] = value.clone()
        for optimizer in self._optimizers:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, entry in by_parameter.items():
                if id(self.masters[name]) in owned:
                    optimizer.state[self.masters[name]] = entry
        self._refresh()


def embedding_names(model: PreTrainedModel) -> set[str]:
    """Names of the parameters that map tokens to vectors or back."""
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    owned = {id(p) for end in ends if end is not None for p in end.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in owned}


def make_optimizers(
    masters: Mapping[str, Tensor], embeddings: set[str], config: OptimizerConfig
) -> list[torch.optim.Optimizer]:
    """Norms, biases and other vectors are not decayed, as is usual. Muon is for hidden matrices only."""
    matrices = {name: p for name, p in masters.items() if p.ndim >= 2}
    vectors = [p for p in masters.values() if p.ndim < 2]
    made: list[torch.optim.Optimizer] = []
    if config.name == "muon":
        hidden = [p for name, p in matrices.items() if name not in embeddings and p.ndim == 2]
        matrices = {name: p for name, p in matrices.items() if name in embeddings or p.ndim != 2}
        # Scaled to the size of an AdamW step, so that one learning rate serves both.
        made.append(
            torch.optim.Muon(
                hidden,
                lr=config.learning_rate,
                momentum=config.betas[0],
                weight_decay=config.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    groups = [
        {"params": list(matrices.values()), "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.name == "sgd":
        made.append(torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.betas[0]))
    else:
        made.append(torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True))
    return made
