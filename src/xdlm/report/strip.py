"""How images came about: states of a sampling run side by side, and what changed between them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from xdlm.errors import UserError
from xdlm.report.colours import LOOKS, MASK
from xdlm.report.grid import image_grid, zoomed
from xdlm.report.image_tokens import Decoder
from xdlm.sampling import Change, Trajectory

#: What is drawn where the channels of a pixel did several things: the first of these.
_FIRST = (Change.REMASK, Change.REFINE, Change.UNMASK)
#: The grey of a mask.
BLANK = int(MASK.colour[1:3], 16)


def picked_steps(steps: int, n: int) -> NDArray[np.int64]:
    """About `n` of the states after 0, 1, .. `steps` steps, evenly from the first to the last."""
    if n < 2:
        raise UserError(f"a strip needs at least 2 states, got {n}")
    return np.linspace(0, steps, min(n, steps + 1)).round().astype(np.int64)


def picked_frames(trajectory: Trajectory, n: int) -> Trajectory:
    """About `n` states, evenly from the first to the last."""
    marks = picked_steps(trajectory.steps, n)
    times = tuple(trajectory.times[i] for i in marks)
    return Trajectory(trajectory.frames[torch.from_numpy(marks)], times, trajectory.special_ids)


def states(trajectory: Trajectory, tokenizer: Decoder, sample: int = 0) -> NDArray[np.uint8]:
    """Every state of one image, [T+1, side, side, 3]; masks are grey."""
    return tokenizer.decode(trajectory.frames[:, sample].numpy(), blank=BLANK)


def change_maps(trajectory: Trajectory, tokenizer: Decoder, sample: int = 0) -> NDArray[np.uint8]:
    """For every state of one image what its pixels did since the state before, in the paper's colours,
    [T+1, side, side, 3]; white where nothing changed."""
    code = tokenizer.per_pixel(trajectory.changes()[:, sample].numpy())
    maps = np.full((len(code) + 1, *code.shape[1:3], 3), 255, dtype=np.uint8)
    for change in reversed(_FIRST):
        maps[1:][(code == change).any(-1)] = _rgb(LOOKS[change].colour)
    return maps


def strips(
    runs: Sequence[tuple[Trajectory, Decoder]], *, frames: int = 9, changes: bool = True
) -> list[NDArray[np.uint8]]:
    """For each run a row of states of its first image, and one below it for what changed."""
    found = []
    for trajectory, tokenizer in runs:
        shown = picked_frames(trajectory, frames)
        rows = [states(shown, tokenizer)]
        if changes:
            rows.append(change_maps(shown, tokenizer))
        found.append(image_grid(np.concatenate(rows), columns=len(rows[0])))
    if len({block.shape for block in found}) > 1:
        raise UserError("a strip needs runs of one number of steps")
    return found


def gif(pages: NDArray[np.uint8], *, milliseconds: int = 120, zoom: int = 1) -> bytes:
    """Pages [T, h, w, 3] one after the other, for ever; the last stays a while."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError("pictures need pillow; install xdlm[image]") from error
    images = [Image.fromarray(zoomed(page, zoom)) for page in pages]
    durations = [milliseconds] * (len(images) - 1) + [10 * milliseconds]
    out = io.BytesIO()
    images[0].save(
        out, format="gif", save_all=True, append_images=images[1:], duration=durations, loop=0
    )
    return out.getvalue()


def _rgb(colour: str) -> list[int]:
    return list(bytes.fromhex(colour.removeprefix("#")))
