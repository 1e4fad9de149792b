"""What happened at each step of a sampling run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from xdlm.structs import is_special


class Change(IntEnum):
    """What a position did in one step."""

    NONE = 0
    UNMASK = 1  # mask -> token
    REFINE = 2  # token -> another token
    REMASK = 3  # token -> mask


@dataclass(frozen=True)
class Trajectory:
    """All states of a sampling run: `frames` [T+1, B, L], from pure noise to the sample.

    `times` [T+1] are the diffusion times of the frames. `special_ids` are the tokens that count as
    masks. `probs` [T, B, L] is the probability that the model gave each token that a step wrote, before
    temperature and nucleus; NaN where a step wrote none or took it from the noise. It is None if it was not
    recorded.
    """

    frames: Tensor
    times: tuple[float, ...]
    special_ids: tuple[int, ...]
    probs: Tensor | None = None

    @property
    def steps(self) -> int:
        return len(self.frames) - 1

    def changes(self) -> Tensor:
        """[T, B, L] of `Change` codes (uint8): what each position did in each step."""
        masked = is_special(self.frames, self.special_ids)
        before, after = masked[:-1], masked[1:]
        moved = self.frames[:-1] != self.frames[1:]
        code = torch.zeros_like(self.frames[1:], dtype=torch.uint8)
        code[moved & before & ~after] = Change.UNMASK
        code[moved & ~before & ~after] = Change.REFINE
        code[moved & ~before & after] = Change.REMASK
        return code

    def counts(self) -> dict[Change, list[int]]:
        """For each kind of change, how many positions made it at each step."""
        code = self.changes().flatten(1)
        kinds = (Change.UNMASK, Change.REFINE, Change.REMASK)
        return {kind: (code == kind).sum(1).tolist() for kind in kinds}

    def only(self, sample: int) -> Trajectory:
        """The trajectory of one sequence of the batch."""
        here = slice(sample, sample + 1)
        probs = None if self.probs is None else self.probs[:, here]
        return replace(self, frames=self.frames[:, here], probs=probs)
