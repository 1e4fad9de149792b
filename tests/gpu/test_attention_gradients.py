"""Gradients of attention where cuDNN's own are not numbers."""

from __future__ import annotations

import pytest
import torch

from xdlm.ops.attention import attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("length", [64, 100, 128, 192, 1088])
@pytest.mark.parametrize("score", [-120.0, 0.0])
def test_gradients_are_those_of_float64(length: int, score: float) -> None:
    """Also where every score of every query is far below 0."""
    generator = torch.Generator("cuda").manual_seed(length)
    q, k, v, d = torch.randn(4, 2, 3, length, 64, device="cuda", generator=generator).unbind()
    q, k = 0.1 * q, 0.1 * k
    q[..., 0], k[..., 0] = 1.0, 8.0 * score
    given = [part.bfloat16().requires_grad_() for part in (q, k, v)]
    exact = [part.detach().double().requires_grad_() for part in given]
    found = torch.autograd.grad(attention(*given), given, d.bfloat16())
    weights = (exact[0] @ exact[1].mT / 8).softmax(-1)
    wanted = torch.autograd.grad(weights @ exact[2], exact, d.bfloat16().double())
    # Of a query's first number the gradient is `score` times a sum that is 0: what is found is rounding,
    # about three times as much as the other numbers together.
    assert (wanted[0][..., 0].abs() < 1e-9).all()
    assert found[0][..., 0].double().norm() < 10 * wanted[0].norm()
    for one, other in zip(
        (found[0][..., 1:], *found[1:]), (wanted[0][..., 1:], *wanted[1:]), strict=True
    ):
        assert (one.double() - other).norm() < 0.03 * other.norm()
