"""Expected values: the published equations in numpy float64, their central differences, and hand calculation."""

import math

import numpy as np
import pytest
import references
import torch

from plait.algorithms.pairwise import dpo, ipo, kto, mismatched_kl, preference_accuracy, simpo


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def arrays(seed, count=6):
    random = np.random.default_rng(seed)
    return [-random.exponential(20, count) for _ in range(4)]


def agrees(loss_of, objective, *points):
    """Value and gradient, in every varying input, of a torch loss and a numpy objective."""
    tensors = [torch.tensor(point, requires_grad=True) for point in points]
    loss = loss_of(*tensors).loss_B.sum()
    gradients = torch.autograd.grad(loss, tensors)
    assert loss.item() == pytest.approx(objective(*points), abs=1e-9)
    for index, gradient in enumerate(gradients):

        def along(x, index=index):
            return objective(*points[:index], x, *points[index + 1 :])

        expected = references.numeric_gradient(along, points[index])
        assert np.abs(expected).max() > 1e-4
        assert gradient.numpy() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_value_and_gradient(smoothing):
    chosen, rejected, ref_chosen, ref_rejected = arrays(0)

    def objective(c, r):
        h = 0.1 * (c - ref_chosen - r + ref_rejected)
        return (-(1 - smoothing) * np.log(sigmoid(h)) - smoothing * np.log(sigmoid(-h))).sum()

    def loss(c, r):
        return dpo(c, r, torch.tensor(ref_chosen), torch.tensor(ref_rejected), beta=0.1, label_smoothing=smoothing)

    agrees(loss, objective, chosen, rejected)


def test_ipo_value_and_gradient():
    chosen, rejected, ref_chosen, ref_rejected = (x / 20 for x in arrays(1))

    def objective(c, r):
        return ((c - ref_chosen - r + ref_rejected - 1 / (2 * 0.1)) ** 2).sum()

    agrees(
        lambda c, r: ipo(c, r, torch.tensor(ref_chosen), torch.tensor(ref_rejected), beta=0.1),
        objective,
        chosen,
        rejected,
    )


def test_simpo_value_and_gradient():
    chosen, rejected, *_ = arrays(2)
    num_chosen, num_rejected = np.array([3, 9, 1, 20, 4, 7]), np.array([8, 2, 5, 1, 30, 6])

    def objective(c, r):
        return -np.log(sigmoid(2.0 * c / num_chosen - 2.0 * r / num_rejected - 0.5)).sum()

    agrees(
        lambda c, r: simpo(c, r, torch.tensor(num_chosen), torch.tensor(num_rejected), beta=2.0, margin=0.5),
        objective,
        chosen,
        rejected,
    )


def test_kto_value_and_gradient():
    logprobs, _, reference, _ = arrays(3)
    desirable = np.array([True, False, True, True, False, False])

    def objective(x):
        ratio = x - reference
        good = 1.5 * (1 - sigmoid(0.1 * (ratio - 2.0)))
        bad = 0.7 * (1 - sigmoid(0.1 * (2.0 - ratio)))
        return np.where(desirable, good, bad).sum()

    def loss(x):
        return kto(
            x,
            torch.tensor(reference),
            torch.tensor(desirable),
            kl=2.0,
            beta=0.1,
            desirable_weight=1.5,
            undesirable_weight=0.7,
        )

    agrees(loss, objective, logprobs)


def test_where_policy_and_reference_are_equal():
    same = torch.tensor([-3.0, -5.0], dtype=torch.float64)
    other = torch.tensor([-4.0, -1.0], dtype=torch.float64)
    assert dpo(same, other, same, other, beta=0.1).loss_B.tolist() == pytest.approx([math.log(2)] * 2)
    assert ipo(same, other, same, other, beta=0.1).loss_B.tolist() == pytest.approx([25.0] * 2)
    desirable = torch.tensor([True, False])
    assert kto(same, same, desirable, kl=0.0, beta=0.1).loss_B.tolist() == pytest.approx([0.5] * 2)


def test_rewards_and_accuracy_by_hand():
    def column(*values):
        return torch.tensor(values, dtype=torch.float64, requires_grad=True)

    result = dpo(
        column(-2.0, -3.0, -1.0), column(-4.0, -1.0, -2.0), column(-3.0, -3.0, -2.0), column(-3.0, -3.0, -3.0), beta=0.5
    )
    assert result.chosen_rewards_B.tolist() == [0.5, 0.0, 0.5]
    assert result.rejected_rewards_B.tolist() == [-0.5, 1.0, 0.5]
    assert not result.chosen_rewards_B.requires_grad
    assert preference_accuracy(result) == pytest.approx(1 / 3)  # The third pair is a tie.


def test_far_apart_pairs_stay_finite_in_fp32():
    far = torch.tensor([-5000.0], requires_grad=True)
    zero = torch.zeros(1)
    for loss in (
        dpo(far, zero, zero, zero, beta=1.0).loss_B,
        kto(far, zero, torch.tensor([True]), kl=0.0, beta=1.0).loss_B,
    ):
        (gradient,) = torch.autograd.grad(loss.sum(), far)
        assert loss.isfinite().all()
        assert gradient.isfinite().all()


def test_mismatched_kl_is_a_mean_that_is_not_negative():
    assert mismatched_kl(torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.5])) == pytest.approx(1.0)
    assert mismatched_kl(torch.tensor([-1.0]), torch.tensor([0.0])) == 0.0


def test_corners_are_refused():
    one = torch.zeros(1)
    with pytest.raises(AssertionError, match="no tokens"):
        simpo(one, one, torch.tensor([0]), torch.tensor([3]), beta=1.0, margin=0.0)
    with pytest.raises(AssertionError, match="label_smoothing"):
        dpo(one, one, one, one, beta=1.0, label_smoothing=0.5)
    with pytest.raises(AssertionError, match="negative"):
        kto(one, one, torch.tensor([True]), kl=-1.0, beta=1.0)
    with pytest.raises(AssertionError, match="one entry"):
        ipo(one, torch.zeros(2), one, one, beta=1.0)
    with pytest.raises(AssertionError, match="no pairs"):
        preference_accuracy(dpo(*(torch.zeros(0),) * 4, beta=1.0))
