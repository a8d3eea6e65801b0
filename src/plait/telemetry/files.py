"""Files that survive a crash: whole files are replaced atomically, JSON lines can be continued after one."""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.errors import PlaitError

PARTIAL_PREFIX = ".partial-"
"""Files and folders named so are unfinished; they may be removed by whoever owns the folder."""


def partial_path(path: Path) -> Path:
    """A fresh name beside `path` for its unfinished form."""
    return path.parent / f"{PARTIAL_PREFIX}{path.name}-{secrets.token_hex(4)}"


def fsync_directory(path: Path) -> None:
    """Make the names in a folder durable; without it a rename may be lost with the power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and wait until it is on the disk. FileExistsError if there is one."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """Create or replace a file: a reader, or a crash, sees the old content or the new, never a mixture.

    Raises OSError; the unfinished file is removed then.
    """
    partial = partial_path(path)
    try:
        write_synced(partial, data)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def encode_json(data: Any, *, indent: int | None = None) -> bytes:
    """UTF-8 JSON. Lone surrogates, which no UTF-8 can hold, become the JSON escapes that mean the same.

    ValueError for a number that is not finite: JSON has none.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, indent=indent)
    return text.encode("utf-8", errors="backslashreplace")


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The JSON object on a line, or None where the line does not hold one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def iterate_json_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line (with its line end) and the object on it.

    A torn last line, as a crash leaves it, ends the iteration. PlaitError for damage anywhere else.
    """
    with open(path, "rb") as file:
        damaged_at = 0
        for number, line in enumerate(file, start=1):
            if damaged_at:
                raise PlaitError(
                    f"{path}, line {damaged_at}: this is not a JSON object, and more lines follow it. "
                    "Remove or repair that line."
                )
            record = parse_record(line) if line.endswith(b"\n") else None
            if record is None:
                damaged_at = number
            else:
                yield line, record


class JsonLinesFile:
    """An append-only file of JSON objects. Every record is handed to the system before `append` returns.

    Raises PlaitError where the file cannot be written (a full disk, say).
    """

    def __init__(self, path: Path, *, exclusive: bool):
        """exclusive: the file must not exist yet."""
        self.path = path
        try:
            self._file = open(path, "xb" if exclusive else "ab", buffering=0)  # noqa: SIM115
        except FileExistsError:
            raise PlaitError(
                f"{path} already exists and holds a run's records. Resume that run, or choose another name."
            ) from None
        except OSError as error:
            raise self._failure(error) from error

    @classmethod
    def reopen(
        cls, path: Path, keep: Callable[[Mapping[str, Any]], bool], seen: Callable[[Mapping[str, Any]], None]
    ) -> "JsonLinesFile":
        """Continue a file: drop, in one atomic step, a torn last line and the records that `keep` refuses.

        seen: called with each record kept, in order. A missing file is begun anew, since a run can be
        stopped before its first record. PlaitError where a line before the last is damaged.
        """
        if path.exists():
            cls._rewrite(path, keep, seen)
        return cls(path, exclusive=False)

    @classmethod
    def _rewrite(
        cls, path: Path, keep: Callable[[Mapping[str, Any]], bool], seen: Callable[[Mapping[str, Any]], None]
    ) -> None:
        partial = partial_path(path)
        try:
            with open(partial, "xb") as file:
                for line, record in iterate_json_lines(path):
                    if keep(record):
                        file.write(line)
                        seen(record)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
            fsync_directory(path.parent)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise cls._describe(path, error) from error
        except PlaitError:
            partial.unlink(missing_ok=True)
            raise

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record. ValueError for a number that is not finite, TypeError for what is not JSON."""
        data = encode_json(record) + b"\n"
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        self._file.close()

    def _failure(self, error: OSError) -> PlaitError:
        return self._describe(self.path, error)

    @staticmethod
    def _describe(path: Path, error: OSError) -> PlaitError:
        return PlaitError(
            f"{path}: cannot be written: {error.strerror}. {describe_free_space(path.parent)} "
            "Make room or give write permission, then resume the run."
        )


def describe_free_space(folder: Path) -> str:
    """A sentence with the free space of the disk that holds `folder`."""
    try:
        return f"Free on that disk: {format_bytes(shutil.disk_usage(folder).free)}."
    except OSError as error:
        return f"The free space of that disk is unknown ({error.strerror})."


def format_bytes(num_bytes: float) -> str:
    """For people: "512 B", "3.4 MB" (powers of 1000)."""
    if num_bytes < 1000:
        return f"{num_bytes:.0f} B"
    for unit in ("kB", "MB", "GB"):
        num_bytes /= 1000
        if num_bytes < 1000:
            return f"{num_bytes:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} TB"
