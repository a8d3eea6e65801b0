"""One verifier worker, seen from the training process: start it, talk to it without blocking, end it."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import plait
from plait.rewards.wire import ReplyReader, framed
from plait.rewards.worker_loop import LoadTask, ScoreTask, Settings

_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Verifiers run beside generation, which needs the cores."""

_MAX_COMPLAINT_BYTES = 4000


class WorkerProcess:
    """Pipes and process of a worker. Not safe to use from several threads.

    Must be started by a thread that lives as long as the worker: Linux counts the end of the starting
    thread as the death of the parent.
    """

    def __init__(self, recipe_dir: Path | None, memory_bytes: int):
        """Start it. Raises OSError if the system does not give a process or a pipe."""
        task_fd, self.task_fd = os.pipe()
        self.reply_fd, reply_fd = os.pipe()
        lifeline_fd, self._lifeline_fd = os.pipe()
        theirs = (task_fd, reply_fd, lifeline_fd)
        self._complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the pipes)
        try:
            self._process = _start(theirs, self._complaints)
        except OSError:
            self._close_fds()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        for fd in (self.task_fd, self.reply_fd):
            os.set_blocking(fd, False)
        self.scoring_pid = 0
        """Known once the worker has said that it is ready."""
        self._reader = ReplyReader()
        self._unsent = b""
        self.send(Settings(recipe_dir, list(sys.path), os.environ.get("PYTHONPATH"), memory_bytes))

    @property
    def has_unsent(self) -> bool:
        """Whether a part of a task still waits for room in the pipe."""
        return bool(self._unsent)

    def send(self, task: Settings | LoadTask | ScoreTask) -> None:
        """Give it a task; what does not fit into the pipe is sent by `send_more`."""
        self._unsent += framed(pickle.dumps(task))
        self.send_more()

    def send_more(self) -> None:
        """Go on sending. A worker that is gone is noticed by its exit, not here."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.task_fd, self._unsent[: 2**20]) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent = b""

    def receive(self) -> list[dict[str, Any]] | None:
        """The replies that have arrived; None once the worker has closed its end. Raises RubbishError."""
        try:
            piece = os.read(self.reply_fd, 2**18)
        except BlockingIOError:
            return []
        return self._reader.feed(piece) if piece else None

    def has_exited(self) -> bool:
        """Whether it is gone, with everything that it had started."""
        return self._process.poll() is not None

    def how_it_ended(self) -> str:
        """For example "signal 11, SIGSEGV" or "exit status 3"; for a worker that is gone."""
        code = self._process.returncode
        if code is None or code >= 0:
            return f"exit status {code}"
        try:
            return f"signal {-code}, {signal.Signals(-code).name}"
        except ValueError:  # a real-time signal has no name
            return f"signal {-code}"

    def complaint(self) -> str:
        """The end of what it wrote to stderr before it was ready."""
        size = self._complaints.seek(0, os.SEEK_END)
        self._complaints.seek(max(0, size - _MAX_COMPLAINT_BYTES))
        return self._complaints.read().decode(errors="replace").strip()

    def stop(self) -> None:
        """Ask its warden to end it and everything below it; `has_exited` tells when that is done."""
        with suppress(BrokenPipeError):
            os.write(self._lifeline_fd, b"x")

    def kill(self) -> None:
        """The same by force, for a warden that does not obey (because it was stopped or killed itself)."""
        # Once the warden is reaped here, its number may belong to somebody else.
        if self._process.returncode is None:
            for group in filter(None, (self.scoring_pid, self._process.pid)):
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGKILL)

    def close(self, limit_s: float) -> None:
        """Release pipes and process number of a worker that was stopped, by force after limit_s seconds."""
        give_up = time.monotonic() + limit_s
        while not self.has_exited() and time.monotonic() < give_up:
            time.sleep(0.002)
        if not self.has_exited():
            self.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=1.0)
        self._close_fds()

    def _close_fds(self) -> None:
        for fd in (self.task_fd, self.reply_fd, self._lifeline_fd):
            os.close(fd)
        self._complaints.close()


def _start(theirs: tuple[int, int, int], complaints: IO[bytes]) -> "subprocess.Popen[bytes]":
    # Whatever the working directory holds must not hide standard modules (-P), and the worker must find
    # this very plait; it restores PYTHONPATH before user code runs.
    home = str(Path(plait.__file__).parents[1])
    path = os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "plait.rewards.worker", str(os.getpid()), *map(str, theirs)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=complaints,
        pass_fds=theirs,
        start_new_session=True,
        env=os.environ | _ONE_THREAD | {"PYTHONPATH": path},
    )
