"""The verifier pool gives the verdicts of the Scorer, whoever judges what and when."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from plait.batch import Message, Prompt, Sample, Verdict
from plait.config import RunConfig, VerifiersConfig
from plait.errors import VerifierContractError, VerifierFailureError
from plait.rewards.pool import VerifierPool
from plait.rewards.rounds import ScoringTimes
from plait.rewards.scoring import ScoringHere, open_scoring
from plait.rewards.verifier import Scorer
from plait.rewards.waiting_line import CAUTION_SAMPLES, MAX_BATCH, BatchSizes, Item, WaitingLine
from plait.rewards.wire import MAX_REPLY_BYTES, ReplyReader, RubbishError, framed, verdict_from_json, verdict_to_json

MINE = """
from plait.batch import Verdict
from plait.rewards.verifier import ABSTAIN, Abstain, Failed

RESULTS = {
    "one": 1, "half": 0.5, "third": 1 / 3, "true": True, "negative": -1.5, "tiny": 5e-324, "huge": 1.7e308,
    "abstain": ABSTAIN, "unsure": Abstain("unsure"), "failed": Failed("no tool"), "none": None,
    "nan": float("nan"), "text": "1.0", "bad kind": Verdict("good", 1.0),
    "parts": Verdict("scored", 1, parts={"a": 1, "b": 0.1}), "detail": Verdict("scored", 0.2, detail="wrong"),
    "own": Verdict("failed", 1.0, reason="mine \\ud800 \\u2028", parts={"a": 1}), "own2": Verdict("abstained", 1.0),
    "no text": Verdict("scored", 1.0, parts={1: 1.0}), "why": Verdict("scored", 0.0, reason="because"),
    "part of failed": Verdict("failed", 0.0, parts={"a": object()}),
}

def judge(samples):
    return [{}["gold"] if s.answer == "raise" else RESULTS.get(s.answer, 0.0) for s in samples]

def count(samples):
    return [1.0] * (len(samples) - 1)
"""
RESULTS = (
    "one", "half", "third", "true", "negative", "tiny", "huge", "abstain", "unsure", "failed", "none", "nan", "text",
    "parts", "detail", "own", "own2", "raise", "why", "bad kind", "no text", "part of failed", "", "other",
)  # fmt: skip


def make_sample(number, text, verifier, answer="4", finish="stop", **payload):
    prompt = Prompt(f"p{number}", "t", (Message("user", "?"),), answer, verifier, payload, "")
    none = np.zeros(0, np.int32)
    mask, logprobs = none.astype(bool), none.astype(np.float32)
    return Sample(f"s{number}", prompt, (), none, logprobs, none, mask, finish, 0, text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe")
    (path / "pool_mine.py").write_text(MINE)
    return path


@pytest.fixture(scope="module")
def pool(folder):
    with VerifierPool(folder, num_workers=2, timeout_s=20.0, memory_bytes=2**31) as opened:
        yield opened


def table():
    """Samples of every kind, the verifiers mixed."""
    entry = {"question": "2+2", "answer": "4", "metadata": {}}
    gym = {"dataset": "basic_arithmetic", "params": {}, "entry": entry}
    rows = [(text, "answer", {}) for text in ("4", "4.0", "5", "", "<think>4", "so</think>\\boxed{4}", "9^9^9")]
    rows += [(text, "exact", {}) for text in ("4", "4.0")]
    rows += [(text, "numeric", {}) for text in ("4.00", "x")]
    rows += [(text, "format", {}) for text in ("<think>a</think>4", "4")]
    rows += [(text, "reasoning_gym", gym) for text in ("4", "5", "", "no")]
    rows += [(text, "pool_mine:judge", {}) for text in RESULTS]
    samples = [make_sample(i, text, verifier, **payload) for i, (text, verifier, payload) in enumerate(rows)]
    return [samples[(7 * i) % len(samples)] for i in range(len(samples))]


def test_same_verdicts_as_in_this_process(pool, folder):
    samples = table()
    assert len({sample.id for sample in samples}) == len(samples)
    expected = Scorer(folder).score(samples)
    assert {verdict.kind for verdict in expected} == {"scored", "failed", "abstained"}
    assert pool.score(samples) == expected
    assert pool.score([]) == []


def test_submitting_one_by_one_keeps_the_order(pool, folder):
    samples = table()
    for sample in samples:
        pool.submit([sample])
    between = pool.score(samples[:3])  # somebody else's samples in between, with the same ids
    assert between == Scorer(folder).score(samples[:3])
    collected = pool.collect()
    assert list(collected) == [sample.id for sample in samples]
    assert list(collected.values()) == Scorer(folder).score(samples)
    assert pool.collect() == {}


def test_an_id_is_submitted_once(pool):
    sample = make_sample(0, "4", "answer")
    pool.submit([sample])
    with pytest.raises(AssertionError, match="twice"):
        pool.submit([sample])
    with pytest.raises(AssertionError, match="same id"):
        pool.submit([replace(sample, id="new")] * 2)
    assert list(pool.collect()) == ["s0"]


def test_what_cannot_be_sent_is_named(pool):
    with pytest.raises(VerifierFailureError, match="prompt p7 cannot be sent"):
        pool.score([make_sample(7, "4", "answer", function=lambda: None)])


def test_large_tasks_pass(pool):
    samples = [make_sample(i, "4", "answer", filling="x" * 3_000_000) for i in range(8)]
    assert [verdict.score for verdict in pool.score(samples)] == [1.0] * 8


def test_a_wrong_count_stops_the_run(folder):
    with VerifierPool(folder, num_workers=2, timeout_s=20.0, memory_bytes=2**31) as pool:
        pool.submit([make_sample(i, "4", "pool_mine:count") for i in range(4)])
        with pytest.raises(VerifierContractError, match="pool_mine:count"):
            pool.collect()


def test_the_pool_loads_nothing_heavy():
    modules = "plait.rewards.scoring, plait.rewards.breaker, plait.rewards.worker_loop"
    code = f"import sys, {modules}; print({{'torch', 'reasoning_gym'}} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.strip() == "set()"


def test_open_scoring_follows_the_settings(folder):
    sample = make_sample(0, "4", "answer")
    assert VerifiersConfig().num_workers == 1
    assert RunConfig.model_fields["verifiers"].default == VerifiersConfig()
    for settings, control, kind, score in (
        (VerifiersConfig(), "verifier", VerifierPool, 1.0),
        (VerifiersConfig(num_workers=0), "verifier", ScoringHere, 1.0),
        (VerifiersConfig(), "constant", ScoringHere, 0.0),
    ):
        with open_scoring(settings, folder, control=control) as scoring:
            assert isinstance(scoring, kind)
            scoring.prepare(["answer", "pool_mine:judge"])
            scoring.submit([sample])
            assert scoring.score([sample])[0].score == score
            assert {i: verdict.score for i, verdict in scoring.collect().items()} == {"s0": score}
            assert scoring.collect() == {}
            assert len(scoring.slowest()) == (2 if kind is VerifierPool else 0)


def test_replies_are_put_together_from_pieces():
    stream = b"".join(framed(json.dumps({"kind": "x", "n": n}).encode()) for n in range(3))
    reader, replies = ReplyReader(), []
    for byte in stream:
        replies += reader.feed(bytes([byte]))
    assert [reply["n"] for reply in replies] == [0, 1, 2]


@pytest.mark.parametrize(
    "rubbish",
    [b"\xff" * 8, (MAX_REPLY_BYTES + 1).to_bytes(8, "little"), framed(b"{"), framed(b"[]"), framed(b'{"kind": 1}'),
     framed(b"\xff"), framed(b"[" * 100_000)],
)  # fmt: skip
def test_rubbish_is_recognised(rubbish):
    with pytest.raises(RubbishError):
        ReplyReader().feed(rubbish)


def test_verdicts_survive_json_exactly():
    verdict = Verdict("scored", 0.1 + 0.2, "é\ud800", "partial", {"a": 5e-324})
    assert verdict_from_json(json.loads(json.dumps(verdict_to_json(verdict)))) == verdict
    good = verdict_to_json(verdict)
    for change in ({"kind": "fine"}, {"score": "1"}, {"score": None}, {"parts": {"a": "1"}}, {"reason": 1}):
        with pytest.raises(RubbishError):
            verdict_from_json(good | change)
    with pytest.raises(RubbishError):
        verdict_from_json("scored")


def test_the_line_serves_in_order_and_alone_where_asked():
    line = WaitingLine()
    for number, name in enumerate("aabab"):
        line.put(Item(str(number), name, b"", None, number))
    assert [item.sample_id for item in line.take(2)] == ["0", "1"]
    first = line.take(8)
    assert [item.sample_id for item in first] == ["2", "4"]
    for item in first:
        item.alone = True
        line.put(item)
    assert len(line) == 3
    assert [[item.sample_id for item in line.take(8)] for _ in range(3)] == [["3"], ["2"], ["4"]]
    assert line.first() is None


def test_batch_sizes():
    sizes = BatchSizes(timeout_s=16.0)
    assert sizes.size("a") == MAX_BATCH == 8
    assert (sizes.limit_s(8), sizes.limit_s(2), sizes.limit_s(1)) == (2.0, 2.0, 16.0)
    sizes.succeeded("a", 8, 0.72)  # 0.09 s each: five take less than a quarter of 2 s
    assert sizes.size("a") == 5
    sizes.succeeded("slow", 1, 3.0)
    assert sizes.size("slow") == 1
    sizes.went_wrong("a")
    for _ in range(CAUTION_SAMPLES):
        assert sizes.size("a") == 1
        sizes.succeeded("a", 1, 0.09)
    assert sizes.size("a") == 5
    assert BatchSizes(timeout_s=0.5).limit_s(8) == 0.5
    assert BatchSizes(timeout_s=4.0).limit_s(8) == 1.0


def test_times():
    times = ScoringTimes()
    for number in range(100):
        times.add_sample("a" if number % 2 else "b", str(number), number / 10)
        times.add_busy("a" if number % 2 else "b", 0.5)
    times.add_busy("a", 1.0)
    assert [(time.sample_id, time.seconds) for time in times.slowest(2)] == [("99", 9.9), ("98", 9.8)]
    assert [(t.verifier, t.num_samples, t.busy_s) for t in times.by_verifier()] == [("a", 50, 26.0), ("b", 50, 25.0)]
    assert times.busy_s == 51.0
