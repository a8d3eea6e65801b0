"""The worked solutions are right, and their answers score 1 under reasoning-gym."""

from __future__ import annotations

import re

import pytest
import reasoning_gym

from plait.data.worked_solutions import (
    STEPS,
    NoWorkedSolutionError,
    add_columns,
    completion,
    subtract_columns,
    worked_steps,
)

INSTANCES = 200
FAMILIES = [
    ("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 4, "max_digits": 6}),
    ("chain_sum", {"min_terms": 2, "max_terms": 5, "min_digits": 1, "max_digits": 4}),
    ("chain_sum", {"min_terms": 2, "max_terms": 3, "max_digits": 3, "allow_negation": True}),
    (
        "simple_equations",
        {
            "min_terms": 2,
            "max_terms": 2,
            "min_value": 1,
            "max_value": 99999,
            "operators": ("+", "-"),
            "operators_weights": [0.5, 0.5],
        },
    ),
    ("complex_arithmetic", {"operations": ("*",), "operations_weights": [1.0]}),
    ("complex_arithmetic", {"operations": ("+", "-"), "operations_weights": [0.5, 0.5]}),
    ("simple_geometry", {"min_sides": 3, "max_sides": 6}),
]
EQUATION = re.compile(r"(-?\d+(?:[+*-]-?\d+)+)=(-?\d+)")
TERM = re.compile(r"(-?\d+)([+*-])(-?\d+)([+-]1)?")


def evaluate(text: str) -> int:
    """Work out ``a?b`` or ``a?b±1`` without the code under test."""
    left, operator, right, extra = TERM.fullmatch(text).groups()
    results = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
    return results[operator] + int(extra or 0)


def digits_from_columns(steps: str) -> str:
    """The number that the columns spell, read from the right."""
    results = re.findall(r"=(\d+)", steps)
    return results[-1] + "".join(result[-1] for result in reversed(results[:-1]))


@pytest.mark.parametrize(("name", "parameters"), FAMILIES)
def test_every_answer_scores_one_and_every_equation_is_true(name, parameters):
    dataset = reasoning_gym.create_dataset(name, size=INSTANCES, seed=11, **parameters)
    equations = 0
    for item in dataset:
        direct = completion(item, name, reason=False)
        reasoned = completion(item, name, reason=True)
        opening, _, rest = reasoned.partition("<think>")
        steps, _, answer = rest.partition("</think>")
        assert opening == ""
        assert answer == direct
        assert dataset.score_answer(direct, item) == 1.0
        for left, right in EQUATION.findall(steps):
            equations += 1
            assert evaluate(left) == int(right), reasoned
    assert equations >= INSTANCES


def test_every_family_is_tested():
    assert {name for name, _ in FAMILIES} == set(STEPS)


@pytest.mark.parametrize("name", ["chain_sum", "simple_equations"])
def test_columns_spell_the_answer(name):
    parameters = next(parameters for family, parameters in FAMILIES if family == name)
    parameters = {**parameters, "max_terms": 2}
    for item in reasoning_gym.create_dataset(name, size=INSTANCES, seed=12, **parameters):
        steps = worked_steps(item, name)
        sign = "-" if re.match(r"([a-z]=)?-\(", steps) else ""
        _, _, columns = steps.partition(": ")
        assert int(sign + digits_from_columns(columns)) == int(item["answer"])


@pytest.mark.parametrize(("first", "second"), [(0, 0), (9, 1), (99999, 1), (120, 45), (5, 1005)])
def test_add_columns_spells_the_sum(first, second):
    assert int(digits_from_columns(add_columns(first, second))) == first + second


@pytest.mark.parametrize(("larger", "smaller"), [(0, 0), (10, 1), (10000, 1), (120, 45), (77, 77)])
def test_subtract_columns_spells_the_difference(larger, smaller):
    assert int(digits_from_columns(subtract_columns(larger, smaller))) == larger - smaller


def test_subtract_columns_refuses_a_negative_difference():
    with pytest.raises(ValueError, match="smaller number"):
        subtract_columns(3, 4)


@pytest.mark.parametrize("reason", [True, False])
def test_a_family_without_solutions_is_refused_by_name(reason):
    with pytest.raises(NoWorkedSolutionError, match=r"'sudoku'.*chain_sum"):
        completion({"question": "", "answer": "", "metadata": {}}, "sudoku", reason=reason)


def test_division_of_complex_numbers_is_refused():
    dataset = reasoning_gym.create_dataset(
        "complex_arithmetic", size=1, seed=1, operations=("/",), operations_weights=[1.0]
    )
    with pytest.raises(NoWorkedSolutionError, match="not for '/'"):
        worked_steps(dataset[0], "complex_arithmetic")


def test_an_equation_with_a_coefficient_is_refused():
    item = {"question": "", "answer": "3", "metadata": {"equation": "2*x + 1 = 7", "variable": "x"}}
    with pytest.raises(NoWorkedSolutionError, match="2"):
        worked_steps(item, "simple_equations")
