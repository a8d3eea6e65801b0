"""Synchronous: every stage of a step ends before the next begins, and every token is sampled by the newest policy."""

from plait.executor.protocol import Executor, Piece

_SAMPLING = ("generate", "score_verifier", "score_reward")


def sync(executor: Executor, *, first_step: int, last_step: int) -> None:
    """Run steps first_step .. last_step (steps count from 1); step k publishes policy version k."""
    graph = executor.graph
    for step in range(first_step, last_step + 1):
        if not executor.begin_step(step):
            return
        for refill in range(graph["generate"].repeat if "generate" in graph else 0):
            for name in _SAMPLING:
                if name in graph:
                    _run(executor, Piece(step, name, refill))
            if executor.num_missing_groups(step) == 0:
                break
        for stage in graph.stages:
            if stage.name not in (*_SAMPLING, "sync_weights"):
                _run(executor, Piece(step, stage.name))
        if "sync_weights" in graph:
            executor.sync_weights(step)
        executor.end_step(step)


def _run(executor: Executor, piece: Piece) -> None:
    executor.submit(piece)
    done = executor.next_completed()
    assert done == piece, f"{done} completed where {piece} was the only piece at work"
