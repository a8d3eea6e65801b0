"""Roles whose model is split over the ranks of a layout: the same methods as those of one process."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from plait.config import OptimizerConfig
from plait.models.optimizer import UpdateResult
from plait.models.value_head import ValueHead
from plait.parallel.degrees import Layout
from plait.parallel.mesh import Mesh
from plait.parallel.sharded import LossOf, ShardedModel
from plait.roles.model import TokenScores
from plait.roles.trained import FailedUpdates
from plait.stages.packing import Microbatch, TokenSequence


class ShardedPolicy:
    """A policy over the ranks of a layout. Every method is called by all of them together."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: Layout,
        device: torch.device,
        config: OptimizerConfig,
        *,
        compute_dtype: torch.dtype,
        max_nonfinite_updates: int = 3,
        rate_key: str = "optimizer.learning_rate",
        value_head: ValueHead | None = None,
    ):
        """model: whole, the same weights on every rank."""
        self.mesh = Mesh(layout, device)
        self.model = ShardedModel(model, layout, self.mesh, config, compute_dtype=compute_dtype, value_head=value_head)
        self.optimizer_config = config
        self._failed = FailedUpdates(rate_key, max_nonfinite_updates)

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def counts_tokens(self) -> bool:
        """Whether this rank reports the tokens that it owns: copies of the same loss report once."""
        return self.mesh.place("cp") == 0 and self.mesh.place("tp") == 0

    def split(self, sequences: Sequence[TokenSequence], max_tokens: int, *, together: int = 1) -> list[Microbatch]:
        """This rank's microbatches, as many as every other rank's."""
        assert together == 1, "pairs are not kept together over ranks; the rules refuse them"
        return self.model.split(sequences, max_tokens)

    def train_pass(
        self,
        microbatches: Sequence[Microbatch],
        loss_of: Callable[[Microbatch, TokenScores], Tensor],
        *,
        temperature: float,
        entropy_needs_grad: bool = False,
    ) -> None:
        """Forward and backward of this rank's microbatches. loss_of: a sum over their loss tokens."""
        complete = completed(loss_of, self.mesh)
        self.model.train_pass(microbatches, complete, temperature, entropy_needs_grad=entropy_needs_grad)

    def logprobs(self, sequences: Sequence[TokenSequence], *, temperature: float, max_tokens: int) -> list[Tensor]:
        """Complete on every rank."""
        return self.model.logprobs(sequences, temperature=temperature, max_tokens=max_tokens)

    def values(self, sequences: Sequence[TokenSequence], *, max_tokens: int) -> list[tuple[Tensor, float]]:
        """Of a value head, for each sequence: before its loss tokens [R], and after its last token."""
        made = self.model.scores(sequences, temperature=1.0, max_tokens=max_tokens)
        return list(zip(made.values, made.last_values, strict=True))

    def apply(self, rate: float) -> UpdateResult:
        """Finish the update: the same result on every rank."""
        result = self.model.apply(rate)
        self._failed.see(result)
        return result


class ShardedCritic(ShardedPolicy):
    """A critic of its own over the ranks of a layout: a causal LM whose value head alone is trained on."""

    def train_pass(  # type: ignore[override]
        self, microbatches: Sequence[Microbatch], loss_of: Callable[[Microbatch, Tensor], Tensor]
    ) -> None:
        """Forward and backward of this rank's microbatches. loss_of: a sum over the values of their loss tokens."""

        def of_values(microbatch: Microbatch, scores: TokenScores) -> Tensor:
            assert scores.values_R is not None, "a critic has a value head"
            return loss_of(microbatch, scores.values_R)

        self.model.train_pass(microbatches, completed(of_values, self.mesh), 1.0)


def completed(loss_of: LossOf, mesh: Mesh) -> LossOf:
    """A loss over whole sequences where context parallelism has cut them.

    Some losses look at a sequence as a whole (GSPO's ratio). So every rank of a cp group gets the scores of all of its
    tokens, takes the same loss, and sends gradients into those that it owns: together that is the gradient once.
    """
    if mesh.layout.cp == 1:
        return loss_of

    def of_whole(microbatch: Microbatch, scores: TokenScores) -> Tensor:
        whole = microbatch.whole
        assert whole is not None, "a cut microbatch knows what it was cut from"
        sequences, counts = whole.sequence_R.unique_consecutive(return_counts=True)
        first_B = torch.zeros(int(sequences.max()) + 1 if len(sequences) else 0, dtype=torch.int64, device=mesh.device)
        first_B[sequences] = counts.cumsum(0) - counts
        own_r = first_B[microbatch.sequence_R] + microbatch.place_R

        def complete(own: Tensor) -> Tensor:
            all_R = own.new_zeros(len(whole.sequence_R)).index_put((own_r,), own.detach())
            dist.all_reduce(all_R, group=mesh.group("cp"))
            return all_R.index_put((own_r,), own)

        values_R = None if scores.values_R is None else complete(scores.values_R)
        return loss_of(whole, TokenScores(complete(scores.logprobs_R), complete(scores.entropy_R), values_R))

    return of_whole
