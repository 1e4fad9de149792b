"""How much of the data is left at time t: `alpha_t`, from 1 at t = 0 down to `eps` at t = 1."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from xdlm.errors import UserError, check_number


class Alpha(NamedTuple):
    """The schedule and its time derivative travel together."""

    alpha: Tensor
    d_alpha: Tensor


class Schedule(Protocol):
    def __call__(self, t: Tensor) -> Alpha: ...


def _check_eps(eps: float) -> None:
    check_number("a schedule's eps", eps)
    if not 0 < eps < 1:
        raise UserError(f"a schedule's eps must lie in (0, 1), got {eps}")


@dataclass(frozen=True)
class LogLinear:
    """`alpha_t = 1 - (1 - eps) t`, so that -log alpha is the log-linear noise of MDLM."""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def __call__(self, t: Tensor) -> Alpha:
        slope = 1 - self.eps
        return Alpha(1 - slope * t, torch.full_like(t, -slope))


@dataclass(frozen=True)
class Cosine:
    """`alpha_t = eps + (1 - eps) cos(pi t / 2)`."""

    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_eps(self.eps)

    def __call__(self, t: Tensor) -> Alpha:
        angle = t * (math.pi / 2)
        scale = 1 - self.eps
        return Alpha(self.eps + scale * angle.cos(), -scale * (math.pi / 2) * angle.sin())


@dataclass(frozen=True)
class Polynomial:
    """`alpha_t = 1 - (1 - eps) t^power`; power 1 is `LogLinear`, larger keeps data for longer."""

    power: float = 2.0
    eps: float = 1e-3

    def __post_init__(self) -> None:
        _check_eps(self.eps)
        check_number("a schedule's power", self.power)
        if not 1 <= self.power < math.inf:
            raise UserError(f"a polynomial schedule needs power >= 1, got {self.power}")

    def __call__(self, t: Tensor) -> Alpha:
        scale = 1 - self.eps
        return Alpha(1 - scale * t**self.power, -scale * self.power * t ** (self.power - 1))
