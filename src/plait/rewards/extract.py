"""The one reader of a completion's committed answer; training, evaluation and the command line all use it."""

import re
from dataclasses import dataclass
from typing import Literal

ExtractionRule = Literal["answer_tag", "boxed", "marker", "whole", "unclosed", "empty"]

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
ANSWER_OPEN = "<answer>"
ANSWER_CLOSE = "</answer>"
MARKER = "####"

# One alternative per kind of token that matters for braces. An escaped character (\{, \}, \\) never counts.
_BRACE_TOKEN = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Extraction:
    """What a completion committed to.

    answer: the committed answer, stripped; None where there is none.
    rule: what found it ("answer_tag", "boxed", "marker", "whole"), or why there is none ("unclosed": a tag
        or a box was opened and never closed; "empty": nothing stands where the answer should be).
    has_reasoning: non-blank text stands before the last `</think>`; the opening tag may live in the prompt.
    """

    answer: str | None
    rule: ExtractionRule
    has_reasoning: bool


def extract(completion: str) -> Extraction:
    """Read the committed answer of a whole completion (with what the prompt prefilled, or without it).

    Only the text after the last `</think>` counts. In it: the content of the last `<answer>...</answer>`,
    else of the last `\\boxed{...}` or `\\fbox{...}`, else the line after the last `####`, else all of it.
    Takes time linear in the length of the completion.
    """
    reasoning, closed, tail = completion.rpartition(THINK_CLOSE)
    has_reasoning = bool(closed) and bool(reasoning.replace(THINK_OPEN, "").replace(THINK_CLOSE, "").strip())
    if THINK_OPEN in tail:
        return Extraction(None, "unclosed", has_reasoning)
    answer, rule = _committed(tail)
    if answer is None or not answer.strip():
        return Extraction(None, "unclosed" if rule == "unclosed" else "empty", has_reasoning)
    return Extraction(answer.strip(), rule, has_reasoning)


def _committed(tail: str) -> tuple[str | None, ExtractionRule]:
    """Apply the rules in their order to the text after the reasoning."""
    before_close, closed, _ = tail.rpartition(ANSWER_CLOSE)
    if closed and ANSWER_OPEN in before_close:
        content = before_close.rpartition(ANSWER_OPEN)[2]
        boxed, _ = _last_box(content)
        return (content if boxed is None else boxed), "answer_tag"
    if ANSWER_OPEN in tail:
        return None, "unclosed"
    boxed, is_cut = _last_box(tail)
    if boxed is not None:
        return boxed, "boxed"
    if is_cut:  # cut off inside its only box: what the box would have held is not known
        return None, "unclosed"
    if MARKER in tail:
        lines = tail.rpartition(MARKER)[2].strip().splitlines()
        return (lines[0] if lines else None), "marker"
    return tail, "whole"


def _last_box(text: str) -> tuple[str | None, bool]:
    """Content of the box that starts last among the closed ones, and whether a box was left open.

    One pass with a stack: searching each box's end from its start would be quadratic for hostile text.
    """
    stack: list[int | None] = []  # start of a box's content; None for an ordinary brace
    last: tuple[int, int] | None = None
    for token in _BRACE_TOKEN.finditer(text):
        if token["box"]:
            stack.append(token.end())
        elif token["open"]:
            stack.append(None)
        elif token["close"] and stack:
            start = stack.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
    is_cut = any(start is not None for start in stack)
    return (None if last is None else text[last[0] : last[1]]), is_cut
