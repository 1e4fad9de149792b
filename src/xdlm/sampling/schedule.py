"""How many tokens each step of confidence decoding writes and rewrites: `topk_absorb`, `topk_uniform`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import NamedTuple

from xdlm.errors import UserError


class Block(NamedTuple):
    """Open positions `start` to `stop`, counted from the first open one, that are written before those
    of the next block; and for each step how many masks are filled and how many tokens rewritten."""

    start: int
    stop: int
    topk_absorb: tuple[int, ...]
    topk_uniform: tuple[int, ...]


def plan_blocks(
    n_open: int, *, steps: int, block_length: int | None = None, k: float = 0.0
) -> list[Block]:
    """Blocks of `block_length` (None: one block) that share `steps` steps evenly; so do a block's steps
    share its masks. What is left over goes to the first ones, as in LLaDA. `rewrites` says how many tokens
    are rewritten beside them.
    """
    size = n_open if block_length is None else min(block_length, n_open)
    if n_open < 1:
        raise UserError("there is no position to fill")
    if size < 1:
        raise UserError(f"block_length must be at least 1, got {block_length}")
    edges = [*range(0, n_open, size), n_open]
    if steps < len(edges) - 1:
        raise UserError(
            f"{steps} steps cannot fill {len(edges) - 1} blocks, which take one each at least: "
            "use more steps or a larger block_length"
        )
    shares = split(steps, len(edges) - 1)
    fills = [split(b - a, share) for (a, b), share in zip(pairwise(edges), shares, strict=True)]
    counts = rewrites([*chain.from_iterable(fills)], k)
    return [
        Block(start, stop, fill, tuple(islice(counts, len(fill))))
        for (start, stop), fill in zip(pairwise(edges), fills, strict=True)
    ]


def rewrites(fill: Sequence[int], k: float) -> Iterator[int]:
    """How many tokens each step rewrites beside the masks that it fills, at most as many as there are.

    In the reverse process of mixed noise, of the positions that a step makes clean a share k was uniform
    noise and the rest were masks: so k/(1 - k) are rewritten for every mask that is filled, rounded down on
    the way; the first step leaves it to the second. In one block this is the schedule of the published
    LLaDA-XDLM. In several it goes on from one to the next: small ones, each rounded down, would have none.
    """
    ratio, most, total = k / (1 - k) if k < 1 else math.inf, sum(fill), 0
    for i, filled in enumerate(accumulate(fill)):
        due = 0 if i == 0 else math.floor(min(ratio * filled + 1e-9, total + most))
        yield due - total
        total = due


def check_blocks(blocks: Sequence[Block], n_open: int) -> None:
    """That a plan, from whomever it comes, fills every one of `n_open` masks."""
    edge = 0
    for block in blocks:
        counts = (*block.topk_absorb, *block.topk_uniform)
        if block.start != edge or len(block.topk_absorb) != len(block.topk_uniform):
            raise UserError(f"the blocks of a plan must join, with both counts per step: {block}")
        if min(counts, default=0) < 0 or sum(block.topk_absorb) < block.stop - block.start:
            raise UserError(f"this block's topk_absorb does not fill its masks: {block}")
        edge = block.stop
    if edge != n_open:
        raise UserError(f"the plan is for {edge} open positions, but there are {n_open}")


def split(total: int, parts: int) -> tuple[int, ...]:
    """`total` in so many parts, as equal as can be, the larger ones first."""
    each, left = divmod(total, parts)
    return tuple(each + (i < left) for i in range(parts))
