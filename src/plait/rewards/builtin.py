"""The verifiers that ship with Plait, as functions of samples like a user's own."""

from collections.abc import Callable, Sequence
from typing import Any

from plait.rewards import answer as judge
from plait.rewards.extract import extract
from plait.rewards.gym_scorer import score_reasoning_gym
from plait.rewards.records import Failed, VerifierFunction, VerifierResult, VerifierSample

AnswerFunction = Callable[[str, Any, judge.AnswerOptions], float]


def options_of(payload: dict[str, Any]) -> judge.AnswerOptions:
    """Options of a row: its fields "answer_type" and "answer_rule"; absent or null ones are the defaults."""
    answer_type, answer_rule = (payload.get(key) for key in ("answer_type", "answer_rule"))
    return judge.AnswerOptions("auto" if answer_type is None else answer_type, answer_rule)


def _answer_verifier(function: AnswerFunction) -> VerifierFunction:
    def verify(samples: Sequence[VerifierSample]) -> list[VerifierResult]:
        return [_judge(function, sample) for sample in samples]

    return verify


def _judge(function: AnswerFunction, sample: VerifierSample) -> VerifierResult:
    assert sample.answer is not None, "samples without an answer are scored before a built-in verifier"
    if sample.prompt.answer is None:
        # Scoring it 0 or 1 would teach something; without a gold there is nothing to say.
        return Failed(f'prompt {sample.prompt.id} has no gold answer, which "{sample.prompt.verifier}" needs')
    return function(sample.answer, sample.prompt.answer, options_of(sample.prompt.payload))


def _format(samples: Sequence[VerifierSample]) -> list[VerifierResult]:
    """1 for reasoning closed by `</think>` and then an answer; the opening tag may live in the prompt."""
    return [float(extract(s.completion).has_reasoning and s.answer is not None) for s in samples]


ROW_VERIFIERS: dict[str, VerifierFunction] = {
    "answer": _answer_verifier(judge.answer),
    "exact": _answer_verifier(judge.exact),
    "numeric": _answer_verifier(judge.numeric),
    "format": _format,
}
"""Those that a row may name; of them only "format" needs no gold."""

BUILT_IN: dict[str, VerifierFunction] = {**ROW_VERIFIERS, "reasoning_gym": score_reasoning_gym}
