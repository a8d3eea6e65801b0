"""Model state of one rank: parameters, gradients, optimiser, gathered units; by precision recipe and ZeRO stage.

Torch-free. Formulas: ZeRO (arXiv 1910.02054) and Megatron-LM's theoretical_memory_usage.py, per part of the model
instead of a total divided by all ranks: norms and routers are whole on every tensor-parallel rank.
"""

from dataclasses import dataclass

from plait.cost.arithmetic import Number, maximum, minimum, where
from plait.cost.layers import WHOLE, Division
from plait.cost.model_spec import Matrix, ModelSpec, ParameterCounts, count_parameters


@dataclass(frozen=True, slots=True)
class PrecisionRecipe:
    """Bytes per parameter. parameter_b: the copy that computes and is gathered. gradient_b: its gradients.

    optimizer_b: fp32 masters where there are any, and moments: what ZeRO-1 divides. held_b: parameters that a rank
    keeps between passes, where that is not the copy that computes (FSDP2 keeps fp32 masters and gathers bf16).
    """

    parameter_b: float
    gradient_b: float
    optimizer_b: float
    held_b: float | None = None

    @property
    def kept_b(self) -> float:
        """Bytes of a parameter between passes."""
        return self.parameter_b if self.held_b is None else self.held_b


PRECISION_RECIPES: dict[str, PrecisionRecipe] = {
    "mixed_bf16_gradients": PrecisionRecipe(2, 2, 12),
    "mixed_fp32_gradients": PrecisionRecipe(2, 4, 12),
    "fp32": PrecisionRecipe(4, 4, 8),
    "fsdp2_fp32_masters": PrecisionRecipe(2, 4, 8, held_b=4),
    "bf16_moments": PrecisionRecipe(2, 4, 8),
    "inference_fp32": PrecisionRecipe(4, 0, 0),
    "inference_bf16": PrecisionRecipe(2, 0, 0),
    "inference_fp8": PrecisionRecipe(1, 0, 0),
}
"""ZeRO's 16 bytes; Megatron's 18; fp32 throughout 16; FSDP2's mixed precision 16 and the gathered units; moments in
bf16 14; inference 4, 2 and 1 (scales of fp8 come on top)."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of one rank. gathered: whole units that exist for a moment (ZeRO-3)."""

    parameters: Number
    gradients: Number
    optimizer: Number
    gathered: Number

    @property
    def total(self) -> Number:
        """All at once: the peak of a training step's model state."""
        return self.parameters + self.gradients + self.optimizer + self.gathered


def local_parameters(spec: ModelSpec, division: Division = WHOLE) -> ParameterCounts:
    """Parameters of one tensor- and expert-parallel rank, before any ZeRO division.

    Vocabulary, heads and widths are divided over tp, experts over ep (or their widths over tp); norms, routers and
    low-rank down-projections are whole; so are the heads' copies where tp exceeds the number of KV heads, and shared
    experts where there is ep.
    """
    tp, width, whole = division.tp, spec.hidden_size, spec.parameters

    def share(matrices: tuple[Matrix, ...]) -> Number:
        return count_parameters(matrix.share(tp) for matrix in matrices)

    dense, sparse = spec.num_layers - spec.num_sparse_layers, spec.num_sparse_layers
    feed_forward = dense * share(spec.feed_forward.matrices(width))
    experts: Number = 0
    if spec.experts is not None:
        part = spec.experts.expert.matrices(width)
        if spec.experts.shared is not None:
            feed_forward += sparse * _shared_expert(spec, division)
        each = where(division.ep > 1, count_parameters(part) / maximum(division.ep, 1), share(part))
        experts = sparse * spec.experts.num_experts * each
    return ParameterCounts(
        attention=spec.num_layers * (share(spec.attention.matrices(width)) + spec.attention.num_sinks / tp),
        feed_forward=feed_forward,
        experts=experts,
        router=whole.router,
        norms=whole.norms,
        embedding=whole.embedding / tp,
        head=whole.head / (tp if spec.num_outputs is None else 1),
    )


def _shared_expert(spec: ModelSpec, division: Division) -> Number:
    """Parameters of one layer's shared expert: whole where experts are, since its rank then has tokens of its own."""
    assert spec.experts is not None, "a dense model has no shared expert"
    assert spec.experts.shared is not None, "the model has no shared expert"
    matrices = spec.experts.shared.matrices(spec.hidden_size)
    split = count_parameters(matrix.share(division.tp) for matrix in matrices)
    return where(division.ep > 1, count_parameters(matrices), split)


def largest_unit(spec: ModelSpec, division: Division = WHOLE) -> Number:
    """Parameters of the largest unit that ZeRO-3 gathers at once: a layer, or what is outside the layers."""
    local = local_parameters(spec, division)
    layers = local.attention + local.feed_forward + local.experts + local.router
    # Layers differ only in whether they hold experts; the sparse ones are the larger.
    sparse = spec.num_sparse_layers
    if spec.experts is None or sparse == 0:
        layer = layers / maximum(spec.num_layers, 1)
    else:
        common = local.attention / spec.num_layers
        shared = 0 if spec.experts.shared is None else _shared_expert(spec, division)
        layer = common + shared + (local.experts + local.router) / sparse
    return maximum(layer, local.embedding + local.head)


def state_bytes(
    num_parameters: Number,
    recipe: PrecisionRecipe,
    *,
    zero: int = 0,
    shard: Number = 1,
    expert_parameters: Number = 0,
    expert_shard: Number | None = None,
    gathered_parameters: Number = 0,
) -> StateBytes:
    """Model state of one rank.

    num_parameters: local ones other than experts', divided over `shard` ranks as the ZeRO stage says: 0 nothing, 1 the
    optimiser, 2 gradients too, 3 parameters too. expert_parameters: local ones, which only shard / (ranks that already
    hold other experts) share: expert_shard. gathered_parameters: of the units that exist whole for a moment (ZeRO-3).
    """
    assert zero in (0, 1, 2, 3), f"ZeRO stage {zero}"
    shards = shard if expert_shard is None else expert_shard

    def divided(b: Number, stage: int) -> Number:
        is_divided = zero >= stage
        return b * (num_parameters / (shard if is_divided else 1) + expert_parameters / (shards if is_divided else 1))

    gathered = recipe.parameter_b * gathered_parameters if zero == 3 else 0
    return StateBytes(
        divided(recipe.kept_b, 3), divided(recipe.gradient_b, 2), divided(recipe.optimizer_b, 1), gathered
    )


def rank_state(
    spec: ModelSpec,
    recipe: PrecisionRecipe,
    division: Division = WHOLE,
    *,
    zero: int = 0,
    dp_shard: Number = 1,
    num_gathered_units: int = 2,
) -> StateBytes:
    """Model state of one rank of a pipeline stage's part. Parameters shard over dp_shard x cp; experts over what of
    dp_shard x cp x tp is left after ep. num_gathered_units: a unit at work and the next, fetched ahead; none where one
    rank holds everything in the dtype that computes.
    """
    local = local_parameters(spec, division)
    shard = dp_shard * division.cp
    expert_shard = maximum(minimum(shard, shard * division.tp / maximum(division.experts, 1)), 1)
    return state_bytes(
        local.total - local.experts,
        recipe,
        zero=zero,
        shard=shard,
        expert_parameters=local.experts,
        expert_shard=expert_shard,
        gathered_parameters=where(shard > 1, 1, 0 if recipe.held_b is None else 1)
        * num_gathered_units
        * largest_unit(spec, division),
    )
