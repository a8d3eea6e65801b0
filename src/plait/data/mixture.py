"""Several tasks as one numbered stream of prompts."""

from array import array
from collections.abc import Sequence

from plait.batch import Prompt
from plait.data.task import (
    Task,
    TaskReport,
    exact_shares,
    furthest_behind,
    split_counts,
    stable_hash,
)
from plait.errors import ConfigError, Violation


class Mixture:
    """Assigns prompt number n to a task and an index in it, so that n is the whole data cursor of a run.

    Each number goes to the task that is furthest behind its share (exact integers, no random draws), so
    the counts of every stretch of numbers follow the weights closely: after n prompts no count differs
    from n times its share by as much as the number of tasks.
    weights: one per task, relative. seed: decides between tasks that are equally far behind.
    """

    def __init__(self, tasks: Sequence[Task], weights: Sequence[float], seed: int):
        assert len(tasks) == len(weights) > 0, f"{len(tasks)} tasks, {len(weights)} weights"
        self.tasks = tuple(tasks)
        self.weights = tuple(weights)
        self._shares = exact_shares(weights)
        self._order = sorted(range(len(tasks)), key=lambda i: stable_hash(seed, tasks[i].name))
        self._counts = [0] * len(tasks)
        self._task_of = array("H")
        self._index_of = array("Q")

    def position(self, n: int) -> tuple[int, int]:
        """Task number and index in that task of prompt number n >= 0."""
        if n < 0:
            raise ValueError(f"prompt number {n}: expected 0 or more")
        while len(self._task_of) <= n:
            self._assign_next()
        return self._task_of[n], self._index_of[n]

    def _assign_next(self) -> None:
        chosen = furthest_behind(self._shares, self._counts, self._order)
        self._task_of.append(chosen)
        self._index_of.append(self._counts[chosen])
        self._counts[chosen] += 1

    def prompt(self, n: int) -> Prompt:
        """Training prompt number n >= 0. ConfigError if its task has none left for training."""
        task, index = self.position(n)
        return self.tasks[task].train_prompt(index)

    def eval_prompts(self, num: int) -> list[Prompt]:
        """About `num` held-out prompts, split by the weights, at least one per task, fewer where a task has fewer."""
        counts = split_counts(num, self.weights)
        return [p for task, count in zip(self.tasks, counts, strict=True) for p in task.eval_prompts(count)]

    def reports(self) -> list[TaskReport]:
        """What loading found, per task, with what was left out so far."""
        return [task.report for task in self.tasks]

    def check_trainable(self) -> None:
        """Raise ConfigError naming every task without a training prompt. For jobs that train, before they start."""
        violations = [
            Violation(
                f'task "{task.name}"',
                f"no row is left for training: {task.report.rows} rows, {task.report.eval_rows} held out, "
                f"{task.report.dropped_overlap} left out because their prompts are held out",
                "Lower `holdout_share`, or give training rows that are not in `eval_path`",
            )
            for task in self.tasks
            if task.num_train == 0
        ]
        if violations:
            raise ConfigError(violations)
        for task in self.tasks:
            task.train_prompt(0)
