"""Whether coefficients are those of a noise process: for processes of one's own."""

from __future__ import annotations

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.noise.process import NoiseProcess
from xdlm.structs import Coefs, TokenValues

#: Times that are looked at, and how far from the truth rounding may take a value, or a difference of two.
_TIMES, _CLOSE, _STEP, _CLOSE_SLOPE = 257, 1e-9, 1e-6, 1e-4


def check_process(process: NoiseProcess) -> None:
    """That q_t is a law at every time, that derivatives are those of the values, and that noise is only
    ever added:

        alpha >= 0,  b >= 0,  alpha + sum_z b(z) = 1,    rate(z) = b'(z) - (alpha'/alpha) b(z) >= 0.

    A rate below 0 would take noise away again on the way from data to noise: no chain does that, and what
    losses and samplers make of it means nothing. Looks at many times, on the CPU.
    """
    low, high = process.time_range
    t = torch.linspace(low, high, _TIMES, dtype=torch.float64)
    at = process.coefs(t)
    _refuse(t, "alpha is negative", at.alpha < -_CLOSE)
    _refuse(t, "b is negative", _any_token(at.b, -_CLOSE))
    whole = at.alpha + at.b.total(process.vocab.size)
    _refuse(t, "alpha and all of b do not add up to 1", (whole - 1).abs() > _CLOSE)
    inner = t[1:-1]
    before, after = process.coefs(inner - _STEP), process.coefs(inner + _STEP)
    for (name, slope), (_, first), (_, second) in zip(
        _slopes(process.coefs(inner)), _values(before), _values(after), strict=True
    ):
        found = (second - first) / (2 * _STEP)
        off = (slope - found).abs() > _CLOSE_SLOPE * (1 + found.abs())
        _refuse(inner, f"the derivative of {name} is not that of its values", off)
    rate = at.d_b - at.b.scale(at.d_alpha / at.alpha)
    where = "noise is taken away again: b' - (alpha'/alpha) b is negative"
    _refuse(t, where, _any_token(rate, -_CLOSE))
    pure = process.terminal(torch.zeros(1, dtype=torch.float64))
    total = pure.b.total(process.vocab.size)
    if float(pure.alpha.abs().max()) > 0 or float((total - 1).abs().max()) > _CLOSE:
        raise UserError("terminal is not pure noise: alpha must be 0, and all of b add up to 1")


def _values(at: Coefs) -> list[tuple[str, Tensor]]:
    special = [(f"b on token {i}", at.b.special[..., n]) for n, i in enumerate(at.b.special_ids)]
    return [("alpha", at.alpha), ("b on ordinary tokens", at.b.tok), *special]


def _slopes(at: Coefs) -> list[tuple[str, Tensor]]:
    return _values(Coefs(at.d_alpha, at.d_b, at.d_alpha, at.d_b))


def _any_token(values: TokenValues, below: float) -> Tensor:
    return (values.tok < below) | (values.special < below).any(-1)


def _refuse(t: Tensor, what: str, wrong: Tensor) -> None:
    if bool(wrong.any()):
        raise UserError(f"no noise process: {what} at t = {float(t[wrong][0]):.4g}")
