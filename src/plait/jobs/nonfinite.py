"""Watches one forward and backward pass of a model for the first value that is not finite."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from plait.jobs.replay_batch import Kind


class FirstSeen(NamedTuple):
    """kind and name as in `Finding`. row: which token of the pass (of the rows kept, for logits), None if of none."""

    kind: Kind
    name: str
    row: int | None
    value: str


def first_bad(values: Tensor) -> int | None:
    """Index into the flattened tensor of its first value that is not finite."""
    is_bad = ~values.detach().isfinite().flatten()
    return int(is_bad.int().argmax()) if bool(is_bad.any()) else None


def shown(values: Tensor, index: int) -> str:
    """The value at an index of the flattened tensor: "nan", "inf" or "-inf"."""
    return str(float(values.detach().flatten()[index]))


class PassWatch:
    """Within it, `first` is what appeared first: the output of a module, its gradient, or that of a parameter.

    Modules without children are watched, in the order in which they run.
    num_tokens, num_logits: rows that are not filling, of all outputs but the head's, and of the head's.
    """

    def __init__(self, model: PreTrainedModel, num_tokens: int, num_logits: int):
        self.first: FirstSeen | None = None
        self._model, self._num_tokens, self._num_logits = model, num_tokens, num_logits
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "PassWatch":
        head = self._model.get_output_embeddings()
        for name, module in self._model.named_modules():
            if not any(True for _ in module.children()):
                self._handles.append(module.register_forward_hook(self._after(name, module is head)))
        for name, parameter in self._model.named_parameters():
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._accumulated(name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _after(self, name: str, is_head: bool) -> Callable[[nn.Module, Any, Any], None]:
        num_rows = self._num_logits if is_head else self._num_tokens

        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if not isinstance(output, Tensor) or not output.is_floating_point():
                    continue
                self._note("logits" if is_head else "activation", name, output, num_rows)
                if output.requires_grad:
                    output.register_hook(lambda grad: self._note("gradient of an activation", name, grad, num_rows))

        return hook

    def _accumulated(self, name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None
            index = first_bad(parameter.grad)
            if self.first is None and index is not None:
                self.first = FirstSeen("gradient of a parameter", name, None, shown(parameter.grad, index))

        return hook

    def _note(self, kind: Kind, name: str, values: Tensor, num_rows: int) -> None:
        if self.first is not None:
            return
        # [1, rows, ...]: one packed row; experts and the like flatten it to [rows, ...].
        rows = values[0] if values.ndim > 2 and values.shape[0] == 1 else values
        rows = rows[:num_rows]
        index = first_bad(rows)
        if index is not None:
            self.first = FirstSeen(kind, name, index // max(1, rows[0].numel()), shown(rows, index))
