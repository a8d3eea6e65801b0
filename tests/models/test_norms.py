"""The hand-written norm against transformers' own, forward and backward, and against finite differences."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from plait.models.norms import RMSNorm, swap_norms


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_forward_and_gradients_equal_transformers(dtype, tolerance):
    torch.manual_seed(0)
    theirs = Qwen3RMSNorm(24, eps=1e-5).to(dtype)
    with torch.no_grad():
        theirs.weight.normal_()
    results = []
    for norm in (theirs, RMSNorm(theirs.weight, theirs.variance_epsilon)):
        x = torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        theirs.weight.grad = None
        out = norm(x)
        (out.float() * torch.linspace(-1, 1, 24)).sum().backward()
        results.append([out, x.grad, theirs.weight.grad.clone()])
    for mine, reference in zip(results[1], results[0], strict=True):
        assert (mine.float() - reference.float()).abs().max() <= tolerance * reference.float().abs().max()


def test_gradient_by_finite_differences():
    norm = RMSNorm(torch.nn.Parameter(torch.randn(5, dtype=torch.float64)), 1e-3)
    x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    # The backward pass works in fp32, so the comparison is no finer.
    torch.autograd.gradcheck(norm, (x,), eps=1e-4, atol=1e-4, rtol=1e-3, nondet_tol=1e-5)


def test_swapping_keeps_parameters_and_names(make_model):
    model = make_model()
    before = dict(model.named_parameters())
    swap_norms(model)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in before.items()}
    assert sum(isinstance(module, RMSNorm) for module in model.modules()) == 2 * 4 + 1
