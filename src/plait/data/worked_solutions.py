"""Worked solutions for a few reasoning-gym families.

The starter model is warmed up on supervised rows made here. Each row is either
the answer at once or ``<think>steps</think>`` followed by the answer, so the
model learns both ways and reinforcement learning can prefer the better one.

Every ``*_steps`` function takes a reasoning-gym item (a mapping with
``question``, ``answer`` and ``metadata``) and returns the steps as text. All
equations in the steps are literally true, one operation each, so a very small
model can learn them. Nothing here needs torch or reasoning-gym itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

Item = Mapping[str, Any]


class NoWorkedSolutionError(ValueError):
    """There is no worked solution for this family, or not for this kind of item."""


def add_columns(first: int, second: int) -> str:
    """Write ``first + second`` (both >= 0) column by column from the right.

    Each column is one equation, such as ``6+7=13`` and then, with the carry,
    ``4+8+1=13``. A missing digit of the shorter number is written as 0.
    """
    width = max(len(str(first)), len(str(second)))
    columns, carry = [], 0
    for upper, lower in _digit_pairs(first, second, width):
        total = upper + lower + carry
        columns.append(f"{upper}+{lower}{'+1' if carry else ''}={total}")
        carry = int(total >= 10)
    return " ".join(columns)


def subtract_columns(larger: int, smaller: int) -> str:
    """Write ``larger - smaller`` (larger >= smaller >= 0) column by column from the right.

    A column that has to borrow is written with ten more (``13-7=6``) and the
    next one gives it back (``4-2-1=1``).
    """
    if larger < smaller:
        raise ValueError(f"cannot subtract {smaller} from the smaller number {larger} in columns")
    columns, borrow = [], 0
    for upper, lower in _digit_pairs(larger, smaller, len(str(larger))):
        back, borrow_next = borrow, int(upper - lower - borrow < 0)
        upper += 10 * borrow_next
        columns.append(f"{upper}-{lower}{'-1' if back else ''}={upper - lower - back}")
        borrow = borrow_next
    return " ".join(columns)


def _digit_pairs(first: int, second: int, width: int) -> list[tuple[int, int]]:
    """Digits of both numbers side by side, from the right, padded to ``width``."""
    upper, lower = str(first).zfill(width), str(second).zfill(width)
    return [(int(a), int(b)) for a, b in zip(reversed(upper), reversed(lower), strict=True)]


def _signed_sum_steps(left: int, right: int) -> str:
    """Columns for ``left + right``, whatever their signs.

    Numbers of one sign are added; otherwise the smaller size is taken from
    the larger. The first words name the operation that the columns carry out.
    """
    if (left < 0) == (right < 0):
        sign = "-" if left < 0 else ""
        return f"{sign}({abs(left)}+{abs(right)}): {add_columns(abs(left), abs(right))}"
    larger, smaller = max(abs(left), abs(right)), min(abs(left), abs(right))
    negative = left + right < 0
    return f"{'-' if negative else ''}({larger}-{smaller}): {subtract_columns(larger, smaller)}"


def chain_sum_steps(item: Item) -> str:
    """Steps for ``chain_sum``: each operation in columns, from left to right.

    With more than two terms every operation ends with the running total.
    """
    parts = item["metadata"]["expression"].split()
    total = int(parts[0])
    lines = []
    for operator, number in zip(parts[1::2], parts[2::2], strict=True):
        term = int(number) if operator == "+" else -int(number)
        columns = _signed_sum_steps(total, term)
        total += term
        lines.append(columns if len(parts) == 3 else f"{columns} so {total}")
    return "; ".join(lines)


def complex_arithmetic_steps(item: Item) -> str:
    """Steps for ``complex_arithmetic`` with ``+``, ``-`` and ``*`` (not division).

    A product (a+bi)(c+di) is written as the four small products and then the
    real part ac-bd and the imaginary part ad+bc.
    """
    metadata = item["metadata"]
    a, b = (int(value) for value in metadata["num1"])
    c, d = (int(value) for value in metadata["num2"])
    operation = metadata["operation"]
    if operation == "+":
        return f"{a}+{c}={a + c} {b}+{d}={b + d}"
    if operation == "-":
        return f"{a}-{c}={a - c} {b}-{d}={b - d}"
    if operation != "*":
        raise NoWorkedSolutionError(f"complex_arithmetic has worked solutions for +, - and *, not for {operation!r}")
    ac, bd, ad, bc = a * c, b * d, a * d, b * c
    return f"{a}*{c}={ac} {b}*{d}={bd} {ac}-{bd}={ac - bd} {a}*{d}={ad} {b}*{c}={bc} {ad}+{bc}={ad + bc}"


def simple_geometry_steps(item: Item) -> str:
    """Steps for ``simple_geometry``: the angle sum, then one angle after the other taken off."""
    metadata = item["metadata"]
    triangles = int(metadata["n_sides"]) - 2
    rest = 180 * triangles
    steps = [f"180*{triangles}={rest}"]
    for angle in metadata["known_angles"]:
        if angle != int(angle):
            raise NoWorkedSolutionError(f"simple_geometry needs whole degrees, got {angle}")
        steps.append(f"{rest}-{int(angle)}={rest - int(angle)}")
        rest -= int(angle)
    return " ".join(steps)


_EQUATION = re.compile(
    r"(?:(?P<minuend>\d+) - )?(?P<variable>[a-z])(?: (?P<operator>[+-]) (?P<constant>\d+))?"
    r" = (?P<right>-?\d+)"
)


def simple_equations_steps(item: Item) -> str:
    """Steps for ``simple_equations`` without a coefficient: ``x + 5 = 9``, ``x - 5 = 9``, ``9 - x = 5``.

    The variable is put alone on the left, and the right side is worked out in columns.
    """
    equation = item["metadata"]["equation"]
    match = _EQUATION.fullmatch(equation)
    if match is None or (match["minuend"] and match["constant"]):
        raise NoWorkedSolutionError(f"no worked solution for the equation {equation!r}")
    variable, right = match["variable"], int(match["right"])
    if match["minuend"]:
        return f"{variable}={_signed_sum_steps(int(match['minuend']), -right)}"
    constant = int(match["constant"] or 0)
    change = -constant if match["operator"] == "+" else constant
    return f"{variable}={_signed_sum_steps(right, change)}"


STEPS: dict[str, Callable[[Item], str]] = {
    "chain_sum": chain_sum_steps,
    "complex_arithmetic": complex_arithmetic_steps,
    "simple_equations": simple_equations_steps,
    "simple_geometry": simple_geometry_steps,
}
"""Steps function by reasoning-gym task name."""


def worked_steps(item: Item, task_name: str) -> str:
    """The worked steps of an item, as text without any tags.

    Raises:
        NoWorkedSolutionError: the family, or this kind of item in it, has none.
    """
    try:
        steps = STEPS[task_name]
    except KeyError:
        known = ", ".join(sorted(STEPS))
        raise NoWorkedSolutionError(
            f"no worked solutions for the task {task_name!r}; there are some for: {known}"
        ) from None
    return steps(item)


def short_answer(item: Item, task_name: str) -> str:
    """The answer in the form the model is taught; it scores 1 under reasoning-gym.

    It is the item's own answer, except that complex numbers lose their decimals
    (``-3.0 + 4.0i`` becomes ``-3+4i``).
    """
    if task_name != "complex_arithmetic":
        return str(item["answer"])
    real, imaginary = (int(value) for value in item["metadata"]["result"])
    return f"{real}{imaginary:+d}i"


def completion(item: Item, task_name: str, reason: bool) -> str:
    """The supervised target for an item, without the end token.

    Args:
        item: a reasoning-gym item.
        task_name: the reasoning-gym name of the item's family.
        reason: whether to put the worked steps before the answer.

    Raises:
        NoWorkedSolutionError: the family has no worked solutions (also when
            ``reason`` is false, so a mixture never silently loses its steps).
    """
    steps = worked_steps(item, task_name)
    answer = short_answer(item, task_name)
    return f"{THINK_OPEN}{steps}{THINK_CLOSE}{answer}" if reason else answer
