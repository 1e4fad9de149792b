"""A DiT that is told how much noise there is rather than what time it is, as UDLM's are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.models.dit import DiT, DiTConfig


@dataclass(frozen=True)
class LevelDiTConfig(DiTConfig):
    """The shape of such a DiT."""

    kind: ClassVar[str] = "level-dit"

    time_conditioning: bool = True
    """Tell the model the noise level; a `dit` need not be told anything."""
    time_scale: float = 1.0
    """Levels are multiplied by this."""
    level_eps: float = 1e-3
    """The eps of the log-linear schedule whose -log alpha it is told."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.time_conditioning:
            raise UserError("a level-dit is told the noise level: use kind dit, or leave this out")
        if not 0 < self.level_eps < 1:
            raise UserError(f"model.level_eps must lie in (0, 1), got {self.level_eps}")


class LevelDiT(DiT):
    """`DiT` of `sigma = -log(1 - (1 - eps) t)` in the place of t."""

    config: LevelDiTConfig

    def _condition(self, t: Tensor, label: Tensor | None) -> Tensor:
        level = -torch.log1p((self.config.level_eps - 1) * t.double())
        return super()._condition(level, label)
