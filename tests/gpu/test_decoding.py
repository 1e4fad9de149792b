"""Confidence decoding on a GPU: the tokens of the CPU, and logits that stay bounded."""

from __future__ import annotations

import pytest
import torch

from xdlm import Vocab
from xdlm.models import DiT, DiTConfig
from xdlm.noise import Mixed
from xdlm.sampling import ConfidenceConfig, Filter, decode

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def shaken(vocab_size: int, width: int = 32) -> DiT:
    torch.manual_seed(0)
    config = DiTConfig(depth=2, width=width, heads=2, cond_width=4, dropout=0.0)
    model = DiT(config, vocab_size).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("refresh", [None, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_same_tokens_as_on_the_cpu(refresh: int | None, temperature: float) -> None:
    model = shaken(1001).double()
    given = torch.randint(0, 1000, (6, 40), generator=torch.Generator().manual_seed(0))
    frozen = (torch.arange(40) < 8).expand(6, -1)
    config = ConfidenceConfig(
        steps=16, k=0.3, block_length=8, guidance=1.5, filter=Filter(temperature), refresh=refresh
    )
    process = Mixed(Vocab(1001, 1000), k=0.1)
    tokens = [
        decode(
            model.to(device), process, given=given, frozen=frozen, config=config,
            stop_ids=range(100, 150),
        ).tokens.cpu()
        for device in ("cpu", "cuda")
    ]  # fmt: skip
    assert torch.equal(*tokens)


def test_logits_stay_bounded() -> None:
    """A large vocabulary: 2,048 rows of it would be 1 GB in float32 and 2 GB in float64."""
    size = 126_464
    model = shaken(size, width=64).to("cuda", torch.bfloat16)
    given = torch.zeros(8, 256, dtype=torch.int64)
    process = Mixed(Vocab(size, 126_336), k=0.1)
    args = {"given": given, "frozen": given.bool(), "config": ConfidenceConfig(steps=4, k=0.1)}
    decode(model, process, **args)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = decode(model, process, **args)
    assert torch.cuda.max_memory_allocated() - before < 0.8e9
    assert not (out.tokens == 126_336).any()
