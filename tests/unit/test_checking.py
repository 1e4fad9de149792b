"""Coefficients that are those of a noise process, and ones that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from processes import PROCESSES, N

from xdlm import UserError, Vocab
from xdlm.noise import Mixed, NoiseProcess, check_process
from xdlm.structs import Coefs, TokenValues


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())
def test_every_process_is_one(process: NoiseProcess) -> None:
    check_process(process)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, c: replace(c, alpha=c.alpha - 0.1 * t), "alpha is negative at t = "),
        (lambda t, c: replace(c, b=c.b.scale(1 - t)), "do not add up to 1 at t = 0.0"),
        (
            lambda t, c: replace(c, b=c.b - c.b.map(lambda v: v + 0.01)),
            "b is negative at t = 0.001",
        ),
        (lambda t, c: replace(c, d_alpha=1.1 * c.d_alpha), "the derivative of alpha is not"),
        (lambda t, c: replace(c, d_b=c.d_b.scale(0.9 + 0 * t)), "the derivative of b on ordinary"),
    ],
)
def test_what_is_no_process_is_told(change, said: str) -> None:
    class Wrong(Mixed):
        def coefs(self, t):
            return change(torch.as_tensor(t, dtype=torch.float64), super().coefs(t))

    with pytest.raises(UserError, match=said):
        check_process(Wrong(Vocab(N, 4), k=0.1))


def test_noise_that_is_taken_away_again_is_told() -> None:
    """Uniform noise that fades with time as well: near t = 1 tokens would have to become clean again."""

    class Fading(Mixed):
        def coefs(self, t):
            t = torch.as_tensor(t, dtype=torch.float64)
            alpha, d_alpha = self.schedule(t)
            n, k = self.vocab.size - 1, 0.2
            tok, d_tok = k * (1 - t) * (1 - alpha) / n, -k * ((1 - alpha) + (1 - t) * d_alpha) / n
            mask, d_mask = 1 - alpha - n * tok, -d_alpha - n * d_tok
            b, d_b = (
                TokenValues(one, other[..., None], self.special_ids)
                for one, other in ((tok, mask), (d_tok, d_mask))
            )
            return Coefs(alpha, b, d_alpha, d_b)

    with pytest.raises(UserError, match=r"noise is taken away again.* at t = 0\.9"):
        check_process(Fading(Vocab(N, 4), k=0.2))
