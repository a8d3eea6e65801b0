"""A group of processes that is started once and runs many cases.

`Ranks(world_size).run(function, *args)` calls function(rank, world_size, *args) in every process and returns what each
returned. Functions are found by name, so they live in a module. An exception in a rank is raised here with the rank
and its traceback; ranks that do not answer in time are killed; either way the next run starts afresh.
"""

import copy
import os
import pickle
import tempfile
import threading
import time
import traceback
from functools import cache
from multiprocessing import connection, get_context

from plait.parallel.degrees import Layout

LIMIT_S = 120
"""Of one case."""
GRACE_S = 2
"""For the other ranks, once one has failed: they may have the better message."""
COLLECTIVE_LIMIT_S = 60


class RankError(AssertionError):
    """A rank raised, died, or did not answer. rank: the first one."""

    def __init__(self, rank, message):
        self.rank = rank
        super().__init__(message)


class Ranks:
    """Processes with a gloo group among them, started at the first run."""

    def __init__(self, world_size):
        self.world_size = world_size
        self._processes, self._pipes, self._folder = [], [], None

    def run(self, function, *args, timeout_s=LIMIT_S):
        """function(rank, world_size, *args) on every rank; the list of results by rank."""
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args))
        answers, end = {}, time.monotonic() + timeout_s
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                answers[rank] = self._died(rank)
                end = min(end, time.monotonic() + GRACE_S)
        while len(answers) < self.world_size and time.monotonic() < end:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for ready in connection.wait(list(waiting), timeout=max(0.0, end - time.monotonic())):
                rank = waiting[ready]
                try:
                    answers[rank] = pickle.loads(ready.recv_bytes())
                except (EOFError, OSError):
                    answers[rank] = self._died(rank)
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + GRACE_S)
        failed = [rank for rank, (is_fine, _) in answers.items() if not is_fine]
        missing = [rank for rank in range(self.world_size) if rank not in answers]
        if failed or missing:
            self.stop()
        if failed:
            others = f" (also failed: {failed[1:]}; no answer: {missing})" if failed[1:] or missing else ""
            raise RankError(failed[0], f"rank {failed[0]} of {self.world_size}{others}:\n{answers[failed[0]][1]}")
        if missing:
            raise RankError(missing[0], f"ranks {missing} of {self.world_size} gave no answer in {timeout_s} s")
        return [answers[rank][1] for rank in range(self.world_size)]

    def _died(self, rank):
        self._processes[rank].join(timeout=GRACE_S)
        return False, f"exit code {self._processes[rank].exitcode}"

    def _start(self):
        os.environ["OMP_NUM_THREADS"] = "1"  # read by the server that forks the ranks
        context = get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "transformers"])
        self._folder = tempfile.TemporaryDirectory(prefix="plait-ranks-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world_size, f"{self._folder.name}/store", theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def stop(self):
        """End every process, at once."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(timeout=10)
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(rank, world_size, store, pipe):
    import warnings

    import plait  # noqa: F401  (before torch: it asks OpenMP not to spin)

    parent = os.getppid()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    import torch

    from plait.parallel.mesh import open_process_group

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    open_process_group(rank, world_size, "cpu", COLLECTIVE_LIMIT_S, f"file://{store}")
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        except Exception:  # noqa: BLE001  (a function that cannot be imported here is the caller's to read)
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            continue
        try:
            answer = (True, function(rank, world_size, *args))
            message = pickle.dumps(answer)
        except BaseException:  # noqa: BLE001  (whatever it is, the caller must see it)
            message = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(message)


def _end_with(parent):
    """No orphans: a rank that waits in a collective does not notice that its pipe closed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def mesh(layout: Layout):
    """This rank's mesh for a layout. Layouts of the same degrees share one: every mesh makes groups, and these threads.

    torch keeps meshes in its caches, so that groups cannot be closed safely before the process ends.
    """
    found = copy.copy(_mesh_of(Layout.parse(str(layout))))
    found.layout = layout
    return found


@cache
def _mesh_of(degrees: Layout):
    from plait.parallel.mesh import Mesh

    return Mesh(degrees, "cpu")
