"""Whether coefficients are those of a noise process: for processes of one's own."""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.noise.process import NoiseProcess
from xdlm.structs import Coefs, TokenValues

#: Times that are looked at, and how far from the truth rounding may take a value, or a difference of two.
_TIMES, _CLOSE, _STEP, _CLOSE_SLOPE = 257, 1e-9, 1e-6, 1e-4
#: Times that are spread by it meet no corner of a schedule but by accident.
_GOLDEN = (5**0.5 - 1) / 2


def check_process(process: NoiseProcess) -> None:
    """That q_t is a law at every time, begins with the data and ends with pure noise, that derivatives are
    those of the values, and that noise is only ever added:

        alpha >= 0,  b >= 0,  alpha + sum_z b(z) = 1,    rate(z) = b'(z) - (alpha'/alpha) b(z) >= 0,
        alpha = 1 at t = 0.

    A rate below 0 would take noise away again on the way from data to noise: no chain does that, and what
    losses and samplers make of it means nothing. What ordinary tokens have is judged by what all of them
    have together. Looks at many times, on the CPU.
    """
    n = process.vocab.size - len(process.special_ids)
    low, high = process.time_range
    t = low + (high - low) * ((torch.arange(1, _TIMES).double() * _GOLDEN) % 1).sort().values
    at, begun = process.coefs(t), torch.zeros(1, dtype=torch.float64)
    data, pure = process.coefs(begun), process.terminal(begun)
    _check_form(process, at)
    _check_law(process, t, at)
    _check_law(process, begun, data)
    _demand(begun, "alpha is not 1 where there is only data", data.alpha >= 1 - _CLOSE)
    _check_slopes(process, t[(t > low + _STEP) & (t < high - _STEP)])
    falls = at.d_alpha / at.alpha
    rate = at.d_b - at.b.scale(falls)
    for name, value in _noise(rate, n):
        holds = (value >= -_CLOSE * (1 + falls.abs())) | (at.alpha == 0)
        _demand(
            t, f"noise is taken away again: b' - (alpha'/alpha) b is negative for {name}", holds
        )
    uniform = bool((at.b.tok > 0).any())
    if uniform != process.has_uniform_noise:
        raise UserError(
            f"no noise process: has_uniform_noise is {process.has_uniform_noise}, but b is "
            f"{'positive' if uniform else 'never positive'} on ordinary tokens"
        )
    _check_law(process, begun, pure, "terminal: ")
    _demand(begun, "terminal is not pure noise, whose alpha is 0", pure.alpha == 0)


def _check_form(process: NoiseProcess, at: Coefs) -> None:
    """The tokens that are special, and the precision."""
    ids, mask = process.special_ids, process.vocab.mask_id
    if at.b.special_ids != ids or at.d_b.special_ids != ids:
        raise UserError(f"no noise process: coefs tells of other special tokens than {ids}")
    if mask is not None and mask not in ids:
        raise UserError(f"no noise process: the mask {mask} is not among its special tokens {ids}")
    for value in (at.alpha, at.d_alpha, at.b.tok, at.b.special, at.d_b.tok, at.d_b.special):
        if value.dtype != torch.float64:
            raise UserError(f"no noise process: coefficients must be float64, got {value.dtype}")


def _check_law(process: NoiseProcess, t: Tensor, at: Coefs, where: str = "") -> None:
    n = process.vocab.size - len(process.special_ids)
    for name, value in (("alpha", at.alpha), *_noise(at.b, n)):
        _demand(t, f"{where}{name} is negative or no number", value >= -_CLOSE)
    whole = at.alpha + at.b.total(process.vocab.size)
    _demand(t, f"{where}alpha and all of b do not add up to 1", (whole - 1).abs() <= _CLOSE)


def _check_slopes(process: NoiseProcess, t: Tensor) -> None:
    """By differences."""
    n = process.vocab.size - len(process.special_ids)
    at, before, after = (process.coefs(v) for v in (t, t - _STEP, t + _STEP))
    slopes = [("alpha", at.d_alpha), *_noise(at.d_b, n)]
    first, second = ([c.alpha, *(v for _, v in _noise(c.b, n))] for c in (before, after))
    for (name, slope), low, high in zip(slopes, first, second, strict=True):
        found = (high - low) / (2 * _STEP)
        holds = (slope - found).abs() <= _CLOSE_SLOPE * (1 + found.abs())
        _demand(t, f"the derivative of {name} is not that of its values", holds)


def _noise(b: TokenValues, n: int) -> list[tuple[str, Tensor]]:
    """What noise gives the `n` ordinary tokens together, and each special one."""
    special = [(f"b on token {i}", b.special[..., place]) for place, i in enumerate(b.special_ids)]
    return [("b on ordinary tokens", n * b.tok), *special]


def _demand(t: Tensor, else_what: str, holds: Tensor) -> None:
    """What is not even a number holds nothing."""
    if not bool(holds.all()):
        raise UserError(f"no noise process: {else_what} at t = {float(t[~holds][0]):.4g}")
