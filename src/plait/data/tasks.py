"""Building the run's task mixture from its settings."""

from collections.abc import Sequence
from pathlib import Path

from plait.config import EvaluationConfig, ReasoningGymTask, TaskConfig
from plait.data.mixture import Mixture
from plait.data.naming import name_violations
from plait.data.reasoning_gym_task import GymTask
from plait.data.rows import RowTask
from plait.data.task import Task, TaskReport, split_counts
from plait.errors import ConfigError, DataError

__all__ = ["Mixture", "Task", "TaskReport", "build_tasks"]


def merged(errors: Sequence[ConfigError]) -> ConfigError:
    """One error with all violations; a DataError if all of them are."""
    kind = DataError if all(isinstance(error, DataError) for error in errors) else ConfigError
    return kind([violation for error in errors for violation in error.violations])


def build_tasks(
    configs: Sequence[TaskConfig], *, run_seed: int, eval_config: EvaluationConfig, recipe_dir: Path
) -> Mixture:
    """Load all tasks and hold out the evaluation prompts of each from the training of all.

    recipe_dir: folder that relative paths and "module:function" verifiers start from.
    Raises ConfigError (DataError where only rows are at fault) with the violations of all tasks.
    """
    violations = name_violations(configs)
    if violations:
        raise ConfigError(violations)
    counts = split_counts(eval_config.num_prompts, [config.weight for config in configs])
    tasks: list[Task] = []
    errors: list[ConfigError] = []
    for config, num_held_out in zip(configs, counts, strict=True):
        try:
            tasks.append(_build(config, run_seed, eval_config, num_held_out, recipe_dir))
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise merged(errors)
    held_out = frozenset[str]().union(*(task.held_out for task in tasks))
    for task in tasks:
        task.exclude(held_out)
    return Mixture(tasks, [config.weight for config in configs], run_seed)


def _build(
    config: TaskConfig, run_seed: int, evaluation: EvaluationConfig, num_held_out: int, recipe_dir: Path
) -> Task:
    if isinstance(config, ReasoningGymTask):
        return GymTask(config, run_seed=run_seed, eval_seed=evaluation.seed, num_held_out=num_held_out)
    return RowTask(
        config,
        run_seed=run_seed,
        eval_seed=evaluation.seed,
        recipe_dir=recipe_dir,
        is_evaluated=evaluation.takes_place,
    )
