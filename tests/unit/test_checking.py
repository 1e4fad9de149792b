"""Coefficients that are those of a noise process, and ones that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from processes import PROCESSES, N

from xdlm import UserError, Vocab
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform, check_process
from xdlm.structs import Coefs, TokenValues


@pytest.mark.parametrize("process", PROCESSES.values(), ids=PROCESSES.keys())
def test_every_process_is_one(process: NoiseProcess) -> None:
    check_process(process)


#: A dozen tokens, and those of GPT-2, each of which has little of the noise.
SIZES = (N, 50_258)
CHANGES = [
    (lambda t, c: replace(c, alpha=c.alpha - 0.1 * t), "alpha is negative or no number at t = 0.9"),
    (lambda t, c: replace(c, alpha=c.alpha * torch.nan), "alpha is negative or no number"),
    (lambda t, c: replace(c, d_alpha=c.d_alpha * torch.nan), "the derivative of alpha is not"),
    (lambda t, c: replace(c, b=c.b.scale(1 - t)), "do not add up to 1 at t = 0.0"),
    (
        lambda t, c: replace(c, b=c.b - c.b.map(lambda v: v + 0.01)),
        "b on ordinary tokens is negative",
    ),
    (lambda t, c: replace(c, d_alpha=1.1 * c.d_alpha), "the derivative of alpha is not"),
    (
        lambda t, c: replace(c, d_b=replace(c.d_b, tok=0.9 * c.d_b.tok)),
        "derivative of b on ordinary",
    ),
    (lambda t, c: replace(c, d_b=replace(c.d_b, tok=0 * c.d_b.tok)), "derivative of b on ordinary"),
    (lambda t, c: replace(c, alpha=c.alpha.float()), "must be float64, got torch.float32"),
    (
        lambda t, c: replace(c, b=replace(c.b, special_ids=(0,))),
        "tells of other special tokens than",
    ),
    (
        lambda t, c: Coefs(
            c.alpha / 2,
            c.b.map(lambda v: v / 2) + TokenValues(0 * t, 0.5 + 0 * t[..., None], (4,)),
            c.d_alpha / 2,
            c.d_b.map(lambda v: v / 2),
        ),
        "alpha is not 1 where there is only data",
    ),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_what_is_no_process_is_told(change, said: str, size: int) -> None:
    class Wrong(Mixed):
        def coefs(self, t):
            return change(torch.as_tensor(t, dtype=torch.float64), super().coefs(t))

    with pytest.raises(UserError, match=said):
        check_process(Wrong(Vocab(size, 4), k=0.1))


def test_what_a_process_says_of_itself_is_checked() -> None:
    class Silent(Mixed):
        has_uniform_noise = False

    class Early(Mixed):
        def terminal(self, like):
            return self.coefs(torch.ones_like(torch.as_tensor(like)))

    class Signed(Mixed):
        def terminal(self, like):
            pure = super().terminal(like)
            return replace(pure, b=TokenValues(pure.b.tok + 2 / 10, pure.b.special - 2, (4,)))

    for wrong, said in (
        (Silent, "has_uniform_noise is False, but b is positive"),
        (Early, "terminal is not pure noise"),
        (Signed, "terminal: b on token 4 is negative"),
    ):
        with pytest.raises(UserError, match=said):
            check_process(wrong(Vocab(11, 4), k=0.1))


def test_every_process_is_one_at_the_size_of_real_vocabularies() -> None:
    vocab = Vocab(SIZES[1], 4)
    little = (Mixed(vocab, k=1e-9), Gidd(vocab, p_uniform=1e-12))
    for process in (Masked(vocab), Uniform(Vocab(SIZES[1])), Mixed(vocab), Gidd(vocab), *little):
        check_process(process)


def test_a_schedule_may_have_corners() -> None:
    """In the middle of its range, say."""

    def bent(t):
        late = (t - 0.5005).clamp_min(0)
        return 1 - 0.4 * t - 1.1 * late, -0.4 - 1.1 * (late > 0).double()

    check_process(Mixed(Vocab(N, 4), k=0.1, schedule=bent))


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
