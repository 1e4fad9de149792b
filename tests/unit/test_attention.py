"""Attention keeps away from a way of torch's whose gradient is wrong for some numbers of keys."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from xdlm.models import PRESETS, DiT
from xdlm.ops.attention import attention


@pytest.fixture
def allowed(monkeypatch) -> list[bool]:
    """Whether cuDNN was allowed, call by call."""
    found: list[bool] = []

    def spy(*arguments, **settings) -> torch.Tensor:
        found.append(torch.backends.cuda.cudnn_sdp_enabled())
        return scaled_dot_product_attention(*arguments, **settings)

    monkeypatch.setattr("xdlm.ops.attention.scaled_dot_product_attention", spy)
    return found


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 128, 192, 1000, 1024, 1088])
@pytest.mark.parametrize("trained", [True, False])
def test_cudnn_has_no_gradient_of_a_half_empty_tile(
    allowed: list[bool], keys: int, trained: bool
) -> None:
    query = torch.randn(1, 1, 2, 8, requires_grad=trained)
    key, value = torch.randn(2, 1, 1, keys, 8).unbind()
    found = attention(query, key, value)
    assert torch.allclose(found, scaled_dot_product_attention(query, key, value), atol=1e-6)
    assert allowed == [not (trained and keys in (64, 192, 1088))]
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_models_attend_in_this_way(allowed: list[bool]) -> None:
    model = DiT(PRESETS["nano"], 11)
    model.trunk(torch.zeros(1, 64, dtype=torch.int64), torch.ones(1))
    assert allowed == [False] * PRESETS["nano"].depth
