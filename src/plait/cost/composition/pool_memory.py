"""Memory of a pool's devices over a step: what stays, and what a stage needs while it runs. Torch-free."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from plait.cost.arithmetic import Number
from plait.cost.composition.flow import largest
from plait.cost.stage_estimate import StageEstimate
from plait.stages.graph import StepGraph

STATE_TERMS = ("parameters", "optimizer")
"""Terms of `StageEstimate.memory` that stay on the devices after the stage: gradients are freed with the update."""

OTHER_STATE = "other_state"
"""Term of an estimate that already knows what else stays on its devices; here that is worked out for the whole step."""

SHADOW = "shadow_copy"


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of each device of a pool while one stage runs (or None does), by term: "policy parameters", "logits" ..."""

    stage: str | None
    memory: Mapping[str, Number]

    @property
    def total_bytes(self) -> Number:
        """All terms."""
        return sum(self.memory.values(), start=0)


def state_names(graph: StepGraph, layouts: Mapping[str, object] | None = None) -> dict[str, str]:
    """Stage -> the name of the weights it works on; stages with the same name share one copy on a pool.

    The first role's name; for generation "engine", unless its layout is that of a stage that trains the same role.
    """
    names: dict[str, str] = {}
    for stage in graph.stages:
        if not stage.roles or stage.kind in ("host", "transfer"):
            continue
        role = stage.roles[0]
        names[stage.name] = role
        if stage.kind == "generation" and layouts is not None:
            others = [s.name for s in graph.stages if s.kind == "training" and role in s.roles]
            if others and all(layouts[stage.name] != layouts[other] for other in others):
                names[stage.name] = "engine"
    return names


def pool_memory(
    pool: str,
    graph: StepGraph,
    estimates: Mapping[str, StageEstimate],
    pools: Mapping[str, tuple[str, ...]],
    *,
    states: Mapping[str, str],
    offloaded: Iterable[str] = (),
    max_staleness: int = 0,
) -> tuple[Held, ...]:
    """What each device of a pool holds while no stage runs, then while each of its stages does, in the graph's order.

    States stay for the whole step, as large as the stage that needs most of each term; offloaded ones are there only
    for the stages that use them (an engine beside a trainer gives back its copy). With max_staleness the engine keeps a
    shadow copy: new weights arrive beside those that still generate.
    """
    held = [stage for stage in graph.stages if pool in pools[stage.name]]
    away = frozenset(offloaded)
    state: dict[str, dict[str, list[Number]]] = {}
    for stage in held:
        for term, size in estimates[stage.name].memory.items():
            if stage.name in states and term in STATE_TERMS:
                state.setdefault(states[stage.name], {}).setdefault(term, []).append(size)
    sizes = {name: {term: largest(of) for term, of in terms.items()} for name, terms in state.items()}
    always = {f"{n} {term}": size for n, terms in sizes.items() if n not in away for term, size in terms.items()}
    if max_staleness > 0:
        generating = [stage.name for stage in held if stage.kind == "generation"]
        copies = [estimates[name].memory["parameters"] for name in generating if "parameters" in estimates[name].memory]
        always |= {SHADOW: largest(copies)} if copies else {}
    found = [Held(None, always)]
    for stage in held:
        memory = dict(always)
        own = states.get(stage.name)
        if own in away and own in sizes:
            memory |= {f"{own} {term}": size for term, size in sizes[own].items()}
        for term, size in estimates[stage.name].memory.items():
            is_state = stage.name in states and term in STATE_TERMS
            if not is_state and term != OTHER_STATE:
                memory[term] = size
        found.append(Held(stage.name, memory))
    return tuple(found)
