"""Model structure: an independent critic, a critic that shares the policy's trunk, no critic at all. Torch-free.

A shared trunk is the only strategy that lowers work (arXiv 2608.27046, table 9): the critic's passes ride on the
policy's and cost one output per token. Graph and estimates change together, so that whatever composes them sees one
step that can run.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

from plait.cost import operators as op
from plait.cost.arithmetic import Number
from plait.cost.operators import Cost
from plait.cost.stage_estimate import StageEstimate
from plait.stages.graph import Stage, StepGraph

Sharing = Literal["independent", "shared_trunk", "critic_free"]

CRITIC_STAGES = ("value", "update_critic")


def scalar_head(num_tokens: Number, hidden_size: Number, b: Number, *, is_training: bool) -> Cost:
    """The critic's own part under a shared trunk: 2 D per token forward, twice that backward."""
    cost = op.linear(num_tokens, hidden_size, 1, b)
    if is_training:
        cost += op.linear_input_gradient(num_tokens, hidden_size, 1, b)
        cost += op.linear_weight_gradient(num_tokens, hidden_size, 1, b).off_path()
    return cost


def without_stages(graph: StepGraph, names: Iterable[str]) -> StepGraph:
    """The graph without these stages; what they wrote is read by nobody any more (critic-free: no values)."""
    dropped = frozenset(names)
    gone = frozenset(datum for stage in graph.stages if stage.name in dropped for datum in stage.writes)
    stages = [replace(stage, reads=stage.reads - gone) for stage in graph.stages if stage.name not in dropped]
    return StepGraph(stages, inputs=graph.inputs, outputs=graph.outputs - gone)


def merged_stages(graph: StepGraph, kept: str, absorbed: str) -> StepGraph:
    """The graph with one stage doing the work of two: it reads and writes what both did."""
    one, other = graph[kept], graph[absorbed]
    both = Stage(
        name=kept,
        roles=tuple(dict.fromkeys((*one.roles, *other.roles))),
        kind=one.kind,
        reads=(one.reads | other.reads) - one.writes - other.writes,
        writes=one.writes | other.writes,
        granularity=one.granularity,
        repeat=one.repeat,
        axes=one.axes & other.axes,
    )
    rest = [stage for stage in graph.stages if stage.name not in (kept, absorbed)]
    return StepGraph([*rest, both], inputs=graph.inputs, outputs=graph.outputs)


def with_head(policy: StageEstimate, head: Cost, *, name: str | None = None) -> StageEstimate:
    """A policy's pass that gives values too: work and bytes of the head are added, it runs beside the policy's own.

    Time grows as work does; memory does not change by more than the head's D parameters.
    """
    growth = (policy.work_op + head.work) / policy.work_op
    return replace(
        policy,
        name=name or policy.name,
        work_op=policy.work_op + head.work,
        flop=policy.flop + head.flop,
        hbm_bytes=policy.hbm_bytes + head.hbm_bytes / policy.num_devices,
        time_s=policy.time_s * growth,
        low_s=policy.low_s * growth,
        high_s=policy.high_s * growth,
        terms_s={cause: seconds * growth for cause, seconds in policy.terms_s.items()},
    )


def share(
    sharing: Sharing,
    graph: StepGraph,
    estimates: Mapping[str, StageEstimate],
    *,
    heads: Mapping[str, Cost] | None = None,
) -> tuple[StepGraph, dict[str, StageEstimate]]:
    """A step with an independent critic, changed to the given structure.

    critic_free drops the critic's stages. shared_trunk: heads holds the cost of the scalar head for "value" and
    "update_critic" (`scalar_head`). update_critic becomes part of update_policy, value part of old_logprob; without
    old_logprob the value pass stays, on the policy's weights.
    """
    here = [name for name in CRITIC_STAGES if name in graph]
    if sharing == "critic_free":
        return without_stages(graph, here), {n: e for n, e in estimates.items() if n not in here}
    if sharing == "independent":
        return graph, dict(estimates)
    assert heads is not None, "a shared trunk needs the cost of its scalar head"
    changed = dict(estimates)
    for absorbed, kept in (("value", "old_logprob"), ("update_critic", "update_policy")):
        if absorbed in graph and kept in graph:
            graph = merged_stages(graph, kept, absorbed)
            changed[kept] = with_head(changed[kept], heads[absorbed])
            del changed[absorbed]
    if "value" in graph:
        stages = [replace(s, roles=("policy", *s.roles)) if s.name == "value" else s for s in graph.stages]
        graph = StepGraph(stages, inputs=graph.inputs, outputs=graph.outputs)
    return graph, changed
