"""reasoning-gym's scorers behind the guard: what they would evaluate as code never reaches them."""

import re
import time
from pathlib import Path

import pytest
from test_verifier import make_sample

from plait.batch import Message, Prompt
from plait.rewards.gym_scorer import EXPRESSION_TASKS, LITERAL_TASKS, unsafe_reason
from plait.rewards.verifier import Scorer


def item(dataset, **params):
    import reasoning_gym

    entry = reasoning_gym.create_dataset(dataset, seed=3, size=5, **params)[1]
    payload = {"dataset": dataset, "params": params, "entry": entry}
    return Prompt("p", dataset, (Message("user", entry["question"]),), entry["answer"], "reasoning_gym", payload)


def verdict(dataset, text):
    return Scorer().score([make_sample(text, item(dataset))])[0]


@pytest.mark.parametrize(
    "dataset", sorted(LITERAL_TASKS | EXPRESSION_TASKS | {"chain_sum", "coin_flip", "basic_arithmetic"})
)
def test_gold_answers_are_correct(dataset):
    assert verdict(dataset, f"<think>so</think>{item(dataset).answer}").detail == "correct"


def test_wrong_partial_and_missing():
    gold = item("chain_sum").answer
    assert verdict("chain_sum", f"{gold}7").score < 1
    assert verdict("chain_sum", "none").detail == "wrong"
    assert verdict("chain_sum", f"<think>{gold}").detail == "no_answer"
    assert verdict("chain_sum", f"{gold}.00").detail == "correct"


@pytest.mark.parametrize("dataset", sorted(LITERAL_TASKS | EXPRESSION_TASKS))
def test_code_does_not_run(dataset, tmp_path):
    target = tmp_path / "touched"
    for code in (
        f"__import__('pathlib').Path({str(target)!r}).touch()",
        f"[__import__('pathlib').Path({str(target)!r}).touch()]",
        f"(lambda: open({str(target)!r}, 'w'))()",
        f"f'{{open({str(target)!r}, chr(119))}}'",
    ):
        assert verdict(dataset, code).score == 0.0
        assert not target.exists()


@pytest.mark.parametrize(
    "dataset", [*sorted(LITERAL_TASKS | EXPRESSION_TASKS), "coin_flip", "chain_sum", "rubiks_cube"]
)
@pytest.mark.parametrize(
    "bomb",
    ["9**9**9**9", "9^9^9", "((9**99)**99)**99", "factorial(10**10)", "[1]*10**9", "(" * 5000, "1e999999999",
     "R99999999", "exp(exp(exp(exp(99))))", "2**(2**(2**99))", "1" * 5000],
)  # fmt: skip
def test_bombs_are_quick(dataset, bomb):
    begin = time.perf_counter()
    assert verdict(dataset, bomb).score < 0.2
    assert time.perf_counter() - begin < 5


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("countdown", "(3 + 4)*5 - 6/2"),
        ("puzzle24", "(1 + 2 + 3)*4"),
        ("simple_integration", "3*x**5/5 - x**(1/2) + C"),
        ("simple_integration", "x**0.5 + C"),
        ("intermediate_integration", "-cos(2*x)*exp(x)/2 + C"),
        ("polynomial_multiplication", "24*x**6 - 3*x**2*y**2 + 7"),
        ("n_queens", "_ Q _ _\n_ _ _ Q\nQ _ _ _\n_ _ Q _"),
        ("binary_matrix", "[[0, 1], [1, 2]]"),
        ("string_insertion", "['A', 'B']"),
        ("string_insertion", "ABCDE"),
        ("spiral_matrix", "1 2 3 -4"),
        ("chain_sum", "-1234"),
    ],
)
def test_ordinary_answers_pass_the_guard(dataset, answer):
    assert unsafe_reason(dataset, answer, "gold") is None


def test_the_guarded_tasks_are_those_that_evaluate():
    """A new reasoning-gym whose other scorers evaluate answers must not pass unseen."""
    import reasoning_gym

    found = set()
    for file in Path(reasoning_gym.__file__).parent.rglob("*.py"):
        if re.search(r"\b(eval|exec|sympify|parse_expr)\((user_)?answer\b", file.read_text(encoding="utf-8")):
            found.add(file.stem)
    assert found == LITERAL_TASKS | EXPRESSION_TASKS
