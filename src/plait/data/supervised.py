"""Rows for supervised warm-up: the tasks' own worked solutions, or a user's prompts and completions."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from plait.batch import Message, Prompt
from plait.config import SftConfig, SupervisedRowsData, WorkedSolutionsData
from plait.data.mixture import Mixture
from plait.data.row_files import read_rows
from plait.data.stream import stream_seed
from plait.data.worked_solutions import completion
from plait.errors import DataError


@dataclass(frozen=True, slots=True)
class SupervisedRow:
    """A prompt and what the assistant should answer, without the end token."""

    prompt: Prompt
    completion: str


class WorkedRows:
    """Unlimited rows from procedural tasks; whether a row shows its steps is decided by its number and the seed."""

    def __init__(self, mixture: Mixture, data: WorkedSolutionsData, seed: int):
        self._mixture, self._share, self._seed = mixture, data.reasoning_share, seed

    def row(self, number: int) -> SupervisedRow:
        prompt = self._mixture.prompt(number)
        shows_steps = stream_seed(self._seed, "reason", number) < self._share * 2**63
        payload = prompt.payload
        return SupervisedRow(prompt, completion(payload["entry"], payload["dataset"], shows_steps))


class FileRows:
    """A user's rows, in a new order at each pass, decided by the seed."""

    def __init__(self, rows: list[SupervisedRow], seed: int):
        self._rows, self._seed = rows, seed
        self._epoch, self._order = -1, np.arange(len(rows))

    def row(self, number: int) -> SupervisedRow:
        epoch, place = divmod(number, len(self._rows))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self._seed, epoch]).permutation(len(self._rows))
        return self._rows[self._order[place]]


def supervised_rows(config: SftConfig, mixture: Mixture | None) -> WorkedRows | FileRows:
    """The rows of a recipe; mixture: its tasks, for worked solutions."""
    if isinstance(config.data, WorkedSolutionsData):
        assert mixture is not None, "worked solutions come from tasks"
        return WorkedRows(mixture, config.data, config.seed)
    return FileRows(load_rows(config.data), config.seed)


def load_rows(data: SupervisedRowsData) -> list[SupervisedRow]:
    """Read and check every row of a file; all bad rows are reported at once."""
    path = Path(data.path)
    rows, problems = [], []
    for raw in read_rows(path):
        problem = raw.problem if raw.fields is None else _problem(raw.fields)
        if problem is None and raw.fields is not None:
            rows.append(SupervisedRow(_prompt(raw.fields, path, raw.index), raw.fields["completion"]))
        else:
            problems.append(f"{raw.where}: {problem}")
    if problems:
        shown = "\n".join(problems[:20])
        raise DataError(f"{shown}\n{len(problems)} of {len(problems) + len(rows)} rows cannot be used; correct them")
    return rows


def _problem(record: dict[str, Any]) -> str | None:
    if "completion" not in record:
        return f"field completion is missing; it has {', '.join(sorted(record))}"
    if not isinstance(record["completion"], str) or not record["completion"].strip():
        return f"completion is {record['completion']!r}, expected text that is not blank"
    if ("prompt" in record) == ("messages" in record):
        return "expected exactly one of the fields prompt and messages"
    if "prompt" in record:
        text = record["prompt"]
        return (
            None if isinstance(text, str) and text.strip() else f"prompt is {text!r}, expected text that is not blank"
        )
    return next(_message_problems(record["messages"]), None)


def _message_problems(messages: Any) -> Iterator[str]:
    if not isinstance(messages, list) or not messages:
        yield f"messages is {messages!r}, expected a list of objects with role and content"
        return
    for place, message in enumerate(messages):
        is_object = isinstance(message, dict) and message.keys() >= {"role", "content"}
        if (
            not is_object
            or not isinstance(message["content"], str)
            or message["role"] not in ("system", "user", "assistant")
        ):
            yield f"message {place} is {message!r}, expected role system, user or assistant and content as text"


def _prompt(record: dict[str, Any], path: Path, number: int) -> Prompt:
    if "prompt" in record:
        messages: tuple[Message, ...] = (Message("user", record["prompt"]),)
    else:
        messages = tuple(Message(m["role"], m["content"]) for m in record["messages"])
    return Prompt(f"{path.stem}/{number}", path.stem, messages, None, "none")
