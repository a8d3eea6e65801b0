"""Expected values: hand calculation and central differences."""

import numpy as np
import pytest
import references
import torch

from plait.algorithms.value_losses import clipped, explained_variance, squared


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_squared_by_hand():
    values = doubles(0.5, 2.0).requires_grad_()
    result = squared(values, doubles(1.0, 1.0))
    assert result.loss_R.tolist() == [0.125, 0.5]
    result.loss_R.sum().backward()
    assert values.grad.tolist() == [-0.5, 1.0]
    assert not result.binds_R.any()


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "binds"),
    [
        (0.1, 0.0, 1.0, 0.405, False),  # Within the clip.
        (0.5, 0.0, 1.0, 0.32, True),  # Moved towards the target beyond the clip: counts as 0.2, 0.8^2 / 2.
        (-0.5, 0.0, 1.0, 1.125, False),  # Moved away: counts in full, 1.5^2 / 2.
        (3.0, 0.0, 1.0, 2.0, False),  # Overshot: (3 - 1)^2 / 2 is above (0.2 - 1)^2 / 2.
    ],
)
def test_clipped_by_hand(value, old, target, loss, binds):
    values = doubles(value).requires_grad_()
    result = clipped(values, doubles(old), doubles(target), clip=0.2)
    assert result.loss_R.item() == pytest.approx(loss, abs=1e-12)
    assert result.binds_R.item() == binds
    result.loss_R.sum().backward()
    assert values.grad.item() == pytest.approx(0.0 if binds else value - target, abs=1e-12)


def test_clipped_is_ppo2s_loss_with_its_gradient():
    random = np.random.default_rng(0)
    old, target = random.normal(size=20), random.normal(size=20)
    now = old + random.normal(0, 0.3, 20)

    def objective(v):
        near = np.clip(v, old - 0.2, old + 0.2)
        return 0.5 * np.maximum((v - target) ** 2, (near - target) ** 2).sum()

    values = torch.tensor(now, requires_grad=True)
    loss = clipped(values, torch.tensor(old), torch.tensor(target), clip=0.2).loss_R.sum()
    loss.backward()
    assert loss.item() == pytest.approx(objective(now), abs=1e-12)
    assert values.grad.numpy() == pytest.approx(references.numeric_gradient(objective, now), abs=1e-7)


def test_explained_variance_by_hand():
    returns = doubles(1.0, 2.0, 3.0)
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(doubles(5.0, 5.0, 5.0), returns) == pytest.approx(0.0)
    assert explained_variance(doubles(1.5, 2.0, 2.5), returns) == pytest.approx(0.75)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    # A constant error does not show: it is no variance.
    assert explained_variance(returns + 7, returns) == pytest.approx(1.0)


def test_explained_variance_of_equal_returns_is_undefined():
    assert explained_variance(doubles(0.1, 0.2), doubles(1.0, 1.0)) is None
    assert explained_variance(doubles(), doubles()) is None
