"""Expected values: field case N32 and hand calculation."""

import pytest
import torch

from plait.algorithms.filters import fresh_tokens, has_signal, without_truncated
from plait.algorithms.shaping import length_reward, soft_overlong_penalty, with_format_reward


def test_n32_soft_overlong_penalty():
    result = soft_overlong_penalty(torch.tensor([80, 81, 85, 90, 100, 120]), max_tokens=100, buffer_tokens=20)
    assert result.tolist() == pytest.approx([0.0, -0.05, -0.25, -0.5, -1.0, -1.0], abs=1e-6)
    assert soft_overlong_penalty(torch.tensor([0]), max_tokens=100, buffer_tokens=20).tolist() == [0.0]


@pytest.mark.parametrize("buffer", [0, 101])
def test_overlong_buffer_must_fit(buffer):
    with pytest.raises(AssertionError, match="buffer"):
        soft_overlong_penalty(torch.tensor([1]), max_tokens=100, buffer_tokens=buffer)


def lengths(lengths_B, correct, group=None, counted=None):
    count = len(lengths_B)
    return length_reward(
        torch.tensor(lengths_B),
        torch.tensor(correct),
        torch.tensor(group if group is not None else [0] * count),
        torch.tensor(counted if counted is not None else [True] * count),
    ).tolist()


def test_length_reward_by_hand():
    # Lengths 10, 20, 50: 0.5 - 0, 0.5 - 0.25, 0.5 - 1; wrong answers get at most 0.
    assert lengths([10, 20, 50], [True, True, True]) == pytest.approx([0.5, 0.25, -0.5])
    assert lengths([10, 20, 50], [False, False, False]) == pytest.approx([0.0, 0.0, -0.5])


def test_length_reward_compares_within_the_group_and_only_who_is_counted():
    result = lengths([10, 30, 7, 7, 10, 1], [True] * 6, [0, 0, 1, 1, 2, 0], [True] * 5 + [False])
    assert result == pytest.approx([0.5, -0.5, 0.0, 0.0, 0.0, 0.0])


def test_format_reward():
    scores, formats = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])
    assert with_format_reward(scores, formats, weight=0.1).tolist() == pytest.approx([1.0, 0.1, 0.9])
    assert with_format_reward(scores, formats, weight=0.0).tolist() == [1.0, 0.0, 1.0]
    with pytest.raises(AssertionError, match="between 0 and 1"):
        with_format_reward(scores, formats, weight=1.5)


def test_has_signal():
    scores, group = torch.tensor([1.0, 0.0, 0.1, 0.1, 0.5, 1.0, 0.0]), torch.tensor([7, 3, 7, 3, 5, 3, 9])
    counted = torch.tensor([True, True, True, True, True, False, False])
    # Group 7: 1.0 and 0.1. Group 3: 0.0 and 0.1, the third is not counted. Group 5: one sample. Group 9: none.
    assert has_signal(scores, group, counted).tolist() == [True, True, True, True, False, True, False]


def test_an_uncounted_sample_makes_no_signal_and_equal_thirds_are_equal():
    assert (
        has_signal(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0, 0, 0]), torch.tensor([True, True, False])).tolist()
        == [False] * 3
    )
    third = torch.tensor([1 / 3] * 5, dtype=torch.float64)
    assert not has_signal(third, torch.zeros(5, dtype=torch.int64), torch.ones(5, dtype=torch.bool)).any()


def test_truncated_samples_leave():
    counted, truncated = torch.tensor([True, True, False]), torch.tensor([True, False, False])
    assert without_truncated(counted, truncated).tolist() == [False, True, False]


def test_fresh_tokens_by_token_and_by_sample():
    versions, sequence = torch.tensor([5, 6, 7, 7, 4]), torch.tensor([0, 0, 2, 2, 1])
    settings = {"newest_version": 7, "max_staleness": 1}
    assert fresh_tokens(versions, sequence, unit="token", **settings).tolist() == [False, True, True, True, False]
    assert fresh_tokens(versions, sequence, unit="sample", **settings).tolist() == [False, False, True, True, False]
    wider = {"newest_version": 7, "max_staleness": 2}
    assert fresh_tokens(versions, sequence, unit="sample", **wider).tolist() == [True, True, True, True, False]


def test_fresh_tokens_corners():
    nothing = torch.zeros(0, dtype=torch.int64)
    assert fresh_tokens(nothing, nothing, newest_version=3, max_staleness=0, unit="sample").tolist() == []
    with pytest.raises(AssertionError, match="newer"):
        fresh_tokens(torch.tensor([4]), torch.tensor([0]), newest_version=3, max_staleness=0, unit="token")
