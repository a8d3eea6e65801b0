"""Built-in judgements. Verdicts are a careful person's; numbers are worked out by hand."""

import random
import time

import pytest

from plait.rewards.answer import AnswerOptions, answer, exact, gold_problem, numeric
from plait.rewards.extract import extract
from plait.rewards.numbers import MAX_NUMBER_CHARS, parse_number

AUTO, TUPLE, TEXT = AnswerOptions(), AnswerOptions("tuple"), AnswerOptions("text")
ANY, ALL = AnswerOptions("auto", "any"), AnswerOptions("auto", "all")


@pytest.mark.parametrize(
    ("text", "gold", "correct"),
    [
        ("1250", "1,250", True),
        ("1,250", "1250", True),
        ("1,250.00", "1250", True),
        ("1 , 250", "1250", False),
        ("12,50", "1250", False),
        ("0,250", "250", False),
        ("$1,080", "1080", True),
        ("\\$18.00", "18", True),
        ("$5$", "5", True),
        ("-$5", "-5", True),
        ("$-5", "-5", True),
        ("--5", "5", False),
        ("-+5", "-5", False),
        ("+7", "7", True),
        ("-3.0", "-3", True),
        ("\u22123", "-3", True),
        ("4.", "4", True),
        (".5", "0.5", True),
        (".", "0", False),
        ("007", "7", True),
        ("0.375", "3/8", True),
        ("0.375", "\\frac{3}{8}", True),
        ("-\\dfrac12", "-\\frac{1}{2}", True),
        ("2\\frac{3}{4}", "11/4", True),
        ("2 3/4", "11/4", True),
        ("2\\frac{3}{4}", "3/2", False),
        ("6/8", "3/4", True),
        ("3/0", "0", False),
        ("0.33", "1/3", False),
        ("0.333333", "1/3", False),
        ("1/3", "0.33", False),
        ("20%", "20", True),
        ("12.5", "12.5\\%", True),
        ("0.2", "20", False),
        ("74\\%", "7.4\\%", False),
        ("0.00032", "3.2\\times 10^{-4}", True),
        ("3.2\\times 10^{4}", "3.2\\times 10^{-4}", False),
        ("1e3", "1000", True),
        ("12{,}345", "12345", True),
        ("\\text{19}", "19", True),
        ("0.1000000000000000055", "0.1", True),
        ("0.3000004", "0.3", False),
        ("123456.85", "123456.78", False),
        ("1234568", "1234567.0", False),
        ("\u0665", "5", False),
        ("5\u00b2", "52", False),
        ("0x10", "16", False),
        ("1_000", "1000", False),
        ("nan", "0", False),
        ("inf", "1e999", False),
        ("2^{10}", "1024", False),
        ("15*6", "90", False),
        ("90 dollars", "90", False),
        ("1/2/1", "1/2", False),
    ],
)
def test_numbers(text, gold, correct):
    assert answer(text, gold, AUTO) == float(correct)
    assert numeric(text, gold, AUTO) == float(correct)


@pytest.mark.parametrize(
    ("gold", "text"), [(7, "7"), (1250, "1,250"), (0.1, "0.1"), (1e-7, "0.0000001"), (-2.5, "-5/2")]
)
def test_numbers_as_golds(gold, text):
    assert answer(text, gold, AUTO) == 1.0


@pytest.mark.parametrize(
    ("text", "gold", "options", "correct"),
    [
        ("1,250", "1,250", TUPLE, True),
        ("(1, 250)", "1,250", TUPLE, True),
        ("1250", "1,250", TUPLE, False),
        ("(1,250)", "1,250", AUTO, False),  # without a type the gold is the number
        ("1250", "(1,250)", AUTO, False),
        ("(2,1)", "(1,2)", AUTO, False),
        ("( 1.0 , 4/2 )", "(1,2)", AUTO, True),
        ("\\left(1, 2\\right)", "(1,2)", AUTO, True),
        ("[0,1]", "(0,1)", AUTO, False),
        ("(0,1]", "(0,1]", AUTO, True),
        ("1,2,3", "1,2", AUTO, False),
        ("(1,,2)", "(1,2)", TUPLE, False),
        ("(1,2),(3,4)", "(1, 2), (3, 4)", AUTO, False),  # nested elements are compared as text
        ("(1,2),(3,4)", "(1,2), (3,4)", AUTO, True),
        ("a, b", "(a,b)", AUTO, True),
        (")1,2(", "(1,2)", TUPLE, False),
        ("  the   red\nfox ", "the red fox", AUTO, True),
        ("\\text{no solution}", "no solution", AUTO, True),
        ("007", "7", TEXT, False),
        ("7.0", "7", TEXT, False),
        ("cat, dog or bird", "dog", AUTO, False),
        ("16,\\ 17,\\ 18", "17", AUTO, False),
    ],
)
def test_tuples_and_texts(text, gold, options, correct):
    assert answer(text, gold, options) == float(correct)


@pytest.mark.parametrize(
    ("text", "rule", "correct"),
    [
        ("-2", ANY, True),
        ("2", ANY, True),
        ("2.0", ANY, True),
        ("2 or -2", ANY, False),
        ("2, -2", ANY, False),
        ("\\pm 2", ANY, False),
        ("-2 or 2", ALL, True),
        ("2, -2", ALL, True),
        ("\\{-2, 2\\}", ALL, True),
        ("-2 \\text{ and } 2", ALL, True),
        ("2", ALL, False),
        ("2, 2", ALL, False),
        ("2, -2, 3", ALL, False),
    ],
)
def test_several_golds(text, rule, correct):
    assert answer(text, ["2", "-2"], rule) == float(correct)


def test_all_golds_with_thousands():
    assert answer("1,250, 3", ["3", "1,250"], ALL) == 1.0
    assert answer("1,250", ["1", "250"], ALL) == 1.0
    assert answer("5", ["5"], ALL) == 1.0


def test_exact_knows_white_space_only():
    assert exact(" a  b ", "a b", AUTO) == 1.0
    assert exact("7.0", "7", AUTO) == 0.0
    assert exact("7", 7, AUTO) == 1.0
    assert exact("A", "a", AUTO) == 0.0


@pytest.mark.parametrize(
    "text",
    ["9^{9^{9^{9}}}", "9**9**9", "9^9^9", "(10^{10^{10}})!", "1e999999999", "9" * 200_000, "(" * 100_000, "1/" * 50_000,
     "1," * 50_000, "\\frac{" * 20_000, "{" * 50_000, "$" * 50_001, "-" * 100_000, "1 " * 50_000, "__import__('os')"],
)  # fmt: skip
@pytest.mark.parametrize("options", [AUTO, TUPLE])
def test_bombs_are_wrong_and_quick(text, options):
    begin = time.perf_counter()
    assert answer(text, "42", options) == 0.0
    assert answer(text, ["4", "2"], ALL) == 0.0
    assert time.perf_counter() - begin < 2


def test_number_of_the_greatest_length():
    assert parse_number("1" * MAX_NUMBER_CHARS) is not None
    assert parse_number("1" * (MAX_NUMBER_CHARS + 1)) is None
    long = "9" * 5000
    assert answer(long, long, AUTO) == 1.0  # as text


@pytest.mark.parametrize(
    ("verifier", "gold", "options", "said"),
    [
        ("answer", "", AUTO, "empty answer"),
        ("answer", "  ", AUTO, "empty answer"),
        ("answer", [], ANY, "empty list"),
        ("answer", ["2", ""], ANY, "empty answer"),
        ("answer", ["2", ["3"]], ANY, "list"),
        ("answer", ["2", None], ANY, "NoneType"),
        ("answer", ["2", "3"], AUTO, "answer_rule"),
        ("answer", "2", ANY, "not a list"),
        ("answer", True, AUTO, "bool"),
        ("answer", {"a": 1}, AUTO, "dict"),
        ("answer", float("nan"), AUTO, "finite"),
        ("answer", float("-inf"), AUTO, "finite"),
        ("answer", "seven", AnswerOptions("number"), "number"),
        ("answer", "7", TUPLE, "tuple"),
        ("numeric", "seven", AUTO, "number"),
        ("numeric", "1,2", TUPLE, "auto or number"),
        ("exact", "1,2", TUPLE, "auto or text"),
    ],
)
def test_golds_that_cannot_be_graded(verifier, gold, options, said):
    assert said in gold_problem(verifier, gold, options)


@pytest.mark.parametrize("gold", ["7", 7, 7.5, "1,250", "(1,2)", "no solution", "9" * 5000, "x" * 20_000])
def test_golds_that_can_be_graded(gold):
    assert gold_problem("answer", gold, AUTO) is None


def test_no_text_makes_a_verifier_raise():
    """Random texts from the characters that matter: never an exception, and a gold always matches itself."""
    source = random.Random(7)
    pieces = [
        *"0123456789.,/%$+-eE()[]{}^ ;",
        "\\frac",
        "\\text{",
        "\\{",
        "{,}",
        " and ",
        "\u2212",
        "\\boxed{",
        "#### ",
    ]
    for _ in range(3000):
        text, gold = ("".join(source.choices(pieces, k=source.randint(1, 9))) for _ in range(2))
        for options in (AUTO, TUPLE, TEXT, AnswerOptions("number")):
            assert answer(text, gold if gold.strip() else "7", options) in (0.0, 1.0)
        if gold.strip():
            assert gold_problem("answer", gold, AUTO) is None
            assert answer(gold, gold, AUTO) == 1.0
        extract(text)
