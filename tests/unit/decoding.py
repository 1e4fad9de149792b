"""A small model and a process to decode by confidence with."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from xdlm import Vocab
from xdlm.models import Denoiser
from xdlm.noise import Mixed
from xdlm.sampling import ConfidenceConfig, Filter, Sample, decode

N, MASK = 23, 7
PROCESS = Mixed(Vocab(N, MASK), k=0.1)
COLD = Filter(temperature=0.0)


class Small(Denoiser):
    """One layer of attention with a place for every position, so that no two confidences are equal; in
    float64, so that what is compared differs by more than rounding or not at all."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        torch.manual_seed(0)
        draw = partial(torch.randn, dtype=torch.float64)
        self.embed, self.place = nn.Parameter(draw(N, width)), nn.Parameter(draw(64, width))
        self.out, self.bias = nn.Parameter(draw(N, width)), nn.Parameter(draw(N))

    def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        h = self.embed[z] + self.place[: z.shape[1]]
        return h + (h @ h.mT).div(4).softmax(-1) @ h.roll(1, -1)

    head_weight = property(lambda self: self.out)
    head_bias = property(lambda self: self.bias)


def with_room(prompt: Tensor, n_new: int) -> tuple[Tensor, Tensor]:
    given = torch.nn.functional.pad(prompt, (0, n_new))
    frozen = torch.zeros_like(given, dtype=torch.bool)
    frozen[:, : prompt.shape[1]] = True
    return given, frozen


def refreshed(model: Denoiser, refresh: int | None) -> Sample:
    prompt = torch.randint(8, N, (5, 6), generator=torch.Generator().manual_seed(3))
    given, frozen = with_room(prompt, 24)
    config = ConfidenceConfig(
        steps=12, block_length=8, refresh=refresh, guidance=1.5, filter=Filter(temperature=9.0)
    )
    return decode(model, PROCESS, given=given, frozen=frozen, config=config, stop_ids=range(10, 14))
