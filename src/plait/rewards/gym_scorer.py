"""Scoring with reasoning-gym's own scorers, behind a guard: several of them evaluate the answer as code.

Model output is untrusted. Of reasoning-gym 0.1.25, four scorers call `eval` on the answer, and five call
sympy's `parse_expr`, which evaluates too. Their answers reach them only if they are data, or arithmetic of
a bounded size. A few others expand numbers in the answer without a limit.
"""

import ast
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from math import ceil
from string import ascii_letters
from typing import Any, NamedTuple

from plait.batch import Verdict
from plait.rewards.records import VerifierResult, VerifierSample

LITERAL_TASKS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Their scorers call `eval(answer)`."""
EXPRESSION_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Their scorers call sympy's `parse_expr(answer)`."""
NUMBERS_ONLY_TASKS = frozenset({"countdown", "puzzle24"})
"""Of those, the ones whose answers have no variables."""

MAX_ANSWER_CHARS = 20_000
MAX_EXPRESSION_CHARS = 500
MAX_BITS = 4_000
"""Largest number that an expression may build up, in bits; the tasks' own numbers have fewer than 100."""
MAX_DEGREE = 60
MAX_NESTING = 2

_NO_NAMES: frozenset[str] = frozenset()
_NAMES = frozenset(ascii_letters) | frozenset(
    [
        "sin",
        "cos",
        "tan",
        "cot",
        "sec",
        "csc",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "exp",
        "log",
        "ln",
        "sqrt",
        "Abs",
        "pi",
    ]
)
_HUGE_EXPONENT = re.compile(r"\s*[+-]?[0-9.,_]+[eE][+-]?[0-9_]{4,}\s*")
_LITERAL_NODES = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Name, ast.Load,
    ast.UnaryOp, ast.USub, ast.UAdd,
)  # fmt: skip


def score_reasoning_gym(samples: Sequence[VerifierSample]) -> list[VerifierResult]:
    """Score samples of reasoning-gym tasks; `prompt.payload` has "dataset", "params" and "entry"."""
    return [_score(sample) for sample in samples]


def _score(sample: VerifierSample) -> VerifierResult:
    payload, answer = sample.prompt.payload, sample.answer
    assert answer is not None, "samples without an answer are scored before a built-in verifier"
    problem = unsafe_reason(payload["dataset"], answer, payload["entry"]["answer"])
    if problem is not None:
        return Verdict("scored", 0.0, reason=f"not evaluated: {problem}")
    dataset = _dataset(payload["dataset"], json.dumps(payload["params"], sort_keys=True))
    return float(dataset.score_answer(answer, payload["entry"]))


def import_package() -> None:
    """Import reasoning-gym now; it takes about a second."""
    import reasoning_gym  # noqa: F401


@lru_cache(maxsize=64)
def _dataset(name: str, params: str) -> Any:
    """A data set that only scores; its one instance is never looked at."""
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(params))


def unsafe_reason(dataset: str, answer: str, gold: str | None) -> str | None:
    """Why an answer must not reach the scorer of `dataset`, or None if it may."""
    if answer == gold and dataset not in EXPRESSION_TASKS:
        return None
    if len(answer) > MAX_ANSWER_CHARS:
        return f"{len(answer)} characters, more than {MAX_ANSWER_CHARS}"
    if _HUGE_EXPONENT.fullmatch(answer):
        return "an exponent of four or more digits"
    if dataset in LITERAL_TASKS:
        return _literal_problem(answer)
    if dataset in EXPRESSION_TASKS:
        return _expression_problem(dataset, answer)
    if dataset == "rubiks_cube" and re.search(r"[0-9]{3}", answer):
        return "a move repeated a hundred times or more"
    if dataset == "propositional_logic" and len(set(re.findall(r"[A-Z]", answer))) > 12:
        return "more than 12 variables, whose truth table would be too large"
    return None


def _parse(text: str) -> ast.Expression | None:
    try:
        return ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


def _literal_problem(answer: str) -> str | None:
    """`eval` may see data and bare names; text that is no Python expression makes it raise, which is harmless."""
    tree = _parse(answer)
    if tree is None or all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree)):
        return None
    return "a Python expression that is not plain data"


def _expression_problem(dataset: str, answer: str) -> str | None:
    if len(answer) > MAX_EXPRESSION_CHARS:
        return f"an expression of {len(answer)} characters, more than {MAX_EXPRESSION_CHARS}"
    tree = _parse(answer)
    if tree is None:
        return "not an arithmetic expression"
    names = _NO_NAMES if dataset in NUMBERS_ONLY_TASKS else _NAMES
    try:
        size = _size(tree.body, names)
    except (ValueError, OverflowError, RecursionError) as error:
        return str(error)
    if size.bits > MAX_BITS or size.degree > MAX_DEGREE or size.nesting > MAX_NESTING:
        return "an expression whose value would be too large"
    return None


class _Size(NamedTuple):
    """Upper bounds: bits of the coefficients, degree, and nesting of functions and symbolic exponents."""

    bits: int
    degree: int
    nesting: int


def _size(node: ast.expr, names: frozenset[str]) -> _Size:
    """Bound the size of an expression from its syntax alone; ValueError if it is more than arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return _Size(value.bit_length() if isinstance(value, int) else 64, 0, 0)
        case ast.Name(id=name) if name in names:
            return _Size(1, 1, 0)
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=operand):
            return _size(operand, names)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in names:
            inner = _size(argument, names)
            return _Size(inner.bits + 1, inner.degree + 1, inner.nesting + 1)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            return _power_size(_size(base, names), exponent, names)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.BitXor(), right=right):
            a, b = _size(left, names), _size(right, names)
            return _Size(max(a.bits, b.bits) + 1, max(a.degree, b.degree), max(a.nesting, b.nesting))
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div(), right=right):
            a, b = _size(left, names), _size(right, names)
            return _Size(a.bits + b.bits, a.degree + b.degree, max(a.nesting, b.nesting))
    raise ValueError(f"a {type(node).__name__} is not arithmetic")


def _power_size(base: _Size, exponent: ast.expr, names: frozenset[str]) -> _Size:
    """A numeric exponent multiplies bits and degree; a symbolic one (2**x) stays as it is."""
    size = _size(exponent, names)
    nesting = max(base.nesting, size.nesting)
    if size.degree > 0:
        return _Size(base.bits + size.bits, base.degree + size.degree, nesting + 1)
    operand = exponent.operand if isinstance(exponent, ast.UnaryOp) else exponent
    if isinstance(operand, ast.Constant):
        assert isinstance(operand.value, int | float), "_size admits no other constants"
        bound = ceil(operand.value)
    elif size.bits <= 16:
        bound = 2**size.bits
    else:
        raise ValueError("an exponent that is too large")
    return _Size(base.bits * bound, base.degree * bound, nesting)
