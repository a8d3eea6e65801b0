"""The committed answer of a completion; expected values follow from the rules by hand."""

import time

import pytest

from plait.rewards.extract import extract


@pytest.mark.parametrize(
    ("completion", "answer", "rule"),
    [
        ("42", "42", "whole"),
        ("  42 \n", "42", "whole"),
        ("", None, "empty"),
        ("  \n\t ", None, "empty"),
        ("<think>7+5=12</think>12", "12", "whole"),
        ("2+2 first.</think>\nThe answer is 4.", "The answer is 4.", "whole"),  # D15: the tag lives in the prompt
        ("<think>\n2+2", None, "unclosed"),
        ("<think>a</think>5<think>b", None, "unclosed"),
        ("<think>a</think>5<think>b</think>6", "6", "whole"),
        ("<think>a</think>", None, "empty"),
        ("<think>a</think>\n\n", None, "empty"),
        ("<think><answer>9</answer></think>8", "8", "whole"),
        ("<think>maybe \\boxed{9}? no</think> The answer is \\boxed{8}.", "8", "boxed"),
        ("<answer>1</answer> no, <answer> 2 </answer>.", "2", "answer_tag"),
        ("\\boxed{3} <answer>2</answer> \\boxed{4}", "2", "answer_tag"),
        ("<answer>so \\boxed{5}</answer>", "5", "answer_tag"),
        ("<answer></answer>", None, "empty"),
        ("<answer>12", None, "unclosed"),
        ("<answer>1</answer> or <answer>2", "1", "answer_tag"),
        ("</answer>5", "</answer>5", "whole"),
        ("I first wrote \\boxed{18}; so it is \\boxed{21}.", "21", "boxed"),
        ("Hence \\fbox{57}.", "57", "boxed"),
        ("\\boxed{\\frac{\\sqrt{2}}{2}}", "\\frac{\\sqrt{2}}{2}", "boxed"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}", "boxed"),
        ("\\boxed{\\{}", "\\{", "boxed"),
        ("\\boxed{\\boxed{5}}", "5", "boxed"),
        ("\\boxed {5}", "5", "boxed"),
        ("Adding up, the answer is \\boxed{12", None, "unclosed"),
        ("\\boxed{18}, or \\boxed{21", "18", "boxed"),
        ("Put it in \\boxed{}", None, "empty"),
        ("a } b \\boxed{5}", "5", "boxed"),
        ("15*6=90\n#### 90\nEvery line was read twice.", "90", "marker"),
        ("#### 1\n#### 2", "2", "marker"),
        ("####\n\n7\nok", "7", "marker"),
        ("so ####", None, "empty"),
        ("#### 1 \\boxed{2}", "2", "boxed"),
        ("\u2028", None, "empty"),
    ],
)
def test_answer_and_rule(completion, answer, rule):
    extraction = extract(completion)
    assert (extraction.answer, extraction.rule) == (answer, rule)


@pytest.mark.parametrize(
    ("completion", "has_reasoning"),
    [
        ("<think>a</think>5", True),
        ("<think>\na</think>", True),
        ("a</think>5", True),
        ("<think></think>5", False),
        ("<think>\n\n</think>5", False),
        ("<think>\n<think>\n</think>5", False),
        ("</think>5", False),
        ("<think>a", False),
        ("5", False),
        ("", False),
    ],
)
def test_has_reasoning(completion, has_reasoning):
    assert extract(completion).has_reasoning is has_reasoning


@pytest.mark.parametrize("piece", ["\\boxed{", "{", "<answer>", "</think>", "####", "}", "<think>", "\\", "\\boxed{1}"])
def test_hostile_repetition_takes_linear_time(piece):
    begin = time.perf_counter()
    extract(piece * 50_000)
    assert time.perf_counter() - begin < 2
