"""The folder of a run: its layout, its one owner, and how files get into it."""

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from plait.errors import ConfigError, PlaitError
from plait.telemetry.files import (
    PARTIAL_PREFIX,
    describe_free_space,
    encode_json,
    write_atomically,
)

CONFIG = "config.json"
ORIGIN = "run.json"
PLAN = "plan.json"
PREDICTION = "prediction.json"
SUMMARY = "summary.json"
METRICS_FILE = "metrics.jsonl"
SAMPLES = "samples.jsonl"
ALARMS_FILE = "alarms.jsonl"
BAD_BATCHES = "bad_batches"
TRACE = "trace.json"
REPORT = "report.html"
CHECKPOINTS = "checkpoints"
MODEL = "model"
TENSORBOARD = "tensorboard"
LOCK = ".lock"

_INPUTS = (CONFIG, ORIGIN, PLAN, PREDICTION)
_RESULTS = (
    *(SUMMARY, METRICS_FILE, SAMPLES, ALARMS_FILE, BAD_BATCHES),
    *(TRACE, REPORT, CHECKPOINTS, MODEL, TENSORBOARD),
)
_NAME = re.compile(r"\w[\w.+-]*")

_locks_held: set[int] = set()
"""Descriptors of the locks of this process; see `_release_in_child`."""


def _release_in_child() -> None:
    """Close inherited locks in a forked child: a worker that outlives the run must not keep it locked."""
    for descriptor in _locks_held:
        os.close(descriptor)
    _locks_held.clear()


os.register_at_fork(after_in_child=_release_in_child)


class RunDir:
    """An open run folder. The process that holds it is its only owner until `close` or its end."""

    def __init__(self, path: Path, lock: int):
        """For `create` and `open`. lock: descriptor of the locked file."""
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, root: Path, name: str, *, overwrite: bool = False, is_exact: bool = False) -> "RunDir":
        """Make and lock `root/name`, or `name-2`, `name-3`, ... where it is taken.

        Taken means: another process owns it, or it holds results, or it is no folder of a run. A run that
        stopped before its first result leaves its folder to the next.
        is_exact: ConfigError where `root/name` is taken, instead of a number.
        overwrite: remove the results in `root/name` and use it; files that are not of a run stay.
        ConfigError for a name or a place that cannot be used; PlaitError for overwriting a run under way.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f'name is "{name}"; a run\'s name becomes a folder: letters, digits, ".", "_", "+" and "-", '
                'not starting with "." or "-". Choose such a name.'
            )
        for number in itertools.count(1):
            path = root / (name if number == 1 else f"{name}-{number}")
            if is_exact and number > 1:
                raise ConfigError(
                    f'"{root / name}" is not free: another process uses it, or it holds files. Choose another folder.'
                )
            if not overwrite and _looks_taken(path):
                continue
            _make_folder(path)
            try:
                run = cls(path, _acquire(path))
            except RunIsOwnedError:
                if overwrite:
                    raise
                continue
            if overwrite or not _is_taken(path):  # again, now that nobody else can write
                run._empty()
                return run
            run.close()
        raise AssertionError("unreachable: the numbers do not end")

    @classmethod
    def open(cls, path: Path) -> "RunDir":
        """Lock an existing run to resume it.

        ConfigError where there is none, PlaitError while another process owns it.
        """
        if not is_run(path):
            raise ConfigError(f"{path} is not a run: it has no {CONFIG}. Give the folder of a run.")
        return cls(path, _acquire(path))

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    @property
    def model(self) -> Path:
        return self.path / MODEL

    @property
    def metrics(self) -> Path:
        return self.path / METRICS_FILE

    @property
    def samples(self) -> Path:
        return self.path / SAMPLES

    @property
    def alarms(self) -> Path:
        return self.path / ALARMS_FILE

    @property
    def bad_batches(self) -> Path:
        return self.path / BAD_BATCHES

    @property
    def trace(self) -> Path:
        return self.path / TRACE

    def write_json(self, name: str, data: Any) -> Path:
        """Create or replace a JSON file of the run, atomically. Returns its path.

        Numbers that are not finite become null, paths become text, numpy values plain ones. TypeError for
        anything else that JSON cannot hold, PlaitError where the file cannot be written.
        """
        assert re.fullmatch(r"\w+\.json", name), f'"{name}" is not the name of a JSON file'
        path = self.path / name
        try:
            write_atomically(path, encode_json(to_plain(data), indent=2) + b"\n")
        except OSError as error:
            raise PlaitError(
                f"{path} cannot be written: {error.strerror}. {describe_free_space(self.path)} "
                "Make room or give write permission, then resume the run."
            ) from error
        return path

    def read_json(self, name: str) -> Any:
        """Content of a JSON file of the run. PlaitError where it is missing or damaged."""
        path = self.path / name
        try:
            return json.loads(path.read_bytes())
        except OSError as error:
            raise PlaitError(f"{path} cannot be read: {error.strerror}. Is this the right run?") from error
        except ValueError as error:
            raise PlaitError(f"{path} is not JSON: {error}. Restore it, or start a new run.") from error

    def _empty(self) -> None:
        """Remove the files of an earlier run; only names that a run makes."""
        try:
            for path in sorted(self.path.iterdir()):
                if path.name in (*_INPUTS, *_RESULTS) or path.name.startswith(PARTIAL_PREFIX):
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
        except OSError as error:
            self.close()
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Give the folder up; closing twice is harmless."""
        if self._lock is not None:
            _locks_held.discard(self._lock)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def is_run(folder: Path) -> bool:
    """Whether a run was started in the folder. ConfigError where it cannot be looked into."""
    try:
        return (folder / CONFIG).is_file()
    except OSError as error:
        raise _unwritable(folder, error) from error


def _looks_taken(path: Path) -> bool:
    try:
        return path.exists() and (not path.is_dir() or _is_taken(path))
    except OSError as error:
        raise _unwritable(path, error) from error


def _is_taken(folder: Path) -> bool:
    """Whether the folder holds results, or files that no run made."""
    try:
        names = {path.name for path in folder.iterdir() if not path.name.startswith(PARTIAL_PREFIX)}
    except OSError as error:
        raise _unwritable(folder, error) from error
    return bool(names - {LOCK, *_INPUTS})


class RunIsOwnedError(PlaitError):
    """Another process owns the run's folder."""


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: the run's folder cannot be written: {error.strerror}. "
        "Choose another folder for runs, or give write permission on this one."
    )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def _acquire(folder: Path) -> int:
    """Lock a run's folder; the system frees the lock when its owner ends, however it ends."""
    path = folder / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner, 0)
    except BlockingIOError:
        os.close(descriptor)
        raise RunIsOwnedError(
            f"{folder} is in use by {_describe_owner(path)}. Wait for it, stop it, or choose another name."
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise _unwritable(folder, error) from error
    _locks_held.add(descriptor)
    return descriptor


def _describe_owner(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it may be writing just now
        owner = json.loads(path.read_bytes())
        return f"process {int(owner['pid'])} on {owner['host']}"
    return "another process"


def to_plain(data: Any) -> Any:
    """The same data as JSON can hold it, None for numbers that are not finite. TypeError for other types."""
    if isinstance(data, np.generic | np.ndarray):
        data = data.tolist()
    if data is None or isinstance(data, str | bool | int):
        return data
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, Path):
        return str(data)
    if isinstance(data, Mapping):
        return {_to_key(key): to_plain(value) for key, value in data.items()}
    if isinstance(data, Sequence):
        return [to_plain(value) for value in data]
    raise TypeError(f"{data!r} cannot be written as JSON")


def _to_key(key: Any) -> str:
    if isinstance(key, str | int):
        return str(key)
    raise TypeError(f"{key!r} cannot be a key in JSON; text or an integer was expected")
