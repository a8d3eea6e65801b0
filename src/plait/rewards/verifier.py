"""Calling verifiers so that a fault costs the sample it belongs to, and never the run.

A user's verifier is a function, named "module:function" in a recipe:

    def my_function(samples: Sequence[VerifierSample]) -> Sequence[float | Verdict | Abstain | Failed]
"""

import difflib
import hashlib
import math
import traceback
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from plait.batch import Sample, Verdict, VerdictKind
from plait.errors import ConfigError, VerifierContractError, Violation
from plait.rewards.builtin import BUILT_IN, ROW_VERIFIERS
from plait.rewards.extract import extract
from plait.rewards.gym_scorer import import_package
from plait.rewards.records import (
    ABSTAIN,
    Abstain,
    Failed,
    VerifierFunction,
    VerifierResult,
    VerifierSample,
)
from plait.rewards.user_functions import load_function

__all__ = [
    "ABSTAIN",
    "Abstain",
    "Control",
    "Failed",
    "Scorer",
    "VerifierFunction",
    "VerifierResult",
    "VerifierSample",
    "load_row_verifier",
    "load_verifier",
    "reason_of",
    "to_verifier_sample",
]

Control = Literal["verifier", "random", "constant"]

DETAILS = ("correct", "partial", "wrong", "no_answer")
MAX_REASON_CHARS = 500


def load_verifier(name: str, recipe_dir: Path | None) -> VerifierFunction:
    """The verifier of that name; ConfigError names the known ones, or what was looked for and where."""
    return BUILT_IN[name] if name in BUILT_IN else load_row_verifier(name, recipe_dir)


def load_row_verifier(name: str, recipe_dir: Path | None) -> VerifierFunction:
    """The same for a verifier that rows may name: not one that needs a task of its own."""
    if name in ROW_VERIFIERS:
        return ROW_VERIFIERS[name]
    if ":" in name:
        return load_function(name, recipe_dir)
    known = list(ROW_VERIFIERS)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f'Did you mean "{close[0]}"? ' if close else ""
    change = f'{hint}Known are {", ".join(known)}, and a function of yours as "module:function"'
    raise ConfigError([Violation(f'verifier "{name}"', "there is no verifier of that name", change)])


def to_verifier_sample(sample: Sample) -> VerifierSample:
    """What a verifier sees of a sample. What the prompt prefilled counts as said by the assistant."""
    completion = sample.prompt.prefix + sample.text
    answer = extract(completion).answer
    return VerifierSample(sample.id, sample.prompt, completion, answer, sample.finish == "length")


class Scorer:
    """Judges samples with the verifiers that their prompts name. Safe to call from several threads.

    recipe_dir: where "module:function" is looked for first.
    control: "random" gives a fair coin that depends on `seed` and the sample's id only, "constant" gives 0;
        both are experiments' controls and call no verifier.
    """

    def __init__(self, recipe_dir: Path | None = None, *, control: Control = "verifier", seed: int = 0):
        self._recipe_dir = recipe_dir
        self._control = control
        self._seed = seed
        self._functions: dict[str, VerifierFunction] = {}

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        """One verdict per sample, in order. Raises VerifierContractError on a wrong number of results."""
        if self._control != "verifier":
            return [self._control_verdict(sample.id) for sample in samples]
        return self.judge([to_verifier_sample(sample) for sample in samples])

    def judge(self, samples: Sequence[VerifierSample]) -> list[Verdict]:
        """The same for samples as a verifier sees them, always by the verifiers."""
        positions: dict[str, list[int]] = {}
        for position, sample in enumerate(samples):
            positions.setdefault(sample.prompt.verifier, []).append(position)
        verdicts: dict[int, Verdict] = {}
        for name, where in positions.items():
            verdicts.update(zip(where, self._verify(name, [samples[i] for i in where]), strict=True))
        return [verdicts[position] for position in range(len(samples))]

    def prepare(self, name: str) -> None:
        """Load a verifier and the package behind it before its first sample. Raises ConfigError."""
        self._function(name)
        if name == "reasoning_gym":
            import_package()

    def _control_verdict(self, sample_id: str) -> Verdict:
        is_one = self._control == "random" and _hash_bit(f"{self._seed}/{sample_id}")
        return Verdict("scored", float(is_one), detail="correct" if is_one else "wrong")

    def _function(self, name: str) -> VerifierFunction:
        if name not in self._functions:
            self._functions[name] = load_verifier(name, self._recipe_dir)
        return self._functions[name]

    def _verify(self, name: str, samples: list[VerifierSample]) -> list[Verdict]:
        """Verdicts of one verifier. Built-in ones are spared samples that committed to no answer."""
        function = self._function(name)
        asked = [s for s in samples if s.answer is not None or name not in BUILT_IN]
        results = iter(_call(name, function, asked) if asked else [])
        no_answer = Verdict("scored", 0.0, detail="no_answer")
        return [next(results) if s.answer is not None or name not in BUILT_IN else no_answer for s in samples]


def _hash_bit(text: str) -> bool:
    return bool(hashlib.sha256(text.encode()).digest()[0] & 1)


def _call(name: str, function: VerifierFunction, samples: list[VerifierSample]) -> list[Verdict]:
    """Call a verifier on a batch, and if it raises, once per sample: only the raising ones fail."""
    try:
        results = function(samples)
    # A verifier may raise anything, and exit() inside one must not end the run. KeyboardInterrupt passes.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        if len(samples) == 1:
            return [Verdict("failed", 0.0, reason=reason_of(error))]
        return [verdict for sample in samples for verdict in _call(name, function, [sample])]
    return [
        _to_verdict(result, sample)
        for result, sample in zip(_checked(name, results, len(samples)), samples, strict=True)
    ]


def _checked(name: str, results: Any, expected: int) -> Sequence[Any]:
    """The results, if they are one per sample."""
    is_array = isinstance(results, np.ndarray) and results.ndim == 1
    if not is_array and (not isinstance(results, Sequence) or isinstance(results, str | bytes)):
        raise VerifierContractError(
            f'verifier "{name}" returned {_article(results)} instead of a list of {expected} results, '
            "one per sample. Return a list in the order of the samples"
        )
    if len(results) != expected:
        raise VerifierContractError(
            f'verifier "{name}" returned {len(results)} results for {expected} samples. '
            "Return one result per sample, in their order, and plait.rewards.verifier.ABSTAIN "
            "where there is no opinion"
        )
    return results


def _article(value: Any) -> str:
    """Name a value without calling its repr, which a user's class may have broken."""
    if isinstance(value, str):
        return f"the text {value[:60]!r}"
    return "None" if value is None else f"a {type(value).__name__}"


def _to_verdict(result: Any, sample: VerifierSample) -> Verdict:
    """Turn one result into a verdict; what is no valid result becomes "failed" with the reason."""
    if isinstance(result, Verdict):
        return _checked_verdict(result, sample)
    if isinstance(result, Abstain) or result is Abstain:
        return Verdict("abstained", 0.0, reason=result.reason if isinstance(result, Abstain) else "")
    if isinstance(result, Failed):
        return Verdict("failed", 0.0, reason=_one_line(str(result.reason)))
    score, problem = _finite_number(result)
    if problem:
        return Verdict("failed", 0.0, reason=f"the verifier returned {problem}; expected a finite number")
    return Verdict("scored", score, detail=_detail(score, sample))


def _finite_number(value: Any) -> tuple[float, str]:
    """The value as a float and "", or 0 and what is wrong with it. True and False count as 1 and 0."""
    if not isinstance(value, Real | np.bool_):
        return 0.0, _article(value)
    try:
        number = float(value)
    except OverflowError:
        return 0.0, "an integer too large for a float"
    return (number, "") if math.isfinite(number) else (0.0, str(number))


def _checked_verdict(verdict: Verdict, sample: VerifierSample) -> Verdict:
    """A verifier's own Verdict, checked like every other result."""
    if verdict.kind not in get_args(VerdictKind):
        expected = ", ".join(get_args(VerdictKind))
        reason = f"the verifier returned a Verdict whose kind is {_article(verdict.kind)}; expected {expected}"
        return Verdict("failed", 0.0, reason=reason)
    if not isinstance(verdict.parts, dict):
        reason = f"the verifier returned a Verdict whose parts are {_article(verdict.parts)}; expected a dict"
        return Verdict("failed", 0.0, reason=reason)
    numbers = [("score", verdict.score)] if verdict.kind == "scored" else []
    for name, value in [*numbers, *verdict.parts.items()]:
        if not isinstance(name, str):
            reason = f"the verifier returned a Verdict with a part named {_article(name)}; expected text"
            return Verdict("failed", 0.0, reason=reason)
        _, problem = _finite_number(value)
        if problem:
            return Verdict("failed", 0.0, reason=f'the verifier returned a Verdict whose "{name}" is {problem}')
    if verdict.detail and verdict.detail not in DETAILS:
        expected = ", ".join(DETAILS)
        reason = f"the verifier returned a Verdict whose detail is {_article(verdict.detail)}; expected {expected}"
        return Verdict("failed", 0.0, reason=reason)
    reason = _one_line(str(verdict.reason))
    parts = {name: float(value) for name, value in verdict.parts.items()}
    if verdict.kind != "scored":
        return replace(verdict, score=0.0, reason=reason, detail="", parts=parts)
    score = float(verdict.score)
    return Verdict("scored", score, reason, verdict.detail or _detail(score, sample), parts)


def _detail(score: float, sample: VerifierSample) -> str:
    if score >= 1:
        return "correct"
    if score > 0:
        return "partial"
    return "wrong" if sample.answer is not None else "no_answer"


def reason_of(error: BaseException) -> str:
    """Type, message and place of an error in one line, for example "KeyError: 'x' (my.py:3 in score)"."""
    summary = traceback.TracebackException.from_exception(error)
    text = "".join(summary.format_exception_only())
    if summary.stack:
        frame = summary.stack[-1]
        text += f" ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"
    return _one_line(text)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_REASON_CHARS else line[: MAX_REASON_CHARS - 3] + "..."
