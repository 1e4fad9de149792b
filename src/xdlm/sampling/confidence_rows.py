"""The paper's Algorithm 1, `sampling.confidence`, one row at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.noise import NoiseProcess
from xdlm.ops import Stream
from xdlm.sampling.confidence import ConfidenceConfig, Turn, stop_rows, surest, turns
from xdlm.sampling.predictions import Prediction
from xdlm.sampling.rows import Ask, HeadKey, Row, RowArgs, Wave


class ConfidenceRow(Row):
    """A row that fills its surest masks first and rewrites what it doubts."""

    streams = (Stream.TOKEN, Stream.ORDER)

    def __init__(
        self,
        process: NoiseProcess,
        ids: Sequence[int | None],
        config: ConfidenceConfig,
        **args: Unpack[RowArgs],
    ) -> None:
        super().__init__(process, ids, **args)
        mask_id = process.vocab.mask_id
        if mask_id is None:
            raise UserError("confidence decoding fills masks, and this model's noise has none")
        if config.refresh is not None:
            raise UserError("banned and blanks work without refresh only: leave it out")
        if config.guidance != 1 and bool(self.open.all()):
            raise UserError(
                "guidance is away from the text without its prompt, so it needs a prompt"
            )
        self.config, self.mask_id = config, mask_id
        self.plan = list(turns(config.plan(int(self.open.sum()))))
        self.steps = len(self.plan)
        self.rewrites = any(turn.rewrite for turn in self.plan)
        self.place = self.open.cumsum(0) - 1  # of an open position among all open ones
        self.z = torch.where(self.open, mask_id, self.given)

    @property
    def kind(self) -> Hashable:
        return id(self)

    def wave(self, others: Sequence[Row]) -> Wave:
        assert not others
        return ConfidenceWave(self)

    def advance(self, turn: Turn, z: Tensor, probs: Tensor) -> None:
        if self.stop_ids and (turn.closes or not self.rewrites):
            stopped, ends = stop_rows(z[None], self.open[None], self.mask_id, self.stop_ids)
            z, self.end = stopped[0], int(ends[0])
        self.stepped(z, turn.after, probs)
        if self.end < len(z):
            self.steps = self.step  # all that follows is filled already

    def _clean(self, present: Tensor, weights: Tensor) -> Tensor:
        """Masks are open; what is written in a constrained blank stays."""
        certain = torch.zeros_like(weights).scatter_(1, present[:, None], 1.0)
        return torch.where((present == self.mask_id)[:, None], weights, certain)


class ConfidenceWave(Wave):
    """The next step of one row."""

    def __init__(self, row: ConfidenceRow) -> None:
        self.row, self.rows, self.turn = row, [row], row.plan[row.step]
        turn, masked = self.turn, row.z == row.mask_id
        inside = (row.place >= turn.block.start) & (row.place < turn.block.stop)
        self.fillable = row.open & masked & inside & (turn.fill > 0)
        self.written = row.open & ~masked & (turn.rewrite > 0)
        self.positions, self.law_at = row.widened(self.fillable | self.written)

    def settle(self) -> Sequence[Row]:
        if len(self.positions):
            return []
        self.row.advance(self.turn, self.row.z, self._no_probs())
        self.rows = []
        return [self.row]

    def ask(self) -> Ask:
        row = self.row
        blind = None
        if row.config.guidance != 1:
            blind = torch.where(row.open, row.z, row.mask_id)[None]
        first = torch.zeros_like(self.positions)
        law_at = None if self.law_at is None else (torch.zeros_like(self.law_at), self.law_at)
        return Ask(
            row.z[None], blind, torch.tensor([self.turn.before], device=row.z.device),
            (first, self.positions), row.noise.at(row.step)[0, self.positions],
            HeadKey(row.config, row.rules.banned), law_at,
        )  # fmt: skip

    def tell(self, found: Prediction, law: Tensor | None) -> None:
        row, turn, positions = self.row, self.turn, self.positions
        if law is not None:
            numbers = row.noise.at(row.step)[0]
            found = row.impose(found, positions, law, row.config.filter, numbers)
        present = row.z[positions]
        sure = found.sure
        if row.config.confidence == "random":
            sure = row.noise.at(row.step)[1, positions]
        doubted = (found.token != present) & (found.p_token >= found.p_present)
        fill = torch.where(self.fillable[positions], sure.double(), -torch.inf)
        rewrite = torch.where(self.written[positions] & doubted, found.p_token, -torch.inf)
        chosen = surest(fill[None], turn.fill)[0] | surest(rewrite[None], turn.rewrite)[0]
        z, probs = row.z.clone(), self._no_probs()
        z[positions[chosen]] = found.token[chosen]
        probs[positions[chosen]] = found.p_token[chosen].float()
        row.nfe += 1 if row.config.guidance == 1 else 2
        row.advance(turn, z, probs)

    def split(self) -> Sequence[Wave]:
        return [self]

    def _no_probs(self) -> Tensor:
        return torch.full(self.row.z.shape, torch.nan, device=self.row.z.device)
