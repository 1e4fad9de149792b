"""Rows that skip the head, on a GPU."""

from __future__ import annotations

import pytest
import torch

from xdlm import Vocab
from xdlm.models import DiT, DiTConfig
from xdlm.noise import Mixed, Uniform
from xdlm.ops.fused_seen import fused_move
from xdlm.sampling import SamplerConfig, ancestral, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_is_the_formula(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, before, weight = (
        torch.randn(n, 77, device="cuda", dtype=dtype) for n in (400, 600, 500)
    )
    rows, at = (torch.randperm(n, device="cuda")[:300] for n in (400, 600))
    z = torch.randint(0, 500, (300,), device="cuda")
    logit, moved = fused_move(hidden, rows, before, at, weight, z)
    now = hidden[rows].float()
    torch.testing.assert_close(logit, (now * weight[z].float()).sum(-1), rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(moved, (now - before[at].float()).norm(dim=-1))


@pytest.mark.parametrize("vocab", [1000, 50258])
@pytest.mark.parametrize("kind", ["mixed", "uniform"])
def test_texts_are_the_same(vocab: int, kind: str, monkeypatch) -> None:
    process = Mixed(Vocab(vocab, 3), k=0.1) if kind == "mixed" else Uniform(Vocab(vocab))
    torch.manual_seed(0)
    model = DiT(DiTConfig(depth=2, width=128, heads=2), vocab).cuda().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    args = {"batch": 4, "length": 256, "config": SamplerConfig(steps=32), "seed": 3}
    ours = sample(model, process, **args)
    monkeypatch.setattr(ancestral.SeenRows, "of", lambda *_: None)
    twin = sample(model, process, **args)
    assert torch.equal(ours.tokens, twin.tokens)
    assert ours.head_rows < 0.7 * twin.head_rows
