"""`plait algorithms`: named algorithms by factors, and one as a parallelism-annotated specification. Torch-free."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from plait.algorithm_config import AlgorithmConfig
from plait.algorithms.named import NamedAlgorithm, algorithm_names, is_known, named_algorithm
from plait.algorithms.settings import step_graph
from plait.config import BatchConfig, RunConfig
from plait.errors import ConfigError
from plait.recipe_errors import unknown_algorithm
from plait.stages.graph import Stage, StepGraph

if TYPE_CHECKING:
    from rich.console import RenderableType

GENERAL = "general default"
_DATA_AXES = frozenset({"samples", "groups", "dp"})


@dataclass(frozen=True, slots=True)
class Loop:
    """over: what it runs through, in words. is_parallel: whether its turns are independent. axes: what may split it."""

    over: str
    is_parallel: bool
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage with the loops around it, outermost first.

    level: the longest chain of stages before it; stages of one level are parallel siblings. after: its direct
    predecessors. axes: what may split one turn of the innermost loop. why: see `plait.stages.graph.Stage`.
    """

    name: str
    roles: tuple[str, ...]
    kind: str
    level: int
    after: tuple[str, ...]
    loops: tuple[Loop, ...]
    axes: tuple[str, ...]
    granularity: str
    repeat: int
    why: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of [algorithm] by dotted key. source: where the value is from; GENERAL if the file is silent."""

    key: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Specification:
    """What `plait algorithms NAME` says."""

    name: str
    title: str
    paper: str
    summary: str
    stages: tuple[StageSpec, ...]
    settings: tuple[Setting, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def render(self) -> "RenderableType":
        from plait.jobs.algorithms_report import render_specification

        return render_specification(self)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What `plait algorithms` says: each algorithm with its factors, by heading."""

    rows: tuple[dict[str, str], ...]

    def to_dict(self) -> list[dict[str, str]]:
        return list(self.rows)

    def render(self) -> "RenderableType":
        from plait.jobs.algorithms_report import render_catalogue

        return render_catalogue(self)


def catalogue() -> Catalogue:
    """Every named algorithm by its factors."""
    return Catalogue(tuple(_row(named_algorithm(name)) for name in algorithm_names()))


def specification(name: str) -> Specification:
    """One algorithm, by name or by the path of its file. Raises ConfigError where there is none."""
    if not is_known(name):
        raise ConfigError([unknown_algorithm("algorithm", name, list(algorithm_names()))])
    named = named_algorithm(name)
    config = AlgorithmConfig(name=name)
    return Specification(
        name=named.name,
        title=named.title,
        paper=named.paper,
        summary=named.summary,
        stages=tuple(stage_specs(_graph(config))),
        settings=tuple(
            Setting(key, value, named.sources.get(key, GENERAL))
            for key, value in _flat(config.model_dump(mode="json"), "")
            if key != "name"
        ),
    )


def _graph(algorithm: AlgorithmConfig) -> StepGraph:
    """The graph under a batch of several updates, so that every stage takes part that may; REINFORCE has one."""
    minibatch = 0 if algorithm.policy_loss == "reinforce" else 2
    batch = BatchConfig(num_prompts_per_step=2, num_samples_per_prompt=2, num_sequences_per_minibatch=minibatch)
    return step_graph(RunConfig.model_construct(algorithm=algorithm, batch=batch))


def _row(named: NamedAlgorithm) -> dict[str, str]:
    config = AlgorithmConfig(name=named.name)
    kl = f"{config.kl_coefficient:g} {config.kl_estimator} in {config.kl_in}" if config.has_kl else "-"
    clip = "-" if config.policy_loss == "reinforce" else f"{config.clip_low:g} / {config.clip_high:g}"
    extras = [
        *(["dynamic sampling"] if config.dynamic_sampling.enabled else []),
        *(["overlong penalty"] if config.shaping.overlong_buffer_share else []),
        *(["whitening"] if config.whitening else []),
        *(["length-adaptive lambda"] if config.returns.length_adaptive_alpha else []),
        *(["positive NLL"] if config.positive_nll_coefficient else []),
        *([f"{config.critic.pretraining_steps} steps critic only"] if config.critic.pretraining_steps else []),
    ]
    if config.has_pairs:
        factors = {
            "baseline": f"pairs of {config.pairwise.origin}",
            "scale": "none",
            "returns": "-",
            "policy loss": f"{config.pairwise_loss}, beta {config.pairwise.beta:g}",
            "clip low / high": "-",
            "reduction": "mean over pairs",
        }
    else:
        factors = {
            "baseline": config.baseline,
            "scale": config.scale,
            "returns": config.returns.estimator,
            "policy loss": config.policy_loss,
            "clip low / high": clip,
            "reduction": config.reduction,
        }
    return {
        "name": named.name,
        **factors,
        "KL": kl,
        "critic": config.critic.kind if config.has_critic else "-",
        "besides": ", ".join(extras) or "-",
        "paper": named.paper,
    }


def stage_specs(graph: StepGraph) -> Iterator[StageSpec]:
    """Every stage of a graph with its loops, in the order of their levels."""
    for level, stages in enumerate(graph.levels()):
        for stage in stages:
            yield StageSpec(
                name=stage.name,
                roles=stage.roles,
                kind=stage.kind,
                level=level,
                after=tuple(sorted(graph.predecessors[stage.name])),
                loops=tuple(_loops(stage)),
                axes=tuple(sorted(stage.axes - _DATA_AXES)),
                granularity=stage.granularity,
                repeat=stage.repeat,
                why="" if _has_rounds(stage) else stage.why,
                reads=tuple(sorted(stage.reads)),
                writes=tuple(sorted(stage.writes)),
            )


def _has_rounds(stage: Stage) -> bool:
    """Whether its repeats are rounds of sampling; its reason is then that of the rounds."""
    return stage.granularity == "sample" and stage.repeat > 1


def _loops(stage: Stage) -> Iterator[Loop]:
    data_axes = tuple(sorted(stage.axes & _DATA_AXES))
    if stage.kind == "training":
        # Each update reads the weights that the one before wrote.
        yield Loop("epochs x minibatches of the step", False, ())
        yield Loop(f"{'pairs' if 'groups' in stage.axes else 'samples'} of the minibatch", True, data_axes)
    elif stage.granularity == "sample":
        if _has_rounds(stage):
            yield Loop(f"{stage.repeat} rounds ({stage.why})", False, ())
        yield Loop("samples of the step", True, data_axes)
    elif stage.granularity == "group":
        yield Loop("groups of the step", True, data_axes)


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
