"""The parallel plan against the stages of the algorithm and the model."""

from collections.abc import Iterator
from importlib.util import find_spec

from plait.algorithms.settings import step_graph
from plait.config import (
    AlgorithmConfig,
    BatchConfig,
    ModelConfig,
    PlanConfig,
    RewardModelConfig,
    RolloutConfig,
    RunConfig,
)
from plait.cost.model_config import model_spec
from plait.cost.spec_tensors import SpecShape
from plait.errors import ConfigError, Violation
from plait.models.folder import ModelFolderError, model_folder, read_json
from plait.parallel.layout_rules import layout_violations
from plait.plan import is_on_ray, layout_fields, plan_violations
from plait.rules.batch import counts

_TWO_UPDATES = BatchConfig(num_prompts_per_step=2, num_samples_per_prompt=2, num_sequences_per_minibatch=2)
"""Stands in for a batch that cannot be: with two updates every stage of the algorithm takes part."""


def pools_and_layouts(
    algorithm: AlgorithmConfig, plan: PlanConfig, batch: BatchConfig | None = None
) -> list[Violation]:
    is_countable = batch is not None and counts(batch).num_updates_per_step > 0
    usable = batch if is_countable else _TWO_UPDATES
    part = RunConfig.model_construct(algorithm=algorithm, plan=plan, batch=usable)
    return plan_violations(part, step_graph(part))


def layouts_fit_model(model: ModelConfig, plan: PlanConfig) -> Iterator[Violation]:
    """Heads, layers and experts that a layout must divide."""
    try:
        shape = SpecShape(model_spec(read_json(model_folder(model.path) / "config.json")))
    except (ModelFolderError, ConfigError):
        return  # reported by model_folder_is_readable, or of an architecture that the cost model does not know
    for name, written in plan.layout.items():
        try:
            fields = layout_fields(written)
        except ValueError:
            continue  # reported by pools_and_layouts
        for broken in layout_violations(fields, shape):
            if broken not in layout_violations(fields):
                yield Violation(f"plan.layout.{name}.{broken.where}", broken.rule, broken.change)


def ray_is_there(plan: PlanConfig) -> Iterator[Violation]:
    """Ranks of more than one process are actors on Ray, which is an extra."""
    if is_on_ray(plan) and find_spec("ray") is None:
        rule = f"the plan has {sum(plan.pools.values())} ranks on Ray, and Ray is not installed"
        yield Violation("plan.runtime", rule, 'Install it: pip install "plait[ray]"')


def roles_on_ranks(
    algorithm: AlgorithmConfig,
    plan: PlanConfig,
    rollout: RolloutConfig,
    reward_models: tuple[RewardModelConfig, ...] = (),
) -> Iterator[Violation]:
    """What only one process can do so far."""
    if not is_on_ray(plan):
        return
    change = "Take it out, or run in one process (leave [plan] out)"
    if algorithm.critic.kind == "shared_trunk":
        rule = "a trunk shared by policy and critic runs in one process only, and the plan has ranks on Ray"
        yield Violation("algorithm.critic.kind", rule, 'Set it to "independent", or leave [plan] out')
    if algorithm.has_pairs:
        rule = "losses on pairs run in one process only, and the plan has ranks on Ray"
        yield Violation("algorithm.pairwise_loss", rule, "Leave [plan] out")
    if reward_models:
        yield Violation("reward_models", "reward models run in one process only, and the plan has ranks on Ray", change)
    if rollout.record_experts:
        rule = "recorded experts are not used by ranks, and the plan has ranks on Ray"
        yield Violation("rollout.record_experts", rule, change)
