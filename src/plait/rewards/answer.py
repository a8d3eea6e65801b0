"""Built-in judgements of an answer: pure functions of (answer text, gold, options). Nothing is evaluated."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite
from typing import Any, get_args
from typing import Literal as L

from plait.rewards.numbers import parse_number, plain_text, same_number

AnswerType = L["auto", "number", "tuple", "text"]
AnswerRule = L["any", "all"]
ANSWER_TYPES: tuple[str, ...] = get_args(AnswerType)
ANSWER_RULES: tuple[str, ...] = get_args(AnswerRule)

MAX_TUPLE_CHARS = 10_000
"""Longer answers are compared as text only."""

_OPENING = "([{"
_CLOSING = ")]}"
# Parts of an answer that lists several: first without cutting thousands ("1,250, 3"), then at every comma.
_LIST_SPLITS = (
    re.compile(r",(?![0-9]{3}(?![0-9]))|;|\band\b|\bor\b"),
    re.compile(r",|;|\band\b|\bor\b"),
)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How a gold is to be read.

    answer_type: "number", "tuple" (order matters; commas separate elements, never thousands), "text", or
        "auto": as a number if the gold is one, else as a tuple, else as text.
    answer_rule: for several golds, "any" (one of them, and nothing else) or "all" (each of them, in any
        order); None for a single gold.
    """

    answer_type: AnswerType = "auto"
    answer_rule: AnswerRule | None = None


Matcher = Callable[[str, str, AnswerType], bool]


def exact(answer: str, gold: Any, options: AnswerOptions) -> float:
    """1.0 if the texts are equal up to white space, else 0.0. `gold` as for `answer`."""
    return _judge(answer, gold, options, lambda a, g, _: _same_text(a, g))


def numeric(answer: str, gold: Any, options: AnswerOptions) -> float:
    """1.0 if both are numbers and equal (see `same_number`), else 0.0. `gold` as for `answer`."""
    return _judge(answer, gold, options, lambda a, g, _: _same_as_number(a, g))


def answer(answer: str, gold: Any, options: AnswerOptions) -> float:
    """1.0 if the answer equals the gold as text, number or tuple, as `options` says, else 0.0.

    gold: str or number, or a list of them with `options.answer_rule`. ValueError for any other gold.
    """
    return _judge(answer, gold, options, _same_answer)


def gold_texts(gold: Any) -> list[str]:
    """The gold or golds as text; ValueError names what cannot be one."""
    golds = list(gold) if isinstance(gold, list | tuple) else [gold]
    if not golds:
        raise ValueError("an empty list of answers")
    return [_gold_text(item) for item in golds]


def gold_problem(verifier: str, gold: Any, options: AnswerOptions) -> str | None:
    """Why a built-in `verifier` could never grade this gold, or None if it can.

    The last test is that the gold is graded correct against itself.
    """
    try:
        texts = gold_texts(gold)
    except ValueError as error:
        return str(error)
    if isinstance(gold, list | tuple) != (options.answer_rule is not None):
        if options.answer_rule is None:
            return 'a list of answers without "answer_rule" ("any" or "all")'
        return f'"answer_rule" is {options.answer_rule!r}, but there is one answer, not a list'
    answer_type = options.answer_type
    if answer_type not in TYPES_OF[verifier]:
        return (
            f'"answer_type" is {answer_type!r}, but the verifier "{verifier}" takes {" or ".join(TYPES_OF[verifier])}'
        )
    matcher = MATCHERS[verifier]
    for text in texts:
        if not matcher(text, text, answer_type):
            wanted = "number" if verifier == "numeric" else answer_type
            return f"{_shown(text)} cannot be read as a {wanted}"
    return None


def _gold_text(item: Any) -> str:
    if isinstance(item, str):
        if not item.strip():
            raise ValueError("an empty answer")
        return item
    if isinstance(item, bool) or not isinstance(item, int | float | Decimal):
        raise ValueError(f"{_shown(item)} is a {type(item).__name__}, not text or a number")
    if not isinstance(item, int) and not isfinite(item):
        raise ValueError(f"{item} is not a finite number")
    return str(item)


def _shown(value: Any, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _judge(text: str, gold: Any, options: AnswerOptions, matcher: Matcher) -> float:
    """Apply `matcher` to the gold, or to several under the stated rule."""
    golds = gold_texts(gold)
    if not isinstance(gold, list | tuple):
        return float(matcher(text, golds[0], options.answer_type))
    if options.answer_rule is None:
        raise ValueError('several golds need answer_rule "any" or "all"')
    if options.answer_rule == "any":
        return float(any(matcher(text, item, options.answer_type) for item in golds))
    return float(any(_all_given(parts, golds, options.answer_type, matcher) for parts in _list_parts(text)))


def _list_parts(text: str) -> list[list[str]]:
    """The ways of reading an answer as a list of answers."""
    if len(text) > MAX_TUPLE_CHARS:
        return []
    readings = [[text]]
    body = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).replace("\\{", "{").replace("\\}", "}")
    body = plain_text(body)
    if len(body) > 2 and body[0] in "{[" and body[-1] in "}]":
        body = body[1:-1]
    for split in _LIST_SPLITS:
        parts = [part.strip() for part in split.split(body)]
        readings.append([part for part in parts if part])
    return readings


def _all_given(parts: Sequence[str], golds: Sequence[str], answer_type: AnswerType, matcher: Matcher) -> bool:
    """Whether parts and golds match one to one, in any order."""
    if len(parts) != len(golds):
        return False
    left = list(parts)
    for gold in golds:
        found = next((part for part in left if matcher(part, gold, answer_type)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _same_text(text: str, gold: str) -> bool:
    return text.split() == gold.split()


def _same_as_number(text: str, gold: str) -> bool:
    answer_number, gold_number = parse_number(text), parse_number(gold)
    return answer_number is not None and gold_number is not None and same_number(answer_number, gold_number)


def _same_answer(text: str, gold: str, answer_type: AnswerType) -> bool:
    if answer_type == "number":
        return _same_as_number(text, gold)
    if answer_type == "tuple":
        return _same_tuple(text, gold)
    if _same_text(text, gold) or _same_text(plain_text(text), plain_text(gold)):
        return True
    if answer_type == "text":
        return False
    # A gold such as "1,250" is a number and nothing else; only answer_type "tuple" makes it a pair.
    return _same_as_number(text, gold) if parse_number(gold) is not None else _same_tuple(text, gold)


def _same_tuple(text: str, gold: str) -> bool:
    answer_parts, gold_parts = _parse_tuple(text), _parse_tuple(gold)
    if answer_parts is None or gold_parts is None or answer_parts[0] != gold_parts[0]:
        return False
    pairs = list(zip(answer_parts[1], gold_parts[1], strict=False))
    return len(answer_parts[1]) == len(gold_parts[1]) and all(
        _same_text(a, g) or _same_as_number(a, g) for a, g in pairs
    )


def _parse_tuple(text: str) -> tuple[str, list[str]] | None:
    """Brackets and elements of "(1, 2)", "[1, 2)" or "1, 2" (which counts as round), or None."""
    if len(text) > MAX_TUPLE_CHARS:
        return None
    body = plain_text(text).replace("\\{", "{").replace("\\}", "}")
    brackets = "()"
    if body[:1] in _OPENING and body[-1:] in _CLOSING and len(body) >= 2 and _is_one_bracket(body):
        brackets, body = body[0] + body[-1], body[1:-1]
    elements, depth, start = [], 0, 0
    for position, char in enumerate(body):
        depth += (char in _OPENING) - (char in _CLOSING)
        if char == "," and depth == 0:
            elements.append(body[start:position].strip())
            start = position + 1
    elements.append(body[start:].strip())
    if len(elements) < 2 or not all(elements):
        return None
    return brackets, elements


def _is_one_bracket(body: str) -> bool:
    """Whether the first bracket is closed by the last character, and not before ("(1,2),(3,4)")."""
    depth = 0
    for char in body[:-1]:
        depth += (char in _OPENING) - (char in _CLOSING)
        if depth == 0:
            return False
    return True


MATCHERS: dict[str, Matcher] = {
    "answer": _same_answer,
    "exact": lambda a, g, _: _same_text(a, g),
    "numeric": lambda a, g, _: _same_as_number(a, g),
}

TYPES_OF: dict[str, tuple[str, ...]] = {
    "answer": ANSWER_TYPES,
    "exact": ("auto", "text"),
    "numeric": ("auto", "number"),
}
"""Answer types that do not contradict a verifier."""
