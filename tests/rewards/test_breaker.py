"""The circuit breaker: stops for verifiers that fail, never for a model that is wrong."""

import numpy as np
import pytest

from plait.batch import Message, Prompt, Sample, Verdict
from plait.errors import VerifierFailureError
from plait.rewards.breaker import CircuitBreaker, count_outcomes
from plait.rewards.rounds import SampleTime

VERDICTS = {
    "correct": Verdict("scored", 1.0, detail="correct"),
    "partial": Verdict("scored", 0.5, detail="partial"),
    "wrong": Verdict("scored", 0.0, detail="wrong"),
    "no_answer": Verdict("scored", 0.0, detail="no_answer"),
    "abstained": Verdict("abstained", 0.0),
    "failed": Verdict("failed", 0.0, reason="KeyError: 'gold'"),
}


def scored(outcome, verifier="mine:judge", finish="stop", reason=""):
    none = np.zeros(0, np.int32)
    prompt = Prompt("p", "t", (Message("user", "?"),), None, verifier)
    verdict = Verdict("failed", 0.0, reason=reason) if reason else VERDICTS[outcome]
    return Sample("s", prompt, (), none, none, none, none, finish, 0, "", verdict)


def many(**counts):
    return [scored(outcome) for outcome, count in counts.items() for _ in range(count)]


def test_outcomes_are_counted_apart():
    samples = many(correct=3, partial=2, wrong=4, no_answer=1, abstained=5, failed=2)
    samples += [scored(outcome, finish="length") for outcome in VERDICTS]
    assert count_outcomes(samples) == {
        "correct": 4, "partial": 3, "wrong": 4, "no_answer": 1, "truncated": 2, "abstained": 6, "failed": 3,
    }  # fmt: skip


def test_a_share_at_the_limit_is_allowed_and_one_above_is_not():
    breaker = CircuitBreaker(0.5)
    breaker.record(many(wrong=8, failed=8))
    with pytest.raises(VerifierFailureError) as caught:
        breaker.record([scored("failed", reason="no result within 10 s")], [SampleTime(10.0, "s9", "mine:judge")])
    text = str(caught.value)
    assert 'verifier "mine:judge" failed on 9 of its last 17 samples (53%; verifiers.max_failed_share is 0.5)' in text
    assert "0 correct, 0 partial, 8 wrong, 0 no_answer, 0 truncated, 0 abstained, 9 failed" in text
    assert "8 x KeyError: 'gold'\n1 x no result within 10 s\nSlowest samples: s9 (10.00 s)\n" in text


def test_only_the_last_samples_count():
    breaker = CircuitBreaker(0.5, num_window_samples=16)
    breaker.record(many(wrong=1000))
    breaker.record(many(failed=8))
    with pytest.raises(VerifierFailureError, match="9 of its last 16"):
        breaker.record(many(failed=1))
    breaker = CircuitBreaker(0.5, num_window_samples=16)
    for _ in range(100):
        breaker.record(many(failed=8, correct=8))


def test_a_verifier_that_never_succeeded_stops_at_once():
    with pytest.raises(VerifierFailureError, match="not judged a single sample: all of the first 8 failed"):
        CircuitBreaker(0.99).record(many(failed=8))
    breaker = CircuitBreaker(0.99)
    breaker.record(many(failed=7))  # too few to conclude anything
    with pytest.raises(VerifierFailureError, match="all of the first 8"):
        breaker.record(many(failed=1))


def test_one_verifier_does_not_hide_behind_another():
    samples = many(correct=100) + [scored("failed", "other:judge") for _ in range(8)]
    with pytest.raises(VerifierFailureError, match="other:judge"):
        CircuitBreaker(0.5).record(samples)


@pytest.mark.parametrize("outcome", ["wrong", "no_answer", "abstained"])
def test_a_model_that_is_wrong_stops_nothing(outcome):
    CircuitBreaker(0.0).record(many(**{outcome: 100}))


def test_a_limit_of_one_never_stops():
    breaker = CircuitBreaker(1.0)
    breaker.record(many(failed=100))


def test_no_failure_at_all_is_allowed_by_zero():
    breaker = CircuitBreaker(0.0)
    breaker.record(many(correct=20))
    with pytest.raises(VerifierFailureError, match="1 of its last 21"):
        breaker.record(many(failed=1))
