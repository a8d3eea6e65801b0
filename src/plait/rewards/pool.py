"""Verifier workers: samples are judged in supervised processes, beside generation and under limits.

    with VerifierPool(recipe_dir, num_workers=2, timeout_s=10.0, memory_bytes=2 * 2**30) as pool:
        pool.submit([sample])       # returns at once
        verdicts = pool.collect()   # sample id -> Verdict, for all that was submitted

A verifier that hangs, crashes, exits or eats memory costs its sample: the verdict is "failed" with the reason.
A verifier must judge each sample by itself, for which samples share a batch depends on timing.
"""

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from plait.batch import Sample, Verdict
from plait.errors import VerifierFailureError
from plait.rewards.rounds import Round, SampleTime, ScoringTimes, VerifierTime
from plait.rewards.supervisor import Limits, Supervisor
from plait.rewards.verifier import to_verifier_sample
from plait.rewards.waiting_line import Item

START_TIMEOUT_S = 60.0
_STALL_MARGIN_S = 15.0


class VerifierPool:
    """Judges samples with the verifiers that their prompts name. Safe to call from several threads.

    recipe_dir: where "module:function" is looked for first.
    num_workers: processes, at least 1. timeout_s: wall clock per sample.
    memory_bytes: address space of each process. start_timeout_s: for a worker to start, and for it to load
    one verifier (an import of reasoning-gym takes a second or more).

    Every method but `close` raises, at the next call after it happened: VerifierContractError for a wrong
    number of results, ConfigError for a verifier that cannot be found or imported, VerifierFailureError for
    workers that cannot start. After that the pool is closed.
    """

    def __init__(
        self,
        recipe_dir: Path | None,
        *,
        num_workers: int,
        timeout_s: float,
        memory_bytes: int,
        start_timeout_s: float = START_TIMEOUT_S,
    ):
        assert num_workers >= 1, "a pool needs a worker; use Scorer to judge in this process"
        limits = Limits(num_workers, timeout_s, start_timeout_s, memory_bytes)
        self._times = ScoringTimes()
        self._supervisor = Supervisor(None if recipe_dir is None else recipe_dir.resolve(), limits, self._times)
        self._stall_limit_s = timeout_s + start_timeout_s + _STALL_MARGIN_S
        self._lock = threading.Lock()
        self._open_round, self._open_ids = Round(), set[str]()

    def __enter__(self) -> Self:
        self._supervisor.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and what they have started, within a few seconds. May be called twice."""
        self._supervisor.shut_down()

    def prepare(self, verifiers: Sequence[str]) -> None:
        """Wait until every worker has started and loaded these verifiers, so that mistakes show at the start."""
        self._supervisor.load(verifiers)
        self._wait(lambda: self._supervisor.all_loaded(verifiers), threading.Condition())

    def submit(self, samples: Sequence[Sample]) -> None:
        """Hand in samples to be judged; returns at once. An id may be submitted once before each `collect`."""
        with self._lock:
            ids = [sample.id for sample in samples]
            assert len(set(ids)) == len(ids), f"samples with the same id: {ids}"
            twice = self._open_ids & set(ids)
            assert not twice, f"submitted twice before a collect: {sorted(twice)}"
            self._open_ids |= set(ids)
            self._hand_in(samples, self._open_round)

    def collect(self) -> dict[str, Verdict]:
        """The verdicts of all samples submitted since the last `collect`, by id, in the order of submission.

        Waits for them. The wait is bounded: each sample ends within its limits, and VerifierFailureError is
        raised should nothing happen for longer than a sample and a start may take.
        """
        with self._lock:
            round_, self._open_round, self._open_ids = self._open_round, Round(), set()
        return dict(zip(round_.sample_ids, self._verdicts(round_), strict=True))

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in order, as `Scorer.score`; what was submitted before is left alone."""
        round_ = Round()
        self._hand_in(samples, round_)
        return self._verdicts(round_)

    def slowest(self, num_samples: int = 5) -> list[SampleTime]:
        """The samples that took longest since the pool was opened, slowest first."""
        return self._times.slowest(num_samples)

    def times_by_verifier(self) -> list[VerifierTime]:
        """Busy seconds of each verifier, busiest first."""
        return self._times.by_verifier()

    @property
    def busy_s(self) -> float:
        """Seconds in which workers judged, summed over the workers."""
        return self._times.busy_s

    def _hand_in(self, samples: Sequence[Sample], round_: Round) -> None:
        assert self._supervisor.ident is not None, "open the pool by a with statement first"
        if self._supervisor.error is not None:
            raise self._supervisor.error
        data = [_pickled(sample) for sample in samples]
        indices = round_.add([sample.id for sample in samples])
        self._supervisor.enqueue(
            [
                Item(sample.id, sample.prompt.verifier, content, round_, index)
                for sample, content, index in zip(samples, data, indices, strict=True)
            ]
        )

    def _verdicts(self, round_: Round) -> list[Verdict]:
        self._wait(lambda: round_.num_pending == 0, round_.changed)
        return round_.verdicts()

    def _wait(self, is_done: Callable[[], bool], changed: threading.Condition) -> None:
        """Wait until is_done, or raise: the supervisor's error, or VerifierFailureError if nothing moves."""
        supervisor, num_events, since = self._supervisor, -1, time.monotonic()
        with changed:
            while not is_done():
                if supervisor.error is not None:
                    raise supervisor.error
                if supervisor.num_events != num_events:
                    num_events, since = supervisor.num_events, time.monotonic()
                if not supervisor.is_alive() or time.monotonic() - since > self._stall_limit_s:
                    raise VerifierFailureError(
                        f"the verifier workers have done nothing for {time.monotonic() - since:.0f} s, "
                        f"longer than a sample and a start may take together"
                    )
                changed.wait(0.05)


def _pickled(sample: Sample) -> bytes:
    try:
        return pickle.dumps(to_verifier_sample(sample))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise VerifierFailureError(
            f"prompt {sample.prompt.id} cannot be sent to a verifier worker ({type(error).__name__}: {error}). "
            "Keep plain data in its payload, or set verifiers.num_workers to 0"
        ) from error
