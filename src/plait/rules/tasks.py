"""Tasks: their names, parameters and files."""

import difflib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from plait.config import (
    EvaluationConfig,
    ReasoningGymTask,
    RowsTask,
    SupervisedRowsData,
    TaskConfig,
    WorkedSolutionsData,
)
from plait.data.naming import name_violations, task_name
from plait.data.row_files import SUFFIXES
from plait.errors import Violation

_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_RUN_SETS = {
    "seed": "seed (the run's) or evaluation.seed",
    "size": "train.num_steps and evaluation.num_prompts",
}
"""Parameters of a data set that the run sets, and where a person sets them instead."""


def run_name(name: str) -> Iterator[Violation]:
    if not name.strip() or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        yield Violation(
            "name",
            f'"{name}" cannot be the name of a folder, and results go to runs/<name>',
            "Choose another name",
        )


def reasoning_gym_tasks(tasks: tuple[TaskConfig, ...]) -> Iterator[Violation]:
    from plait.data.catalogue import known_tasks, suggest

    known = known_tasks()
    for index, task in enumerate(tasks):
        if not isinstance(task, ReasoningGymTask):
            continue
        where = f"tasks.{index}"
        if task.task not in known:
            near = suggest(task.task)
            change = f"Did you mean {' or '.join(near)}?" if near else "See the list in reasoning-gym's GALLERY.md"
            yield Violation(f"{where}.task", f'reasoning-gym has no data set "{task.task}"', change)
            continue
        names = list(known[task.task]["params"])
        for name in task.params:
            if name in _RUN_SETS:
                rule = f"the run sets {name} of a data set itself"
                yield Violation(f"{where}.params.{name}", rule, f"Take it out; use {_RUN_SETS[name]}")
            elif name not in names:
                near = difflib.get_close_matches(name, names, 1, 0.6)
                change = f"Did you mean {near[0]}?" if near else f"Parameters: {', '.join(names)}"
                yield Violation(f"{where}.params.{name}", f"{task.task} has no parameter {name}", change)


def _file_violations(where: str, path: str) -> Iterator[Violation]:
    file = Path(path)
    if not file.is_file():
        what = "it is a folder" if file.is_dir() else "there is no such file"
        near = []
        if file.parent.is_dir():
            names = [entry.name for entry in file.parent.iterdir() if entry.suffix.lower() in SUFFIXES]
            near = difflib.get_close_matches(file.name, names, 1, 0.6)
        hint = f"Did you mean {near[0]}?" if near else "Give the path of a .jsonl or .parquet file"
        yield Violation(where, f"{what}: {path}", hint)
    elif file.suffix.lower() not in SUFFIXES:
        rule = f'"{file.name}" ends in "{file.suffix}", expected .jsonl or .parquet'
        yield Violation(where, rule, "Write one JSON object per line into a .jsonl file")
    elif file.stat().st_size == 0:
        yield Violation(where, f"{path} is empty", "Give a file with at least one row")
    elif file.suffix.lower() == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        yield Violation(where, "reading Parquet needs pyarrow", "Run pip install 'plait[parquet]', or use JSONL")


def row_files(tasks: tuple[TaskConfig, ...]) -> Iterator[Violation]:
    for index, task in enumerate(tasks):
        if isinstance(task, RowsTask):
            yield from _file_violations(f"tasks.{index}.path", task.path)
            if task.eval_path:
                yield from _file_violations(f"tasks.{index}.eval_path", task.eval_path)
            elif task.holdout_share == 1:
                rule = "with holdout_share 1 every row is held out and none is left to train on"
                yield Violation(f"tasks.{index}.holdout_share", rule, "Set it below 1 (0.1 is usual)")


def verifiers(tasks: tuple[TaskConfig, ...]) -> Iterator[Violation]:
    named = [(i, task.verifier) for i, task in enumerate(tasks) if isinstance(task, RowsTask)]
    if not named:
        return
    from plait.rewards.builtin import ROW_VERIFIERS

    for index, verifier in named:
        if verifier not in ROW_VERIFIERS and not _FUNCTION.fullmatch(verifier):
            near = difflib.get_close_matches(verifier, ROW_VERIFIERS, 1, 0.5)
            hint = f'Did you mean "{near[0]}"? ' if near else ""
            yield Violation(
                f"tasks.{index}.verifier",
                f'there is no verifier "{verifier}"',
                f'{hint}Known: {", ".join(ROW_VERIFIERS)}; or your own as "module:function"',
            )


def names(tasks: tuple[TaskConfig, ...]) -> list[Violation]:
    return name_violations(tasks)


def evaluation_covers_tasks(tasks: tuple[TaskConfig, ...], evaluation: EvaluationConfig) -> Iterator[Violation]:
    if evaluation.num_prompts < len(tasks):
        yield Violation(
            "evaluation.num_prompts",
            f"{evaluation.num_prompts} prompts cannot cover {len(tasks)} tasks",
            f"Set it to {len(tasks)} or more",
        )


def nothing_held_out(tasks: tuple[TaskConfig, ...], evaluation: EvaluationConfig) -> Iterator[Violation]:
    for index, task in enumerate(tasks):
        if isinstance(task, RowsTask) and not task.eval_path and task.holdout_share == 0 and evaluation.takes_place:
            yield Violation(
                f"tasks.{index}.holdout_share",
                f'no row of "{task_name(task)}" is held out, so it is not evaluated',
                "Set it above 0 (0.1 is usual), or name a file in eval_path",
            )


def eval_path_wins(tasks: tuple[TaskConfig, ...]) -> Iterator[Violation]:
    for index, task in enumerate(tasks):
        if isinstance(task, RowsTask) and task.eval_path and "holdout_share" in task.model_fields_set:
            rule = "eval_path names the held-out rows, so holdout_share changes nothing"
            yield Violation(f"tasks.{index}.holdout_share", rule, "Take one of them out")


def worked_solutions_need_tasks(
    data: WorkedSolutionsData | SupervisedRowsData, tasks: tuple[ReasoningGymTask, ...]
) -> Iterator[Violation]:
    if not isinstance(data, WorkedSolutionsData):
        return
    if not tasks:
        yield Violation("tasks", "worked solutions are made from tasks, and there is none", "Add [[tasks]]")
    from plait.data.worked_solutions import STEPS

    for index, task in enumerate(tasks):
        if task.task not in STEPS:
            yield Violation(
                f"tasks.{index}.task",
                f'there are no worked solutions for "{task.task}"',
                f"There are some for {', '.join(sorted(STEPS))}",
            )


def supervised_file(data: WorkedSolutionsData | SupervisedRowsData) -> Iterator[Violation]:
    if isinstance(data, SupervisedRowsData):
        yield from _file_violations("data.path", data.path)
