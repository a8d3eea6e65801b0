"""`python -m plait.rewards.worker`: one verifier worker, as two processes.

    training process -> warden -> scoring process -> whatever a verifier starts

The warden runs none of the user's code, so it can neither hang nor crash with it. It ends the whole family
below it when the training process asks for that or is gone (even by SIGKILL), and when the scoring process
ends; then it ends itself in the way in which the scoring process did. It imports little and starts no
thread, which makes its fork safe.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_KILL_LIMIT_S = 3.0
_CHECK_EVERY_S = 1.0


def main() -> NoReturn:
    """Arguments: pid of the training process, then descriptors: tasks in, replies out, lifeline."""
    training_pid, task_fd, reply_fd, lifeline_fd = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    woken_fd, wake_fd = _watch_signals()
    if sys.platform == "linux":
        # Processes that a verifier leaves behind become children of the warden, which can then end them.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        # The lifeline may be held open by another child of the training process; this signal comes anyway.
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != training_pid:  # it died before the signal was ordered
        os._exit(0)
    scoring_pid = os.fork()
    if scoring_pid == 0:
        for fd in (woken_fd, wake_fd, lifeline_fd):
            os.close(fd)
        _score(task_fd, reply_fd, warden_pid=os.getppid())
    for fd in (task_fd, reply_fd):
        os.close(fd)
    _guard(scoring_pid, training_pid, lifeline_fd, woken_fd)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _watch_signals() -> tuple[int, int]:
    """Let SIGTERM and SIGCHLD wake a select instead of ending the process; returns the pipe they write to."""
    woken_fd, wake_fd = os.pipe()
    for fd in (woken_fd, wake_fd):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return woken_fd, wake_fd


def _score(task_fd: int, reply_fd: int, *, warden_pid: int) -> NoReturn:
    """Be the scoring process: leader of its own session, so that the family can be ended as one group."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != warden_pid:
        os._exit(0)
    try:
        # Only here: the warden stays small, and what fails in these imports is written to stderr.
        from plait.rewards.worker_loop import serve

        serve(task_fd, reply_fd)
    # Whatever happens, the code of the warden must not go on in this process.
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
    os._exit(1)


def _guard(scoring_pid: int, training_pid: int, lifeline_fd: int, woken_fd: int) -> NoReturn:
    """Wait for the end of the scoring process or of the need for it, then end the family and this process."""
    while True:
        readable, _, _ = select.select([lifeline_fd, woken_fd], [], [], _CHECK_EVERY_S)
        if woken_fd in readable:
            os.read(woken_fd, 4096)
        if _has_exited(scoring_pid):
            status = _end_family(scoring_pid)
            break
        # A byte on the lifeline or its end, or another parent: this worker is not wanted any more.
        if lifeline_fd in readable or os.getppid() != training_pid:
            _end_family(scoring_pid)
            os._exit(0)
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if status is not None and os.WIFEXITED(status) else 1)


def _has_exited(scoring_pid: int) -> bool:
    """Whether the scoring process has ended. It is not reaped yet, so that its group's number stays taken."""
    if sys.platform != "linux":  # without a subreaper there are no other children
        return os.waitpid(scoring_pid, os.WNOHANG)[0] != 0
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        if ended.si_pid == scoring_pid:
            return True
        os.waitpid(ended.si_pid, 0)  # an orphan that ended by itself


def _end_family(scoring_pid: int) -> int | None:
    """Kill and reap everything below this process; returns the scoring process's wait status if it is known."""
    status: int | None = None
    give_up = time.monotonic() + _KILL_LIMIT_S
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(scoring_pid, signal.SIGKILL)
    while time.monotonic() < give_up:
        # Those that left the group hang below its members, and come here when their parents die.
        for pid in _children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == scoring_pid:
            status = ended
        if pid == 0:
            time.sleep(0.002)
    return status


def _children() -> list[int]:
    """Children of this process, read off /proc; empty where there is none."""
    found, own = [], str(os.getpid())
    with suppress(FileNotFoundError):
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{entry}/stat") as file:
                # "pid (name) state parent ..."; the name may hold spaces and brackets.
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(entry))
    return found


if __name__ == "__main__":
    main()
