"""Expected values: field cases N15 and N34, and hand calculation."""

import math

import pytest
import torch

from plait.algorithms.importance import effective_sample_share, importance_weights, kept_counts
from plait.algorithms.reduce import sequence_weights


def weights(differences, sequence=None, **settings):
    difference = torch.tensor(differences, dtype=torch.float64)
    sequence_R = torch.tensor(sequence if sequence is not None else [0] * len(differences))
    # The trainer's log-probabilities carry a gradient, as in the update where no pass was made before it.
    trainer = (difference - 1.5).requires_grad_()
    result = importance_weights(trainer, torch.full_like(difference, -1.5), sequence_R, **settings)
    assert not result.weights_R.requires_grad
    return result


N34 = [0.1, 1.2, -0.5]


def test_n34_importance_truncation():
    per_token = weights(N34, level="token", correction="truncate", high=2.0)
    assert per_token.weights_R.tolist() == pytest.approx([1.10517092, 2.0, 0.60653066], abs=1e-6)
    assert per_token.kept_R.all()
    truncated = weights(N34, level="sequence", correction="truncate", high=2.0)
    assert truncated.ratio_R.tolist() == pytest.approx([2.22554093] * 3, abs=1e-6)
    assert truncated.weights_R.tolist() == [2.0] * 3
    geometric = weights(N34, level="geometric_mean", correction="mask", low=0.5, high=2.0)
    assert geometric.weights_R.tolist() == pytest.approx([1.30560517] * 3, abs=1e-6)
    masked = weights(N34, level="sequence", correction="mask", high=2.0)
    assert masked.weights_R.tolist() == [0.0] * 3
    assert not masked.kept_R.any()


def test_n15_masked_weights_under_both_denominators():
    losses = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    result = weights([0.05, -1.2, 0.9, -7.0, 0.25], level="token", correction="mask", low=0.5, high=2.0)
    assert result.kept_R.tolist() == [True, False, False, False, True]
    total = (result.weights_R * losses).sum().item()
    surviving = kept_counts(result.kept_R, torch.zeros(5, dtype=torch.int64), 1)
    for counts, expected in ((surviving, 3.73569909), (torch.tensor([5]), 1.49427964)):
        weight = sequence_weights(counts, "token-mean", max_tokens=5).item()
        assert weight * total == pytest.approx(expected, abs=1e-6)


def test_sequences_do_not_mix():
    result = weights([0.1, 0.5, 0.3, 0.7, 0.2], [0, 1, 0, 1, 1], level="sequence", correction="mask", low=0.2, high=2.0)
    assert result.ratio_R.tolist() == pytest.approx([math.exp(x) for x in (0.4, 1.4, 0.4, 1.4, 1.4)], abs=1e-12)
    assert result.kept_R.tolist() == [True, False, True, False, False]


def test_equal_probabilities_weigh_one_at_every_level():
    for level in ("token", "sequence", "geometric_mean"):
        for correction in ("truncate", "mask"):
            result = weights([0.0] * 4, [0, 0, 1, 2], level=level, correction=correction, low=0.5, high=2.0)
            assert result.weights_R.tolist() == [1.0] * 4


def test_a_lower_bound_under_truncation_raises_small_weights():
    assert weights([-3.0, 0.0], level="token", correction="truncate", low=0.5, high=2.0).weights_R.tolist() == [0.5, 1]


def test_one_token_of_probability_zero_in_the_engine_does_not_overflow():
    result = weights([300.0, -300.0], level="token", correction="truncate", high=2.0)
    assert result.weights_R.tolist() == pytest.approx([2.0, 0.0], abs=1e-100)
    assert result.ratio_R[0].item() == pytest.approx(math.exp(20), rel=1e-12)
    narrow = importance_weights(
        torch.tensor([300.0]), torch.tensor([0.0]), torch.tensor([0]), level="token", correction="mask", high=2.0
    )
    assert narrow.weights_R.tolist() == [0.0]


def test_bounds_must_be_in_order():
    with pytest.raises(AssertionError, match="order"):
        weights([0.0], level="token", correction="mask", low=2.0, high=0.5)


def test_kept_counts_include_sequences_that_lost_everything():
    kept, sequence = torch.tensor([True, False, False, True]), torch.tensor([0, 0, 1, 2])
    assert kept_counts(kept, sequence, 4).tolist() == [1, 0, 1, 0]


def test_effective_sample_share_by_hand():
    assert effective_sample_share(torch.ones(7)) == 1.0
    assert effective_sample_share(torch.tensor([3.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_sample_share(torch.tensor([1.0, 2.0])) == pytest.approx(9 / 10)
    assert effective_sample_share(torch.zeros(3)) == 0.0
    assert effective_sample_share(torch.zeros(0)) == 0.0
