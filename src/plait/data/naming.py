"""Names of tasks: what metrics, samples and prompt ids call them. Torch-free."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from plait.config import ReasoningGymTask, TaskConfig
from plait.errors import Violation


def task_name(task: TaskConfig) -> str:
    """The name given, or that of the data set, or the stem of the file."""
    if task.name:
        return task.name
    return task.task if isinstance(task, ReasoningGymTask) else Path(task.path).stem


def name_violations(tasks: Sequence[TaskConfig]) -> list[Violation]:
    """Names must differ, so that metrics are not mixed, and must not hold what separates the parts of an id."""
    found = []
    names = [task_name(task) for task in tasks]
    for name, count in Counter(names).items():
        if count > 1:
            places = [str(i) for i, other in enumerate(names) if other == name]
            found.append(
                Violation(
                    f"tasks.{places[1]}.name",
                    f'tasks {" and ".join(places)} are both named "{name}", so their metrics would be mixed',
                    f'Give them different names, for example name = "{name}_2"',
                )
            )
    for index, name in enumerate(names):
        if not name.strip() or any(mark in name for mark in "/@"):
            rule = f'the name "{name}" is empty or holds "/" or "@"'
            found.append(Violation(f"tasks.{index}.name", rule, "Give it a name of letters, digits, _ and -"))
    return found
