"""The thread that keeps the verifier workers busy, holds them to their limits, and replaces them."""

import os
import selectors
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

from plait.batch import Verdict
from plait.errors import ConfigError, PlaitError, VerifierContractError, VerifierFailureError, Violation
from plait.rewards.rounds import ScoringTimes
from plait.rewards.waiting_line import BatchSizes, Item, WaitingLine
from plait.rewards.wire import RubbishError, verdict_from_json
from plait.rewards.worker_loop import LoadTask, ScoreTask, shown_bytes
from plait.rewards.worker_process import WorkerProcess

BUSY_TICK_S = 0.02
"""How often exits are looked for while a worker has something to do; its replies come at once."""
IDLE_TICK_S = 1.0
STOP_LIMIT_S = 5.0
"""How long a warden may take to end its family before it is killed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """num_workers >= 1; times in seconds of wall clock, per sample and per start or load of a verifier."""

    num_workers: int
    timeout_s: float
    start_timeout_s: float
    memory_bytes: int


@dataclass(slots=True, eq=False)
class _Worker:
    process: WorkerProcess
    deadline: float
    state: Literal["starting", "idle", "loading", "scoring"] = "starting"
    since: float = 0.0
    loading: str = ""
    loaded: set[str] = field(default_factory=set)
    items: list[Item] = field(default_factory=list)
    num_served: int = 0
    is_open: bool = True
    """Whether its end of the reply pipe is open."""


class Supervisor(threading.Thread):
    """Owns the workers. `enqueue`, `load` and `shut_down` may be called from any thread.

    error: why everything stopped, once it has; waiters look at it.
    """

    def __init__(self, recipe_dir: Path | None, limits: Limits, times: ScoringTimes):
        # A daemon: when the program ends without closing the pool, the lifelines break and the workers end.
        super().__init__(name="verifier-supervisor", daemon=True)
        self.error: PlaitError | None = None
        self.num_events = 0
        """Grows with every reply and every fault; when it stands still, nothing progresses."""
        self._recipe_dir, self._limits, self._times = recipe_dir, limits, times
        self._lock = threading.Lock()
        self._incoming: list[Item] = []
        self._wanted: list[str] = []
        self._is_closing = False
        self._line = WaitingLine()
        self._sizes = BatchSizes(limits.timeout_s)
        self._workers: list[_Worker] = []
        self._leaving: list[tuple[float, WorkerProcess]] = []
        self._selector: selectors.BaseSelector
        self._woken_fd = self._wake_fd = -1
        self._is_running = False

    def start(self) -> None:
        """Open what has to be closed by `shut_down`, and start the thread."""
        self._selector = selectors.DefaultSelector()
        self._woken_fd, self._wake_fd = os.pipe()
        for fd in (self._woken_fd, self._wake_fd):
            os.set_blocking(fd, False)
        self._selector.register(self._woken_fd, selectors.EVENT_READ)
        self._is_running = True
        super().start()

    def enqueue(self, items: Sequence[Item]) -> None:
        """Hand in samples; never blocks."""
        with self._lock:
            self._incoming += items
        self.load({item.verifier for item in items})

    def load(self, verifiers: Iterable[str]) -> None:
        """Have every worker load these verifiers before it needs them."""
        with self._lock:
            self._wanted += [name for name in sorted(set(verifiers)) if name not in self._wanted]
        self._wake()

    def all_loaded(self, verifiers: Iterable[str]) -> bool:
        """Whether every worker has loaded these."""
        workers = list(self._workers)
        return len(workers) == self._limits.num_workers and all(set(verifiers) <= w.loaded for w in workers)

    def shut_down(self) -> None:
        """End all workers and this thread; returns when that is done, within a few seconds."""
        with self._lock:
            self._is_closing = True
        self._wake()
        if self.ident is not None:
            self.join(timeout=2 * STOP_LIMIT_S + 2.0)

    def run(self) -> None:
        """The loop; every pass waits for at most a tick."""
        try:
            for _ in range(self._limits.num_workers):
                self._hire()
            while not self._is_closing:
                self._pass()
        except PlaitError as error:
            self.error = error
        # A defect of this loop must reach those who wait for verdicts, or they would wait in vain.
        except BaseException as error:  # noqa: BLE001
            self.error = VerifierFailureError(f"the supervisor of the verifier workers failed with {error!r}")
            self.error.__cause__ = error
        finally:
            self.error = self.error or VerifierFailureError("the verifier pool was closed before every verdict was in")
            self._end_all()

    def _wake(self) -> None:
        with self._lock, suppress(BlockingIOError):
            if self._is_running:
                os.write(self._wake_fd, b"x")

    def _pass(self) -> None:
        with self._lock:
            arrived, self._incoming = self._incoming, []
        for item in arrived:
            self._line.put(item)
        for worker in list(self._workers):
            if worker.state == "idle":
                self._give_work(worker)
        for key, events in self._selector.select(self._tick_s()):
            if key.fd == self._woken_fd:
                os.read(self._woken_fd, 4096)
            elif events & selectors.EVENT_WRITE:
                self._go_on_sending(key.data)
            else:
                self._read(key.data)
        # After the reading: a reply that is there in time counts, however late this thread comes to it.
        for worker in list(self._workers):
            self._check(worker)
        self._bid_farewell()

    def _tick_s(self) -> float:
        if all(worker.state == "idle" for worker in self._workers) and not self._leaving:
            return IDLE_TICK_S
        return max(0.0, min(BUSY_TICK_S, min(worker.deadline for worker in self._workers) - time.monotonic()))

    # Workers come and go.

    def _hire(self) -> None:
        try:
            process = WorkerProcess(self._recipe_dir, self._limits.memory_bytes)
        except OSError as error:
            raise VerifierFailureError(f"a verifier worker could not be started: {error}") from error
        worker = _Worker(process, time.monotonic() + self._limits.start_timeout_s, since=time.monotonic())
        self._workers.append(worker)
        self._selector.register(process.reply_fd, selectors.EVENT_READ, worker)
        self._watch_sending(worker)

    def _dismiss(self, worker: _Worker) -> None:
        """Let go of a worker; it is ended by its warden while work goes on elsewhere."""
        self._workers.remove(worker)
        for fd in (worker.process.reply_fd, worker.process.task_fd):
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        worker.process.stop()
        self._leaving.append((time.monotonic() + STOP_LIMIT_S, worker.process))

    def _replace(self, worker: _Worker) -> None:
        self._dismiss(worker)
        self._hire()

    def _bid_farewell(self) -> None:
        now = time.monotonic()
        for entry in list(self._leaving):
            give_up, process = entry
            if process.has_exited() or now > give_up:
                process.close(limit_s=0.0)
                self._leaving.remove(entry)

    def _end_all(self) -> None:
        for worker in list(self._workers):
            self._dismiss(worker)
        give_up = time.monotonic() + STOP_LIMIT_S
        for _, process in self._leaving:
            process.close(limit_s=max(0.0, give_up - time.monotonic()))
        self._leaving.clear()
        with self._lock:
            self._is_running = False
            self._selector.close()
            os.close(self._woken_fd)
            os.close(self._wake_fd)

    # Work goes out.

    def _give_work(self, worker: _Worker) -> None:
        item = self._line.first()
        missing = next((name for name in self._wanted if name not in worker.loaded), None)
        if item is None:
            if missing is not None:
                self._start_loading(worker, missing)
        elif item.verifier not in worker.loaded:
            self._start_loading(worker, item.verifier)
        elif item.needs_fresh and worker.num_served > 0:
            self._replace(worker)
        else:
            size = min(self._sizes.size(item.verifier), -(-len(self._line) // self._limits.num_workers))
            worker.items = self._line.take(size)
            limit_s = self._sizes.limit_s(len(worker.items))
            self._send(worker, "scoring", ScoreTask([item.data for item in worker.items]), limit_s)

    def _start_loading(self, worker: _Worker, verifier: str) -> None:
        worker.loading = verifier
        self._send(worker, "loading", LoadTask(verifier), self._limits.start_timeout_s)

    def _send(
        self, worker: _Worker, state: Literal["loading", "scoring"], task: LoadTask | ScoreTask, limit_s: float
    ) -> None:
        worker.process.send(task)
        worker.state, worker.since = state, time.monotonic()
        worker.deadline = worker.since + limit_s
        self._watch_sending(worker)

    def _watch_sending(self, worker: _Worker) -> None:
        if worker.process.has_unsent:
            self._selector.register(worker.process.task_fd, selectors.EVENT_WRITE, worker)

    def _go_on_sending(self, worker: _Worker) -> None:
        if worker not in self._workers:  # it was dismissed a moment ago
            return
        worker.process.send_more()
        if not worker.process.has_unsent:
            self._selector.unregister(worker.process.task_fd)

    # Replies and faults come in.

    def _read(self, worker: _Worker) -> None:
        if worker not in self._workers:
            return
        try:
            replies = worker.process.receive()
            if replies is None:
                worker.is_open = False
                self._selector.unregister(worker.process.reply_fd)
                return
            for reply in replies:
                self._on_reply(worker, reply)
        except RubbishError as error:
            self._on_fault(worker, f"the worker sent {error} and was replaced")

    def _on_reply(self, worker: _Worker, reply: dict[str, Any]) -> None:
        self.num_events += 1
        match worker.state, reply:
            case "starting", {"kind": "ready", "pid": int() as pid}:
                worker.process.scoring_pid = pid
                self._rest(worker)
            case "loading", {"kind": "loaded"}:
                worker.loaded.add(worker.loading)
                self._rest(worker)
            case "scoring", {"kind": "verdicts", "verdicts": list() as verdicts, "short_of_memory": list() as short}:
                if len(verdicts) != len(worker.items):
                    raise RubbishError(f"{len(verdicts)} verdicts for {len(worker.items)} samples")
                self._on_verdicts(worker, [verdict_from_json(verdict) for verdict in verdicts], short)
            case "loading" | "scoring", {"kind": "contract", "message": str() as message}:
                raise VerifierContractError(message)
            case "loading" | "scoring", {"kind": "config", "message": str() as message, "violations": list() as rows}:
                violations = [Violation(*map(str, row)) for row in rows]
                raise ConfigError(violations or message)
            case "scoring", {"kind": "memory", "message": str() as message}:
                self._on_fault(worker, message, is_memory=True)
            case "scoring", {"kind": "raised", "message": str() as message}:
                self._on_fault(worker, message)
            case "loading", {"kind": "memory" | "raised", "message": str() as message}:
                raise self._load_error(worker, f"failed: {message}")
            case _:
                raise RubbishError(f"an unexpected reply ({reply['kind'][:40]!r})")

    def _rest(self, worker: _Worker) -> None:
        worker.state, worker.deadline, worker.items = "idle", inf, []

    def _on_verdicts(self, worker: _Worker, verdicts: list[Verdict], short: list[Any]) -> None:
        seconds, items = time.monotonic() - worker.since, worker.items
        verifier = items[0].verifier
        self._sizes.succeeded(verifier, len(items), seconds)
        self._times.add_busy(verifier, seconds)
        for index, (item, verdict) in enumerate(zip(items, verdicts, strict=True)):
            if index in short and not (item.alone and worker.num_served == 0):
                self._try_again(item, needs_fresh=True)
            else:
                self._settle(item, verdict, seconds / len(items))
        worker.num_served += len(items)
        self._rest(worker)
        if short:  # what filled its memory may still be there
            self._replace(worker)

    def _settle(self, item: Item, verdict: Verdict, seconds: float) -> None:
        self._times.add_sample(item.verifier, item.sample_id, seconds)
        item.round.settle(item.index, verdict)

    def _try_again(self, item: Item, *, needs_fresh: bool) -> None:
        item.alone, item.needs_fresh = True, needs_fresh
        self._line.put(item)

    def _check(self, worker: _Worker) -> None:
        """Look for an exit and for an exceeded limit."""
        if worker.process.has_exited():
            if worker.is_open:  # it may have answered before it ended
                self._read(worker)
            if worker in self._workers:
                self._on_fault(worker, f"the worker died ({worker.process.how_it_ended()})")
        elif time.monotonic() > worker.deadline:
            limit_s = worker.deadline - worker.since
            self._on_fault(worker, f"no result within {limit_s:.4g} s; the worker was stopped and replaced")

    def _on_fault(self, worker: _Worker, reason: str, *, is_memory: bool = False) -> None:
        """A worker failed at what it was doing: only a sample that was alone in it is blamed."""
        self.num_events += 1
        if worker.state == "starting":
            raise self._start_error(worker, reason)
        if worker.state == "loading":
            raise self._load_error(worker, reason)
        seconds, items = time.monotonic() - worker.since, worker.items
        if items:
            self._times.add_busy(items[0].verifier, seconds)
        is_guilty = len(items) == 1 and not (is_memory and worker.num_served > 0)
        if len(items) > 1:
            self._sizes.went_wrong(items[0].verifier)
        self._replace(worker)
        for item in items:
            if is_guilty:
                self._settle(item, Verdict("failed", 0.0, reason=reason), seconds)
            else:
                self._try_again(item, needs_fresh=is_memory)

    def _start_error(self, worker: _Worker, reason: str) -> VerifierFailureError:
        said = worker.process.complaint()
        return VerifierFailureError(
            f"a verifier worker could not be started: {reason}."
            + (f" It said:\n{said}\n" if said else " ")
            + f"It may use {shown_bytes(self._limits.memory_bytes)} of memory (verifiers.memory_bytes)"
        )

    def _load_error(self, worker: _Worker, reason: str) -> VerifierFailureError:
        return VerifierFailureError(
            f'loading verifier "{worker.loading}" in a worker {reason}. Loading may take '
            f"{self._limits.start_timeout_s:g} s and {shown_bytes(self._limits.memory_bytes)} of memory "
            "(verifiers.memory_bytes). Make the module's import cheap, or raise the limit"
        )
