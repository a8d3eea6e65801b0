"""A user's rows, from JSONL or Parquet, as a task."""

import difflib
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from plait.batch import Prompt
from plait.config import RowsTask
from plait.data.row_checks import KNOWN_FIELDS, CheckedRow, RowChecker
from plait.data.row_files import read_rows
from plait.data.task import TaskReport, prompt_key, stable_hash
from plait.errors import DataError, Violation
from plait.rewards.verifier import load_row_verifier

MAX_SHOWN = 20
"""Bad rows that an error lists; the total is always given."""


class RowTask:
    """Rows of a file as training prompts, shuffled anew in every epoch, and held-out rows.

    Held out are the rows of `eval_path`, or a share of `path` that depends on each row's prompt only: not
    on the order of the rows, nor on any seed, so a row never changes sides, and equal prompts are together.
    The prompt's payload has the row's fields other than prompt, messages, answer, verifier and id.
    """

    def __init__(self, config: RowsTask, *, run_seed: int, eval_seed: int, recipe_dir: Path, is_evaluated: bool = True):
        """Read and check all rows; DataError lists the bad ones, ConfigError says why the task is unusable.

        is_evaluated: held-out rows will be answered and judged. Rows of preferences need an answer only then.
        """
        self.name = config.name or Path(config.path).stem
        self._run_seed = run_seed
        load_row_verifier(config.verifier, recipe_dir)
        has_preferences = config.source == "preferences"
        checker = RowChecker(
            config.verifier,
            lambda name: load_row_verifier(name, recipe_dir),
            has_preferences=has_preferences,
            is_graded=is_evaluated or not has_preferences,
        )
        train = _load(recipe_dir / config.path, checker)
        evaluation = _load(recipe_dir / config.eval_path, checker) if config.eval_path else []
        if checker.violations:
            raise _data_error(checker.violations, recipe_dir / config.path)
        num_rows = len(train) + len(evaluation)
        notes = _field_notes(checker.unread_fields)
        if config.eval_path:
            if "holdout_share" in config.model_fields_set:
                notes += ("`holdout_share` is not used: `eval_path` gives the held-out rows",)
        else:
            train, evaluation = _hold_out(train, config.holdout_share)
            if not evaluation and config.holdout_share > 0:
                notes += ("nothing is held out: there is only one different prompt",)
        keys = [prompt_key(row.messages) for row in (*train, *evaluation)]
        overlap = {prompt_key(r.messages) for r in train} & {prompt_key(r.messages) for r in evaluation}
        # A prompt on both sides is counted as dropped below, not as a duplicate.
        num_duplicates = len(keys) - len(set(keys)) - len(overlap)
        evaluation.sort(key=lambda row: (stable_hash(eval_seed, prompt_key(row.messages)), row.row_id))
        self._eval = evaluation
        self.verifiers = frozenset(row.verifier for row in (*train, *evaluation))
        self.held_out = frozenset(prompt_key(row.messages) for row in evaluation)
        self._train = train
        self._report = TaskReport(
            self.name, num_rows, len(train), len(evaluation), duplicates=num_duplicates, notes=notes
        )
        self.exclude(self.held_out)
        self._permutation = lru_cache(maxsize=4)(self._make_permutation)

    @property
    def num_train(self) -> int:
        return len(self._train)

    @property
    def report(self) -> TaskReport:
        return self._report

    def exclude(self, keys: frozenset[str]) -> None:
        kept = [row for row in self._train if prompt_key(row.messages) not in keys]
        self._report.dropped_overlap += len(self._train) - len(kept)
        self._report.train_rows = len(kept)
        self._train = kept

    def train_prompt(self, index: int) -> Prompt:
        """See `Task`. The order within an epoch depends on the run's seed, the task's name and the epoch."""
        if index < 0:
            raise ValueError(f"index {index}: expected 0 or more")
        if not self._train:
            change = "Lower `holdout_share`, or give training rows that are not in `eval_path`"
            raise DataError([Violation(f'task "{self.name}"', "no row is left for training", change)])
        epoch, place = divmod(index, len(self._train))
        row = self._train[self._permutation(epoch, len(self._train))[place]]
        return self._prompt(row, str(epoch))

    def eval_prompts(self, limit: int) -> list[Prompt]:
        """See `Task`. Which rows come first depends on the evaluation's seed."""
        return [self._prompt(row, "eval") for row in self._eval[: max(limit, 0)]]

    def _make_permutation(self, epoch: int, num_rows: int) -> list[int]:
        order = list(range(num_rows))
        random.Random(stable_hash(self.name, self._run_seed, epoch)).shuffle(order)
        return order

    def _prompt(self, row: CheckedRow, use: str) -> Prompt:
        return Prompt(
            id=f"{self.name}/{row.row_id}@{use}",
            task=self.name,
            messages=row.messages,
            answer=row.answer,
            verifier=row.verifier,
            payload=row.payload,
            prefix=row.prefix,
            # A held-out prompt is answered by the model.
            preference=None if use == "eval" else row.preference,
        )


def _load(path: Path, checker: RowChecker) -> list[CheckedRow]:
    checker.start_file()
    return [row for raw in read_rows(path) if (row := checker.check(raw)) is not None]


def _data_error(violations: Sequence[Violation], path: Path) -> DataError:
    """All bad rows, at most MAX_SHOWN of them in full, and how many there are."""
    places = list(dict.fromkeys(violation.where.split(", field ")[0] for violation in violations))
    shown = set(places[:MAX_SHOWN])
    listed = [v for v in violations if v.where.split(", field ")[0] in shown]
    hidden = f", the first {MAX_SHOWN} are listed above" if len(places) > MAX_SHOWN else ""
    total = f"{len(places)} bad row{'s' if len(places) > 1 else ''}{hidden}"
    return DataError([*listed, Violation(str(path), total, "Nothing was started; correct or remove them")])


def _field_notes(unread: set[str]) -> tuple[str, ...]:
    """Warn of a payload field whose name is nearly that of one with a meaning."""
    notes = []
    for name in sorted(unread):
        close = difflib.get_close_matches(name, KNOWN_FIELDS, n=1, cutoff=0.85)
        if close:
            notes.append(f'the field "{name}" is kept as payload; if you meant "{close[0]}", rename it')
    return tuple(notes)


def _hold_out(rows: list[CheckedRow], share: float) -> tuple[list[CheckedRow], list[CheckedRow]]:
    """Rows for training and held-out ones, by the hash of their prompts.

    Where both are wanted (0 < share < 1) and there are two different prompts, each side gets at least one.
    """
    ranks = {key: stable_hash("holdout", key) / 2**64 for key in {prompt_key(row.messages) for row in rows}}
    chosen = {key for key, rank in ranks.items() if rank < share}
    if 0 < share < 1:
        by_rank = sorted(ranks, key=lambda key: (ranks[key], key))
        if not chosen and len(ranks) > 1:
            chosen = {by_rank[0]}
        elif len(chosen) == len(ranks):
            chosen = set(by_rank[:-1])
    train = [row for row in rows if prompt_key(row.messages) not in chosen]
    held_out = [row for row in rows if prompt_key(row.messages) in chosen]
    return train, held_out
