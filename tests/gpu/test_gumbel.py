"""Draws by float32 Gumbel noise and by its law, on a GPU."""

from __future__ import annotations

import pytest
import torch

from xdlm import Vocab
from xdlm.models import PRESETS, DiT
from xdlm.noise import Masked, Mixed, NoiseProcess
from xdlm.sampling import SamplerConfig, sample
from xdlm.sampling.dense import exponential_noise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_its_smallest_value_is_that_of_published_implementations() -> None:
    """Of so many exact draws one would be smaller, 98 times of 100."""
    noise = exponential_noise(
        torch.empty(1 << 26, device="cuda"), torch.Generator("cuda").manual_seed(0)
    )
    assert noise.min() >= 2.0**-24 and noise.double().mean().item() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("impl", ["gumbel", "starved"])
@pytest.mark.parametrize("process", [Masked(Vocab(12, 11)), Mixed(Vocab(12, 11), k=0.1)])
def test_frequencies_are_those_of_exact_draws(process: NoiseProcess, impl: str) -> None:
    """Where no token is rare: 40,000 positions of an untrained model, within 5 standard errors."""
    torch.manual_seed(0)
    model = DiT(PRESETS["nano"], 12).to("cuda", torch.bfloat16).eval()
    torch.nn.init.normal_(model.out.weight, std=0.3)
    seen = []
    for way in ("thinned", impl):
        config = SamplerConfig(steps=8, impl=way)
        drawn = sample(model, process, batch=40, length=1000, config=config, seed=3).tokens
        assert int(drawn.max()) < 11
        seen.append(torch.bincount(drawn.flatten(), minlength=12).double() / drawn.numel())
    error = (seen[0] * (1 - seen[0]) * 2 / 40_000).sqrt()
    assert ((seen[0] - seen[1]).abs() <= 5 * error + 1e-9).all()
