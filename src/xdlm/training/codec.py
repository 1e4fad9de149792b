"""Training a VQ codec on images, and keeping it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from xdlm.data import Ahead, ImageRows, ShuffledOrder
from xdlm.errors import UserError
from xdlm.files import atomic_folder, sha256_of
from xdlm.tokens import Pixels
from xdlm.tokens.vq import DESCRIPTION, WEIGHTS, VqCodec, VqConfig
from xdlm.training.adversary import PATCH, Adversary
from xdlm.training.tensors import save_tensors

#: Steps after which codes that nothing chose are given another place, in the first half of the run.
_REVIVE_EVERY = 50
#: The share of a run before the codec has to convince a critic: first it has to draw at all.
_HONEST = 1 / 3
#: The critic's learning rate, and the longest gradient that the codec follows.
_CRITIC_LR, _CLIP = 2e-4, 1.0
#: Steps between which a GPU is not asked how it is doing: it would have to be waited for.
_TOLD_EVERY = 25


class CodecStep(NamedTuple):
    """Mean squared error of pixels on [-1, 1], and the share of codes in use of late."""

    step: int
    error: float
    in_use: float


def train_codec(
    rows: ImageRows,
    config: VqConfig,
    *,
    steps: int = 2000,
    batch: int = 64,
    lr: float = 1e-3,
    realism: float = 0.5,
    seed: int = 0,
    device: torch.device | None = None,
    on_step: Callable[[CodecStep], None] | None = None,
) -> VqCodec:
    """Least squares on pixels with the usual terms for codes, and after a while, with weight `realism`, an
    adversary (`training.adversary`). A code that nothing has chosen for a while takes the place of what the
    encoder says of some cell: otherwise most of the table stays unused. Images are read ahead by a thread,
    and `on_step` is told of a step now and then."""
    if min(steps, batch) < 1 or not lr > 0 or not 0 <= seed < 2**31:
        raise UserError("steps and batch must be at least 1, lr positive, the seed in 0..2^31-1")
    if not 0 <= realism < float("inf"):
        raise UserError(f"realism must be a number that is not negative, got {realism}")
    if realism and rows.side < PATCH:
        raise UserError(
            f"a critic looks at patches of {PATCH} x {PATCH} pixels, and images have {rows.side}; "
            "set realism to 0"
        )
    torch.manual_seed(seed)
    codec = VqCodec(config).to(device).train()
    on_gpu = next(codec.parameters()).is_cuda
    optimizer = torch.optim.Adam(codec.parameters(), lr=lr, fused=on_gpu)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    adversary = Adversary(realism, _CRITIC_LR, device)
    order, pixels = ShuffledOrder(len(rows), seed), Pixels(rows.side)
    used = torch.zeros(config.codes, dtype=torch.bool, device=device)

    def read(step: int) -> NDArray[np.uint8]:
        return pixels.decode(rows.take(order.rows(step * batch, batch)))

    with Ahead(map(read, range(steps))) as batches:
        for step, images in enumerate(batches, start=1):
            found = codec.losses(images)
            total, judged = found.total(), realism > 0 and step > _HONEST * steps
            if judged:
                last = codec.decoder.conv_out.weight
                total = total + adversary.pull(found.made, found.pixels, last)
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            nn.utils.clip_grad_norm_(codec.parameters(), _CLIP)
            optimizer.step()
            decay.step()
            if judged:
                adversary.learn(found.original, found.made)
            used.index_fill_(0, found.chosen.flatten(), True)
            if on_step is not None and (step % _TOLD_EVERY in (0, 1) or step == steps):
                on_step(CodecStep(step, found.pixels.item(), used.double().mean().item()))
            if step % _REVIVE_EVERY == 0 and 2 * step <= steps:
                _revive(codec, ~used, found.said)
                used.zero_()
    return codec.eval().requires_grad_(False)


@torch.no_grad()
def _revive(codec: VqCodec, unused: Tensor, said: Tensor) -> None:
    vectors = said.movedim(1, -1).flatten(0, -2)
    picked = torch.randint(len(vectors), (int(unused.sum()),)).to(vectors.device)
    codec.quantize.embedding.weight[unused] = vectors[picked]


def save_codec(codec: VqCodec, folder: Path) -> None:
    """As `load_codec` reads it; nothing that is there already is replaced."""
    with atomic_folder(folder) as scratch:
        weights = {name: value.cpu().contiguous() for name, value in codec.state_dict().items()}
        save_tensors(weights, scratch / WEIGHTS)
        about = {"type": "vq", "config": dataclasses.asdict(codec.config)}
        about["sha256"] = sha256_of(scratch / WEIGHTS)
        (scratch / DESCRIPTION).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
