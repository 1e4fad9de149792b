"""Confidence decoding: the paper's Algorithm 1, LLaDA's sampler with a branch that rewrites.

Each step predicts, fills the masks that the model is surest of (`topk_absorb` of them), and where k > 0
rewrites written tokens that it doubts (`topk_uniform` of them, the surest replacements first):

    can be rewritten:  p(predicted) >= p(present)  and  predicted != present

k = 0 is LLaDA's low-confidence remasking. Where the listing leaves something open: a count beyond what
there is to fill or rewrite is cut to it (`topk` would take positions that qualify for neither), equal
confidences go from left to right, and the mask itself is never predicted.

This is a search for likely text, not a draw from the model; `ancestral` is that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.errors import UserError, check_number, check_whole, did_you_mean
from xdlm.models import Denoiser, run_trunk
from xdlm.models.contract import in_eval_mode
from xdlm.noise import NoiseProcess
from xdlm.ops import Stream, uniform
from xdlm.ops.gather import PickedRows
from xdlm.sampling.filters import Filter
from xdlm.sampling.memory import Memory
from xdlm.sampling.predictions import CONFIDENCES, PredictingHead
from xdlm.sampling.result import Sample, check_padding, find_ends, row_lengths
from xdlm.sampling.schedule import Block, check_blocks, plan_blocks
from xdlm.sampling.watching import Watch


@dataclass(frozen=True)
class ConfidenceConfig:
    """How to decode by confidence."""

    steps: int = 32
    """Steps in all; the blocks share them evenly."""
    filter: Filter = field(default_factory=Filter)
    """Temperature and nucleus of the draws; confidence is that of the prediction as it is."""
    k: float = 0.0
    """Share of rewritten tokens among all that are written; 0 is LLaDA's sampler."""
    block_length: int | None = None
    """Blocks of so many tokens are written one after the other; none: all at once."""
    guidance: float = 1.0
    """Scale of classifier-free guidance, away from what the model predicts with the prompt masked; 1 is
    off, and anything else doubles the forward passes."""
    confidence: str = "token"
    """What is filled first: where the token drawn has the highest probability (token), the prediction
    the lowest entropy (entropy) or the widest margin (margin), or anywhere (random)."""

    refresh: int | None = None
    """Run the model on the block that is being written, and on the rest only every so many steps and where
    a block begins: faster, but an approximation, and only the block's own tokens are rewritten. None: on
    all, in every step."""

    def __post_init__(self) -> None:
        check_whole("steps", self.steps)
        if self.steps < 1:
            raise UserError(f"sampling needs at least 1 step, got {self.steps}")
        for name in ("block_length", "refresh"):
            value = getattr(self, name)
            if value is None:
                continue
            check_whole(name, value)
            if value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        check_number("the mixing ratio k", self.k)
        check_number("guidance", self.guidance)
        if not 0 <= self.k <= 1:
            raise UserError(f"the mixing ratio k must lie in [0, 1], got {self.k}")
        if not 0 <= self.guidance <= 100:
            raise UserError(f"guidance must lie in [0, 100], got {self.guidance}")
        if self.confidence not in CONFIDENCES:
            hint = did_you_mean(self.confidence, CONFIDENCES)
            raise UserError(f"unknown confidence '{self.confidence}'{hint}")

    def plan(self, n_open: int) -> list[Block]:
        """The blocks of `n_open` open positions; an error, where the steps are too few for them."""
        return plan_blocks(n_open, steps=self.steps, block_length=self.block_length, k=self.k)

    @property
    def is_random(self) -> bool:
        """Whether seeds make a difference."""
        return self.filter.temperature > 0 or self.confidence == "random"


class Turn(NamedTuple):
    """One step of a plan: which block, how many masks to fill and tokens to rewrite, the share of masks
    before and after it, and whether it is its block's last."""

    block: Block
    fill: int
    rewrite: int
    before: float
    after: float
    closes: bool


def turns(blocks: Sequence[Block]) -> Iterator[Turn]:
    """The steps of a plan, one after the other."""
    n_open = blocks[-1].stop
    left = n_open
    for block in blocks:
        last = len(block.topk_absorb) - 1
        for i, (fill, rewrite) in enumerate(
            zip(block.topk_absorb, block.topk_uniform, strict=True)
        ):
            after = max(left - fill, n_open - block.stop)
            yield Turn(block, fill, rewrite, left / n_open, after / n_open, i == last)
            left = after


@torch.no_grad()
@in_eval_mode
def decode(
    denoiser: Denoiser,
    process: NoiseProcess,
    *,
    given: Tensor,
    frozen: Tensor,
    padding: Tensor | None = None,
    config: ConfidenceConfig | None = None,
    blocks: Sequence[Block] | None = None,
    seed: int = 0,
    index: Tensor | None = None,
    stop_ids: Sequence[int] = (),
    record: bool = False,
    on_step: Callable[[int, int], None] | None = None,
    on_frame: Callable[[Tensor], None] | None = None,
) -> Sample:
    """Fill the open positions of `given` [B, L]; where `frozen` [B, L] holds, nothing is ever written.

    Every row has as many open positions; blocks are counted along them. Shorter rows have `padding` [B, L]
    behind them, which nobody looks at. Row i is a pure function of (seed, index[i]), up to the model's own
    rounding; `index` counts from 0 unless given. `blocks` is a plan of one's own in place of the one that
    `config` describes.

    A row that has met one of `stop_ids`, with no mask before it, is finished: it costs nothing more, and
    what follows is filled with that token. Where nothing is rewritten (k = 0) the text up to there is the
    one that the whole run gives; elsewhere rows are looked at where a block ends, and the later blocks'
    chances to rewrite it are gone. A model that is told the time is told the share of masks. Where states
    are remembered (`refresh`), a pass over a block alone counts as one.
    """
    config = config if config is not None else ConfidenceConfig()
    device = denoiser.device
    process.check_states(denoiser.n_states)
    given, frozen = given.to(device), frozen.to(device)
    padding = None if padding is None else padding.to(device)
    mask_id = _checked_mask(process, stop_ids)
    _check_rows(denoiser, given, frozen, padding, config)
    n_open = _count_open(frozen)
    blocks = config.plan(n_open) if blocks is None else blocks
    check_blocks(blocks, n_open)
    if index is not None and index.shape != given.shape[:1]:
        raise UserError(f"index numbers {list(index.shape)} rows, and there are {len(given)}")
    index = (torch.arange(len(given)) if index is None else index).to(device)[:, None]
    position = torch.arange(given.shape[1], device=device)[None]

    def draw(stream: Stream, step: int) -> Tensor:
        return uniform(seed, stream, index, position, step)

    head = PredictingHead(
        denoiser, process.special_ids, config.filter,
        guidance=config.guidance, confidence=config.confidence,
    )  # fmt: skip
    run = _Run(denoiser, head, config, mask_id, frozen, padding, draw)
    z = torch.where(frozen, given, mask_id)
    rewrites = any(any(block.topk_uniform) for block in blocks)
    lengths = row_lengths(z, padding)
    ends = lengths
    n_steps = sum(len(block.topk_absorb) for block in blocks)
    watch = Watch(z, n_steps, record=record, on_step=on_step, on_frame=on_frame)
    for i, turn in enumerate(turns(blocks)):
        z = run.step(i, turn, z, ends == lengths)
        if stop_ids and (turn.closes or not rewrites):
            z, ends = stop_rows(z, run.open, mask_id, stop_ids, lengths)
        watch.show(z, turn.after, run.probs)
        if stop_ids and bool((ends < lengths).all()):
            break
    path = watch.trajectory(process.special_ids)
    return Sample(z, run.nfe.cpu(), run.head_rows, path, ends.cpu())


def _checked_mask(process: NoiseProcess, stop_ids: Sequence[int]) -> int:
    mask_id = process.vocab.mask_id
    if mask_id is None:
        raise UserError("confidence decoding fills masks, and this model's noise has none")
    if mask_id in stop_ids:
        raise UserError("the mask cannot be a token that ends a text")
    return mask_id


def _check_rows(
    denoiser: Denoiser,
    given: Tensor,
    frozen: Tensor,
    padding: Tensor | None,
    config: ConfidenceConfig,
) -> None:
    if given.shape != frozen.shape or given.ndim != 2 or not given.numel():
        raise UserError("given and frozen go together, both of one shape [batch, length]")
    prompt = frozen
    if padding is not None:
        check_padding(denoiser, frozen, padding)
        if config.refresh is not None:
            raise UserError(
                "where states are remembered (refresh) rows have one length: no padding"
            )
        prompt = frozen & ~padding
    if config.guidance != 1 and not bool(prompt.any(1).all()):
        raise UserError("guidance is away from the text without its prompt, so it needs a prompt")


class _Run:
    """What stays the same from step to step, and the count of what was spent."""

    def __init__(
        self,
        denoiser: Denoiser,
        head: PredictingHead,
        config: ConfidenceConfig,
        mask_id: int,
        frozen: Tensor,
        padding: Tensor | None,
        draw: Callable[[Stream, int], Tensor],
    ) -> None:
        self.denoiser, self.head, self.config, self.draw = denoiser, head, config, draw
        self.mask_id, self.frozen, self.open = mask_id, frozen, ~frozen
        self.padding = padding
        self.place = self.open.cumsum(1) - 1  # of an open position among all of its row
        self.memory = None if config.refresh is None else Memory(denoiser, config.refresh)
        self._block: Block | None = None
        self.nfe = torch.zeros(len(frozen), dtype=torch.int64, device=frozen.device)
        self.head_rows = 0

    def step(self, i: int, turn: Turn, z: Tensor, active: Tensor) -> Tensor:
        """The next state; rows that are not active, or have nothing to fill or rewrite, cost nothing.
        `probs` [B, L] is then what the model thinks of the tokens that it wrote."""
        self.probs = torch.full(z.shape, torch.nan, dtype=torch.float32, device=z.device)
        if turn.block is not self._block:
            self._enter(turn.block)
        span = self.span
        part = z[:, span]
        masked, movable = part == self.mask_id, self.open[:, span] & active[:, None]
        fillable = movable & masked & self.inside[:, span] & (turn.fill > 0)
        written = movable & ~masked & (turn.rewrite > 0)
        looked_at = fillable | written
        rows = looked_at.any(1).nonzero()[:, 0]
        if not len(rows):
            return z
        picked = PickedRows(looked_at[rows])
        hidden, blind = self._hidden(z[rows], rows, turn.before)
        order, n_picked = picked.order()
        self.nfe[rows] += 1 if blind is None else 2
        self.head_rows += n_picked
        width = part.shape[1]
        flat = rows[order // width] * width + order % width
        present, uniforms = (
            part.flatten()[flat],
            self.draw(Stream.TOKEN, i)[:, span].flatten()[flat],
        )
        found = self.head(hidden.flatten(0, 1)[order],
                          None if blind is None else blind.flatten(0, 1)[order],
                          uniforms, present)  # fmt: skip
        sure = found.sure
        if self.config.confidence == "random":
            sure = self.draw(Stream.ORDER, i)[:, span].flatten()[flat]
        doubted = (found.token != present) & (found.p_token >= found.p_present)
        better = torch.where(doubted, found.p_token, -torch.inf)
        flat = flat[:n_picked]  # those behind are there to make their number a round one
        chosen = surest(_placed(sure, flat, fillable), turn.fill)
        chosen |= surest(_placed(better, flat, written), turn.rewrite)
        token = part.flatten().scatter(0, flat, found.token[:n_picked]).view_as(part)
        p_token = self.probs[:, span].flatten().scatter(0, flat, found.p_token[:n_picked].float())
        self.probs[:, span] = torch.where(chosen, p_token.view_as(part), torch.nan)
        after = z.clone()
        after[:, span] = torch.where(chosen, token, part)
        return after

    def _enter(self, block: Block) -> None:
        """Begin a block: note where it lies, and the positions that the model is run on."""
        self._block = block
        self.inside = self.open & (self.place >= block.start) & (self.place < block.stop)
        self.span = slice(0, self.open.shape[1])
        if self.memory is not None:
            self.memory.forget()
            columns = self.inside.any(0).nonzero()[:, 0]
            self.span = slice(int(columns[0]), int(columns[-1]) + 1)

    def _hidden(self, z: Tensor, rows: Tensor, time: float) -> tuple[Tensor, Tensor | None]:
        """Hidden states [B, span, d], and under guidance those without the prompt, from the same pass."""
        guided = self.config.guidance != 1
        padding = None if self.padding is None else self.padding[rows]
        if guided:
            padding = None if padding is None else torch.cat([padding, padding])
            z = torch.cat([z, torch.where(self.frozen[rows], self.mask_id, z)])
            rows = torch.cat([rows, rows + len(self.frozen)])
        t = torch.full(z.shape[:1], time, device=z.device)
        if self.memory is None:
            hidden = run_trunk(self.denoiser, z, t, None, padding)
        else:
            hidden = self.memory.hidden(z, t, rows, self.span)
        if not guided:
            return hidden, None
        seen, blind = hidden.chunk(2)
        return seen, blind


def _placed(values: Tensor, flat: Tensor, where: Tensor) -> Tensor:
    """[B, L]: the rows' values in their places `flat`; -inf elsewhere and where the mask does not hold."""
    full = torch.full(where.shape, -torch.inf, dtype=torch.float64, device=where.device)
    full.view(-1)[flat] = values[: len(flat)].double()
    return full.masked_fill_(~where, -torch.inf)


def surest(priority: Tensor, n: int) -> Tensor:
    """The `n` highest of each row of `priority` [B, L], never one of -inf; of equals the first."""
    order = priority.argsort(dim=1, descending=True, stable=True)[:, :n]
    chosen = torch.zeros_like(priority, dtype=torch.bool).scatter_(1, order, True)
    return chosen & (priority != -torch.inf)


def stop_rows(
    z: Tensor, open_: Tensor, mask_id: int, stop_ids: Sequence[int], lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Rows in which a token that ends a text has no mask before it are filled with it from there on; and
    where each row ends."""
    unbroken = (open_ & (z == mask_id)).cumsum(1) == 0
    ends = find_ends(z, open_ & unbroken, stop_ids, lengths)
    behind = torch.arange(z.shape[1], device=z.device) > ends[:, None]
    token = z.gather(1, ends.clamp_max(z.shape[1] - 1)[:, None])
    return torch.where(behind & open_, token, z), ends


def _count_open(frozen: Tensor) -> int:
    """How many open positions each row has; all must have as many."""
    counts = (~frozen).sum(1)
    if bool((counts != counts[0]).any()):
        raise UserError(
            f"every row needs as many open positions, got {int(counts.min())} to "
            f"{int(counts.max())}; `complete` groups prompts that go together"
        )
    return int(counts[0])
