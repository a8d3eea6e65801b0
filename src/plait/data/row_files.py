"""Reading JSONL and Parquet files into rows. A row that cannot be read is kept, with the reason."""

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, DataError, Violation

SUFFIXES = (".jsonl", ".ndjson", ".parquet")


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row as it stands in the file. index counts rows from 0; `where` is for messages.

    Exactly one of `fields` and `problem` (why the row cannot be read) is given.
    """

    index: int
    where: str
    fields: dict[str, Any] | None
    problem: str | None = None


def read_rows(path: Path) -> list[RawRow]:
    """All rows of a file; DataError if the file cannot be read or has none."""
    if not path.is_file():
        raise _file_error(path, "there is no such file" if not path.exists() else "is not a file", _nearby(path))
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        change = "Convert it: one JSON object per line (.jsonl), or Parquet"
        raise _file_error(path, f'has the ending "{path.suffix}"; {" or ".join(SUFFIXES)} is expected', change)
    rows = _read_parquet(path) if suffix == ".parquet" else _read_jsonl(path)
    if not rows:
        change = 'Each row needs "prompt" (or "messages") and "answer"'
        raise _file_error(path, "has no rows", change)
    return rows


def _file_error(path: Path, rule: str, change: str) -> DataError:
    return DataError([Violation(str(path), rule, change)])


def _nearby(path: Path) -> str:
    if not path.parent.is_dir():
        return f"The folder {path.parent} does not exist either; relative paths start at the recipe's folder"
    names = sorted(p.name for p in path.parent.iterdir() if p.suffix.lower() in SUFFIXES)
    close = difflib.get_close_matches(path.name, names, n=1)
    hint = f'Did you mean "{close[0]}"? ' if close else ""
    return f"{hint}Data files in {path.parent}: {', '.join(names[:10]) or 'none'}"


def _read_jsonl(path: Path) -> list[RawRow]:
    data = path.read_bytes()
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise _file_error(path, "is UTF-16", "Save it as UTF-8")
    rows: list[RawRow] = []
    # Split at line feeds only: JSON strings may hold U+2028 and other characters that end lines elsewhere.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if line.strip():
            index = len(rows)
            fields, problem = _parse_line(line)
            rows.append(RawRow(index, f"{path.name}:{number} (row {index})", fields, problem))
    return rows


def _parse_line(line: bytes) -> tuple[dict[str, Any] | None, str | None]:
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        return None, f"is not UTF-8 at byte {error.start + 1} of the line"
    except json.JSONDecodeError as error:
        return None, f"is not valid JSON: {error.msg} at column {error.colno}"
    except (ValueError, RecursionError) as error:
        return None, f"is not valid JSON: {error}"
    if not isinstance(value, dict):
        return None, f"is a JSON {type(value).__name__}, not an object with fields"
    return value, None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'the field "{twice}" is given more than once')
    return fields


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value")


def _read_parquet(path: Path) -> list[RawRow]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        change = "Install it with: pip install 'plait[parquet]', or convert the file to JSONL"
        raise ConfigError([Violation(str(path), "reading Parquet needs pyarrow", change)]) from error
    try:
        records = parquet.read_table(path, use_threads=False).to_pylist()
    except (arrow.ArrowException, OSError, ValueError) as error:
        change = "Check that the file is complete; write it again"
        raise _file_error(path, f"cannot be read as Parquet: {error}", change) from error
    return [RawRow(index, f"{path.name} (row {index})", record) for index, record in enumerate(records)]
