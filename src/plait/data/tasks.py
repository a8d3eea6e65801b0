"""What a task is, and building the run's task mixture from its settings."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plait.batch import Message, Prompt
from plait.config import EvaluationConfig, ReasoningGymTask, TaskConfig
from plait.errors import ConfigError, DataError, Violation


@dataclass(slots=True)
class TaskReport:
    """What loading a task found, and what was left out while it was used.

    rows, train_rows: rows read, and rows left for training; None for generated tasks, which have no end.
    eval_rows: prompts held out. duplicates: rows (or evaluation instances) that repeat an earlier prompt.
    dropped_overlap: training prompts left out because they are evaluation prompts; for generated tasks
        the number of training indices at which that has happened so far.
    dropped_overlong: for the caller, who knows the tokenizer. notes: remarks for the person who runs it.
    """

    name: str
    rows: int | None
    train_rows: int | None
    eval_rows: int
    duplicates: int = 0
    dropped_overlap: int = 0
    dropped_overlong: int = 0
    notes: tuple[str, ...] = ()


class Task(Protocol):
    """One [[tasks]] entry: a stream of training prompts and a fixed set of held-out ones."""

    @property
    def name(self) -> str: ...

    @property
    def num_train(self) -> int | None:
        """Number of different training prompts; None if they are generated without end."""
        ...

    @property
    def report(self) -> TaskReport: ...

    @property
    def held_out(self) -> frozenset[str]:
        """Keys (see `prompt_key`) of its held-out prompts."""
        ...

    def exclude(self, keys: frozenset[str]) -> None:
        """Keep prompts with these keys out of training too: another task holds them out."""
        ...

    def train_prompt(self, index: int) -> Prompt:
        """The training prompt at index >= 0; depends on nothing but the run's seed and the index."""
        ...

    def eval_prompts(self, limit: int) -> list[Prompt]:
        """The first `limit` held-out prompts, or all where there are fewer; a larger limit only adds."""
        ...


def prompt_key(messages: Sequence[Message]) -> str:
    """Identity of a question: its messages up to white space, without a prefilled answer's beginning."""
    return json.dumps([[message.role, " ".join(message.content.split())] for message in messages])


def stable_hash(*parts: str | int) -> int:
    """64 bits that depend on the parts only: not on the process, the platform or the order of calls."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def split_counts(total: int, weights: Sequence[float]) -> list[int]:
    """Split `total` by weights with the largest remainders, at least one each."""
    shares = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i])
    for i in by_remainder[: max(total - sum(counts), 0)]:
        counts[i] += 1
    return [max(count, 1) for count in counts]


def task_name(config: TaskConfig) -> str:
    """Name of a task in metrics, samples and prompt ids."""
    if config.name:
        return config.name
    return config.task if isinstance(config, ReasoningGymTask) else Path(config.path).stem


def check_names(configs: Sequence[TaskConfig]) -> list[Violation]:
    """Task names must differ, and must not contain what separates the parts of a prompt's id."""
    names = [task_name(config) for config in configs]
    violations = []
    for name in sorted({name for name in names if names.count(name) > 1}):
        where = " and ".join(f"tasks[{i}]" for i, other in enumerate(names) if other == name)
        rule = f'{names.count(name)} tasks have the name "{name}"'
        violations.append(Violation(where, rule, "Give each of them its own `name`"))
    for i, name in enumerate(names):
        if not name.strip() or any(char in name for char in "/@"):
            change = "Set a `name` without them, such as letters, digits, _ and -"
            violations.append(Violation(f"tasks[{i}].name", f'"{name}" is empty or contains "/" or "@"', change))
    return violations


def merged(errors: Sequence[ConfigError]) -> ConfigError:
    """One error with all violations; a DataError if all of them are."""
    kind = DataError if all(isinstance(error, DataError) for error in errors) else ConfigError
    return kind([violation for error in errors for violation in error.violations])


def build_tasks(
    configs: Sequence[TaskConfig], *, run_seed: int, eval_config: EvaluationConfig, recipe_dir: Path
) -> "Mixture":
    """Load all tasks and hold out the evaluation prompts of each from the training of all.

    recipe_dir: folder that relative paths and "module:function" verifiers start from.
    Raises ConfigError (DataError where only rows are at fault) with the violations of all tasks.
    """
    violations = check_names(configs)
    if violations:
        raise ConfigError(violations)
    counts = split_counts(eval_config.num_prompts, [config.weight for config in configs])
    tasks: list[Task] = []
    errors: list[ConfigError] = []
    for config, num_held_out in zip(configs, counts, strict=True):
        try:
            tasks.append(_build(config, run_seed, eval_config.seed, num_held_out, recipe_dir))
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise merged(errors)
    held_out = frozenset[str]().union(*(task.held_out for task in tasks))
    for task in tasks:
        task.exclude(held_out)
    return Mixture(tasks, [config.weight for config in configs], run_seed)


def _build(config: TaskConfig, run_seed: int, eval_seed: int, num_held_out: int, recipe_dir: Path) -> Task:
    if isinstance(config, ReasoningGymTask):
        return GymTask(config, run_seed=run_seed, eval_seed=eval_seed, num_held_out=num_held_out)
    return RowTask(config, run_seed=run_seed, eval_seed=eval_seed, recipe_dir=recipe_dir)


# Last, because these files use the definitions above.
from plait.data.mixture import Mixture  # noqa: E402
from plait.data.reasoning_gym_task import GymTask  # noqa: E402
from plait.data.rows import RowTask  # noqa: E402
