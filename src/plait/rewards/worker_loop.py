"""The scoring process of a verifier worker: reads tasks, runs a `Scorer` under limits, sends verdicts."""

import json
import os
import pickle
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from plait.errors import ConfigError, VerifierContractError
from plait.rewards.records import VerifierSample
from plait.rewards.verifier import Scorer, reason_of
from plait.rewards.wire import read_message, verdict_to_json, write_message

MAX_FILE_BYTES = 2**30
"""Largest file that a verifier may write."""
_MIN_FREE_BYTES = 16 * 2**20
"""What must be left for verifiers, or the worker does not start."""


@dataclass(frozen=True, slots=True)
class Settings:
    """First message to a worker.

    sys_path: module search path of the training process, so that both find the same modules.
    python_path: PYTHONPATH as it was there; None where it was not set.
    memory_bytes: limit of the address space of each process of the worker.
    """

    recipe_dir: Path | None
    sys_path: list[str]
    python_path: str | None
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class LoadTask:
    """Import what the verifier needs, so that its first sample need not wait for that."""

    verifier: str


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """Judge samples, each a pickled VerifierSample."""

    samples: list[bytes]


def shown_bytes(size: int) -> str:
    """A size for people, for example "2.0 GiB"."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def serve(task_fd: int, reply_fd: int) -> NoReturn:
    """Answer tasks until the training process closes its end. Runs in a process of its own, and ends it."""
    own_pid = os.getpid()
    settings: Settings = pickle.loads(read_message(task_fd))
    scorer = _prepared(settings)
    write_message(reply_fd, json.dumps({"kind": "ready", "pid": own_pid}).encode())
    _silence()
    while True:
        try:
            body = read_message(task_fd)
        except EOFError:
            os._exit(0)
        reply = _answer(body, scorer, settings)
        if os.getpid() != own_pid:
            # A verifier forked, and both processes came back from it; only one may answer.
            os._exit(0)
        write_message(reply_fd, json.dumps(reply).encode())


def _prepared(settings: Settings) -> Scorer:
    """Apply the limits and the search path."""
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_AS, settings.memory_bytes),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    bytearray(_MIN_FREE_BYTES)  # too low a limit shows now and not at some sample
    sys.path[:] = settings.sys_path
    # Python programs that a verifier starts must see the environment that the user has set.
    if settings.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = settings.python_path
    return Scorer(settings.recipe_dir)


def _silence() -> None:
    """From here on, what is written to stderr goes nowhere; before, it tells why a worker cannot start."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def _answer(body: bytes, scorer: Scorer, settings: Settings) -> dict[str, Any]:
    try:
        return _do(pickle.loads(body), scorer, settings)
    except VerifierContractError as error:
        return {"kind": "contract", "message": str(error)}
    except ConfigError as error:
        violations = [[v.where, v.rule, v.change] for v in error.violations]
        return {"kind": "config", "message": str(error), "violations": violations}
    except MemoryError:
        pass  # answered below, where what filled the memory is free again
    # Also KeyboardInterrupt or a class of the user's: a verifier's error must not end the worker.
    except BaseException as error:  # noqa: BLE001
        return {"kind": "raised", "message": reason_of(error)}
    return {"kind": "memory", "message": _memory_reason(settings)}


def _do(task: LoadTask | ScoreTask, scorer: Scorer, settings: Settings) -> dict[str, Any]:
    if isinstance(task, LoadTask):
        scorer.prepare(task.verifier)
        return {"kind": "loaded"}
    samples: list[VerifierSample] = [pickle.loads(sample) for sample in task.samples]
    verdicts = scorer.judge(samples)
    short = [i for i, v in enumerate(verdicts) if v.kind == "failed" and v.reason.startswith(MemoryError.__name__)]
    for i in short:
        verdicts[i] = replace(verdicts[i], reason=f"{_memory_reason(settings)}: {verdicts[i].reason}")
    return {"kind": "verdicts", "verdicts": [verdict_to_json(v) for v in verdicts], "short_of_memory": short}


def _memory_reason(settings: Settings) -> str:
    return f"more memory than {shown_bytes(settings.memory_bytes)}"
