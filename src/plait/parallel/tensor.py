"""Tensor parallelism from a model's own plan, with or without sequence-parallel norms; vocabulary-parallel ends.

Weights become DTensors, split as the model declares; products run on their local parts. Within a decoder layer, the
parts that the plan names (attention, feed-forward) are *regions*: a region's input changes its layout once, and so does
its output. Forward: one all-gather (sp) in, one all-reduce or reduce-scatter (sp) out; backward the reverse.

What is whole inside a region (q/k norms, routers, biases after row-wise products) sees on each rank only that rank's
part of the gradient, and so does everything between regions under sp. Those sums over tp are made once per update, by
`plait.parallel.gradients`, from the names that `split_tensors` returns.

Shapes: T tokens, D model width, V vocabulary, R loss tokens.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from transformers import PreTrainedModel

from plait.errors import Violation
from plait.parallel.degrees import divisors, nearest
from plait.roles.model import TokenScores, has_plain_head

WHOLE_STYLES = frozenset({"replicated_with_grad_allreduce", "moe_tp_experts"})
"""Styles that split nothing themselves: the region around them does what they ask for."""
SPLIT_STYLES = frozenset({"colwise", "rowwise", "packed_colwise"})
SHARED_EXPERT_PLAN = {
    "layers.*.mlp.shared_expert.gate_proj": "colwise",
    "layers.*.mlp.shared_expert.up_proj": "colwise",
    "layers.*.mlp.shared_expert.down_proj": "rowwise",
}
"""Models whose plan splits the routed experts alone add a whole shared one, which a region would sum tp times."""
SEQUENCE_DIM = 1


def tensor_violations(model: PreTrainedModel, tp: int, key: str = "tp") -> list[Violation]:
    """Why this model cannot be split over tp ranks, beyond the sizes that `layout_violations` looks at."""
    plan = model.config.base_model_tp_plan
    name = type(model).__name__
    if not plan:
        return [Violation(key, f"{name} declares no tensor-parallel plan, and tp is {tp}", f"Leave {key} out")]
    found = []
    unknown = sorted(set(plan.values()) - WHOLE_STYLES - SPLIT_STYLES)
    if unknown:
        rule = f"{name} asks for the tensor-parallel styles {', '.join(unknown)}, known are {', '.join(SPLIT_STYLES)}"
        found.append(Violation(key, rule, f"Leave {key} out"))
    if not has_plain_head(model):
        found.append(Violation(key, f"{name} changes its logits, so they cannot be split", f"Leave {key} out"))
    vocab = model.get_input_embeddings().weight.shape[0]
    if vocab % tp:
        change = f"Set {key} to {nearest(divisors(vocab), tp)}"
        found.append(Violation(key, f"tp {tp} does not divide the vocabulary of {vocab}", change))
    return found


def split_tensors(
    model: PreTrainedModel, mesh: DeviceMesh, *, sp: bool, expert_blocks: Collection[str] = ()
) -> set[str]:
    """Split the model's tensors over `mesh` (tp), in place.

    expert_blocks: modules (of the base model) that expert parallelism has taken: each rank passes other tokens through
    them. Returns the names of whole parameters whose gradient on a rank is a part, to be summed over tp.
    """
    between = Shard(SEQUENCE_DIM) if sp else Replicate()
    regions: set[str] = set()
    for pattern, style in (SHARED_EXPERT_PLAN | model.config.base_model_tp_plan).items():
        if style in WHOLE_STYLES:
            continue
        for name, module, parameter in matches(model.base_model, pattern):
            if any(name.startswith(f"{block}.") for block in expert_blocks):
                continue
            _split(module, parameter, style, mesh)
            regions.add(".".join(name.split(".")[:3]))
    base = model.base_model
    for name in sorted(regions):
        _make_region(base.get_submodule(name), mesh, between)
    _split_vocabulary(model, mesh, between)
    inside = {id(p) for name in (*regions, *expert_blocks) for p in base.get_submodule(name).parameters()}
    whole = {name: p for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    return {name for name, p in whole.items() if sp or id(p) in inside}


def matches(base: nn.Module, pattern: str) -> list[tuple[str, nn.Module, str | None]]:
    """(name, module, parameter of it or None) of what a plan's pattern names; a * stands for one part."""
    parts = pattern.split(".")

    def is_match(name: str) -> bool:
        got = name.split(".")
        return len(got) == len(parts) and all(want in ("*", part) for want, part in zip(parts, got, strict=True))

    found: list[tuple[str, nn.Module, str | None]] = []
    for name, module in base.named_modules():
        if is_match(name):
            found.append((name, module, None))
        found += [(name, module, own) for own, _ in module.named_parameters(recurse=False) if is_match(f"{name}.{own}")]
    return found


def _split(module: nn.Module, parameter: str | None, style: str, mesh: DeviceMesh) -> None:
    if parameter is None:
        assert isinstance(module, nn.Linear), f"{style} of {type(module).__name__}"
        dims = {"weight": 0 if style == "colwise" else 1}
        if style == "colwise" and module.bias is not None:
            dims["bias"] = 0
    else:
        # Fused experts [E, out, in]: rows are outputs.
        dims = {parameter: 2 if style == "rowwise" else 1}
    for name, dim in dims.items():
        data = module._parameters[name].detach()  # type: ignore[union-attr]
        if style == "packed_colwise":  # [E, 2F, D] -> [E, 2, F, D]: each rank has its part of both halves
            data, dim = data.unflatten(1, (2, -1)), 2
        split = distribute_tensor(data, mesh, [Shard(dim)], src_data_rank=None)
        module._parameters[name] = nn.Parameter(split)
    compute_locally(module, mesh.size() if style == "rowwise" else 1)


def compute_locally(module: nn.Module, bias_shares: int) -> None:
    """Let a module's forward see its parameters' local parts.

    bias_shares: ranks whose outputs are summed, so that each adds its share of a whole bias.
    """
    if "_whole_forward" in module.__dict__:
        return  # its parameters came one by one
    forward = module.__dict__["_whole_forward"] = module.forward

    def local(*args: Any, **kwargs: Any) -> Any:
        registered = dict(module._parameters)
        for name, parameter in registered.items():
            if isinstance(parameter, DTensor):
                part = parameter.to_local()
                module._parameters[name] = part.flatten(1, 2) if part.ndim == 4 else part
            elif name == "bias" and parameter is not None and bias_shares > 1:
                module._parameters[name] = parameter / bias_shares  # type: ignore[assignment]
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(registered)

    module.forward = local


def enter(x: Tensor, mesh: DeviceMesh, between: Placement) -> Tensor:
    """The layout between regions -> whole on every rank; the gradient that comes back is summed over ranks."""
    return _whole(x, mesh, between, Partial())


def leave(x: Tensor, mesh: DeviceMesh, between: Placement) -> Tensor:
    """Each rank's addend -> the layout between regions."""
    return DTensor.from_local(x, mesh, [Partial()], run_check=False).redistribute(placements=[between]).to_local()


def _whole(x: Tensor, mesh: DeviceMesh, between: Placement, gradient: Placement) -> Tensor:
    parts = DTensor.from_local(x, mesh, [between], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[gradient])


def _make_region(module: nn.Module, mesh: DeviceMesh, between: Placement) -> None:
    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (enter(args[0], mesh, between), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"], mesh, between)}

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # (hidden states, attention weights)
            return (leave(output[0], mesh, between), *output[1:])
        return leave(output, mesh, between)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _split_vocabulary(model: PreTrainedModel, mesh: DeviceMesh, between: Placement) -> None:
    """Embedding and head by vocabulary, where this pipeline stage has them; the head returns a part of the logits."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()

    def part(whole: Tensor) -> nn.Parameter:
        return nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)], src_data_rank=None))

    tables: dict[int, nn.Parameter] = {}
    for module in (embedding, head):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in tables:  # tied: the same table twice
                tables[id(parameter)] = part(parameter)
            module._parameters[name] = tables[id(parameter)]
    if isinstance(embedding, nn.Embedding):
        embedding.forward = partial(_embed, embedding, mesh, between)  # type: ignore[method-assign]
    if isinstance(head, nn.Linear):
        compute_locally(head, 1)
        head.register_forward_pre_hook(lambda _, args: (enter(args[0], mesh, Replicate()), *args[1:]))
        if not isinstance(between, Replicate):
            # Loss tokens are picked out of the whole sequence; each rank keeps the gradient of its own tokens.
            norm = _last_norm(model)
            norm.register_forward_hook(lambda _, __, output: _whole(output, mesh, between, Replicate()))


def _last_norm(model: PreTrainedModel) -> nn.Module:
    """What makes the last hidden state: the module that the pipeline plan names last."""
    return model.base_model.get_submodule(list(model.config.base_model_pp_plan)[-1])


def _embed(embedding: nn.Embedding, mesh: DeviceMesh, between: Placement, ids: Tensor) -> Tensor:
    table = embedding.weight
    assert isinstance(table, DTensor), "split by vocabulary"
    weight = table.to_local()
    start = mesh.get_local_rank() * weight.shape[0]
    own = ids - start
    is_own = (own >= 0) & (own < weight.shape[0])
    padding = embedding.padding_idx  # its row gets no gradient
    if padding is not None:
        padding = padding - start if 0 <= padding - start < weight.shape[0] else None
    rows = nn.functional.embedding(own.where(is_own, 0), weight, padding) * is_own[..., None].to(weight.dtype)
    return leave(rows, mesh, between)


def vocabulary_scores(mesh: DeviceMesh) -> Callable[[Tensor, Tensor, float, bool], TokenScores]:
    """`plait.roles.model.reduce_logits` for logits of which each rank of `mesh` has its part of the vocabulary."""
    return partial(_reduce_parts, mesh)


def _reduce_parts(
    mesh: DeviceMesh, logits_rv: Tensor, targets_r: Tensor, temperature: float, entropy_needs_grad: bool
) -> TokenScores:
    """Two all-reduces over tp: of the largest logit, and of three sums per token.

    With z = logits / temperature - max, Z = sum e^z: log p(target) = z_target - log Z; entropy = log Z - sum e^z z / Z.
    """
    scaled_rv = logits_rv.float() / temperature
    largest_r = scaled_rv.detach().amax(-1)
    dist.all_reduce(largest_r, dist.ReduceOp.MAX, group=mesh.get_group())
    shifted_rv = scaled_rv - largest_r[:, None]
    powers_rv = shifted_rv.exp()
    own_r = targets_r - mesh.get_local_rank() * logits_rv.shape[-1]
    is_own_r = (own_r >= 0) & (own_r < logits_rv.shape[-1])
    target_r = shifted_rv.gather(-1, own_r.where(is_own_r, 0)[:, None])[:, 0].where(is_own_r, 0)
    with torch.set_grad_enabled(entropy_needs_grad and torch.is_grad_enabled()):
        weighted_r = (powers_rv * shifted_rv).sum(-1)
    parts = torch.stack([target_r, powers_rv.sum(-1), weighted_r])
    target_r, sum_r, weighted_r = leave(parts, mesh, Replicate())
    logprobs_r = target_r - sum_r.log()
    with torch.set_grad_enabled(entropy_needs_grad and torch.is_grad_enabled()):
        entropy_r = sum_r.log() - weighted_r / sum_r
    return TokenScores(logprobs_r, entropy_r)
