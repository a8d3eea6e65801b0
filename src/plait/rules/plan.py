"""The parallel plan against the stages of the algorithm."""

from plait.algorithms.settings import step_graph
from plait.config import AlgorithmConfig, BatchConfig, PlanConfig, RunConfig
from plait.errors import Violation
from plait.plan import plan_violations
from plait.rules.batch import counts

_TWO_UPDATES = BatchConfig(num_prompts_per_step=2, num_samples_per_prompt=2, num_sequences_per_minibatch=2)
"""Stands in for a batch that cannot be: with two updates every stage of the algorithm takes part."""


def one_process(algorithm: AlgorithmConfig, plan: PlanConfig, batch: BatchConfig | None = None) -> list[Violation]:
    is_countable = batch is not None and counts(batch).num_updates_per_step > 0
    usable = batch if is_countable else _TWO_UPDATES
    part = RunConfig.model_construct(algorithm=algorithm, plan=plan, batch=usable)
    return plan_violations(part, step_graph(part))
