"""The order of events of the synchronous schedule, against an executor that does nothing."""

from plait.executor.protocol import Piece
from plait.schedules.sync import sync
from plait.stages.graph import Stage, StepGraph


def _graph(rounds):
    def stage(name, reads, writes, repeat=1):
        return Stage(name, (), "host", frozenset(reads), frozenset(writes), "step", repeat)

    return StepGraph(
        [
            stage("update_policy", {"samples", "advantages"}, {"weights@v+1"}),
            stage("generate", {"prompts"}, {"samples"}, rounds),
            stage("score_verifier", {"samples"}, {"verdicts"}, rounds),
            stage("advantage", {"verdicts"}, {"advantages"}),
            stage("sync_weights", {"weights@v+1"}, {"engine@v+1"}),
        ],
        inputs={"prompts"},
        outputs={"engine@v+1"},
    )


class Recorder:
    """missing: groups still missing after each round of scoring, over the whole run."""

    def __init__(self, rounds=1, missing=(), stop_before=None):
        self.graph = _graph(rounds)
        self.events, self._missing, self._stop_before = [], list(missing), stop_before

    def begin_step(self, step):
        return step != self._stop_before

    def submit(self, piece):
        self._piece = piece

    def next_completed(self):
        self.events.append(f"{self._piece.step}:{self._piece.stage}:{self._piece.round}")
        return self._piece

    def num_missing_groups(self, step):
        return self._missing.pop(0) if self._missing else 0

    def sync_weights(self, version):
        self.events.append(f"sync {version}")

    def end_step(self, step):
        self.events.append(f"end {step}")


STEP = [
    "{0}:generate:0",
    "{0}:score_verifier:0",
    "{0}:advantage:0",
    "{0}:update_policy:0",
    "sync {0}",
    "end {0}",
]


def test_each_stage_ends_before_the_next():
    recorder = Recorder()
    sync(recorder, first_step=1, last_step=2)
    assert recorder.events == [event.format(step) for step in (1, 2) for event in STEP]


def test_goes_on_from_a_later_step():
    recorder = Recorder()
    sync(recorder, first_step=3, last_step=3)
    assert recorder.events == [event.format(3) for event in STEP]


def test_stops_between_steps():
    recorder = Recorder(stop_before=2)
    sync(recorder, first_step=1, last_step=5)
    assert recorder.events == [event.format(1) for event in STEP]


def test_refills_until_nothing_is_missing():
    recorder = Recorder(rounds=4, missing=[2, 1, 0])
    sync(recorder, first_step=1, last_step=1)
    assert recorder.events[:7] == [
        *(f"1:{stage}:{n}" for n in range(3) for stage in ("generate", "score_verifier")),
        "1:advantage:0",
    ]


def test_refilling_is_bounded():
    recorder = Recorder(rounds=2, missing=[3, 3, 3, 3])
    sync(recorder, first_step=1, last_step=1)
    assert sum(event.startswith("1:generate") for event in recorder.events) == 2


def test_pieces_order_by_step_then_stage_then_round():
    assert sorted([Piece(2, "a"), Piece(1, "b", 1), Piece(1, "b")]) == [
        Piece(1, "b"),
        Piece(1, "b", 1),
        Piece(2, "a"),
    ]
