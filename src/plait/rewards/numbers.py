"""Reading numbers as people and models write them, exactly and without evaluating anything."""

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_NUMBER_CHARS = 1000
"""Longer texts are not read as numbers: no answer has more digits, and int() of a long text is slow."""

RELATIVE_TOLERANCE = Fraction(1, 1_000_000)

# ASCII digits only: \d and int() also take digits of other scripts.
_WHOLE = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)"
_DECIMAL = re.compile(
    rf"(?P<whole>{_WHOLE})?(?:\.(?P<places>[0-9]*))?(?:[eE](?P<exponent>[+-]?[0-9]{{1,3}}))?", re.ASCII
)
_FRACTION = re.compile(
    rf"(?:(?P<mixed>[0-9]+)\s+)?(?P<top>{_WHOLE})\s*/\s*(?P<sign>[+-]?)(?P<bottom>{_WHOLE})", re.ASCII
)
_SIGN_AND_CURRENCY = re.compile(r"(?P<before>[+-]?)\s*(?P<currency>\$?)\s*(?P<after>[+-]?)\s*")

_LATEX_REPLACEMENTS = (
    ("\\left", ""),
    ("\\right", ""),
    ("\\dfrac", "\\frac"),
    ("\\tfrac", "\\frac"),
    ("{,}", ","),
    ("\\,", ""),
    ("\\!", ""),
    ("\\;", " "),
    ("\\ ", " "),
    ("\\$", "$"),
    ("\\%", "%"),
    ("\u2212", "-"),  # minus sign
)
_WRAPPERS = (
    re.compile(r"\$([^$]+)\$"),
    re.compile(r"\\\((.+)\\\)", re.DOTALL),
    re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}"),
)
_LATEX_FRACTION = re.compile(r"\\frac\s*\{\s*([^{}]*?)\s*\}\s*\{\s*([^{}]*?)\s*\}|\\frac\s*([0-9])\s*([0-9])")
_POWER_OF_TEN = re.compile(r"\s*(?:\\times|\\cdot|×)\s*10\s*\^\s*(?:\{\s*([+-]?[0-9]{1,3})\s*\}|([0-9]))")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact number. `half_place` is half a unit of its last written place if it has decimals, else None."""

    value: Fraction
    half_place: Fraction | None


def plain_text(text: str) -> str:
    """Take off the LaTeX that does not change what a short answer says; other LaTeX stays as it is."""
    text = text.strip()
    # The limit only has to exceed the nesting that people write; each round takes off one wrapper.
    for _ in range(4):
        inner = next((m[1].strip() for w in _WRAPPERS if (m := w.fullmatch(text))), None)
        if inner is None:
            break
        text = inner
    for old, new in _LATEX_REPLACEMENTS:
        text = text.replace(old, new)
    text = _LATEX_FRACTION.sub(lambda m: f" {m[1] or m[3]}/{m[2] or m[4]}", text)
    text = _POWER_OF_TEN.sub(lambda m: f"e{m[1] or m[2]}", text)
    return text.strip()


def parse_number(text: str) -> Number | None:
    """Read an integer, decimal, fraction or mixed number; None if the text is anything else.

    Accepts a sign, "$", thousands separators in the right places, a final ".", and a final "%", which is
    taken as a unit: "20%" reads as 20, so that it equals the gold "20" of a question that asks for percent.
    """
    if len(text) > MAX_NUMBER_CHARS:
        return None
    text = plain_text(text).removesuffix(".").rstrip()
    text = text.removesuffix("%").rstrip()
    head = _SIGN_AND_CURRENCY.match(text)
    assert head is not None, "every part of the pattern may be empty"
    if head["before"] and head["after"]:
        return None
    number = _parse_unsigned(text[head.end() :])
    if number is None or "-" not in (head["before"], head["after"]):
        return number
    return Number(-number.value, number.half_place)


def _parse_unsigned(body: str) -> Number | None:
    """Read what follows sign and currency."""
    if (match := _FRACTION.fullmatch(body)) is not None:
        bottom = _integer(match["bottom"])
        if bottom == 0:
            return None
        value = Fraction(_integer(match["top"]), bottom)
        if match["mixed"]:
            value += int(match["mixed"])
        return Number(-value if match["sign"] == "-" else value, None)
    match = _DECIMAL.fullmatch(body)
    if match is None or not (match["whole"] or match["places"]):
        return None
    places = match["places"] or ""
    scale = Fraction(10) ** (int(match["exponent"] or 0) - len(places))
    value = _integer((match["whole"] or "") + places) * scale
    return Number(value, scale / 2 if places or scale < 1 else None)


def _integer(digits: str) -> int:
    return int(digits.replace(",", ""))


def same_number(answer: Number, gold: Number) -> bool:
    """Exact equality, or, where the gold has decimals, equality within its written precision.

    That tolerance is one millionth of the gold, and never more than half a unit of its last place, so a
    long decimal does not accept a neighbour; a rounded answer to a longer gold is wrong.
    """
    difference = abs(answer.value - gold.value)
    if difference == 0 or gold.half_place is None:
        return difference == 0
    return difference <= min(RELATIVE_TOLERANCE * abs(gold.value), gold.half_place)
