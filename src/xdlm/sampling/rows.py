"""Rows on their way from noise to text, for an engine that runs many side by side.

Rows that are alike take a step together, as a wave: it asks what it needs of the model, if anything, and is
told. All else is each row's own: its times, its random numbers, its settings. So what becomes of a row
cannot depend on which rows are beside it, as long as the model's answers do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import ClassVar, NamedTuple, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.noise import NoiseProcess
from xdlm.ops import Stream, uniform
from xdlm.sampling.constraints import Rules
from xdlm.sampling.filters import Filter
from xdlm.sampling.predictions import Prediction
from xdlm.sampling.trajectory import Trajectory
from xdlm.sampling.writing import Config

#: Steps whose random numbers are computed together: one by one they would cost more than a small model.
_STEPS_AHEAD = 32


class HeadKey(NamedTuple):
    """What decides how a head looks at its rows: the sampler's settings, and tokens that are banned."""

    config: Config
    banned: tuple[int, ...]


#: Positions of a wave: the numbers of rows and the positions in them, [R] each.
Places = tuple[Tensor, Tensor]


class Ask(NamedTuple):
    """What a wave needs of the model: predictions at `places` of `z` [B, L] at times `t` [B], by the head
    of its settings; `blind` [B, L] are the rows without their prompts, for guidance. `uniform` [R] is to
    draw by. Where `law_at` is given, the whole predictions there are asked for too."""

    z: Tensor
    blind: Tensor | None
    t: Tensor
    places: Places
    uniform: Tensor
    head: HeadKey
    law_at: Places | None = None


class RowArgs(TypedDict):
    """What every row is given besides its process, its tokens and its sampler's settings: what its random
    numbers depend on, which tokens end it, where it is computed, what it must obey and whether its states
    are recorded."""

    seed: int
    index: int
    stop_ids: Sequence[int]
    device: torch.device
    rules: Rules
    record: NotRequired[bool]


class Row(ABC):
    """A row with holes (None) that is being filled. `step` of `steps` are done; `z` [L] is the state,
    `probs` [L] what the model thought of the tokens that it wrote in the last step, `end` where the text
    ends, as far as that is known."""

    z: Tensor
    time: float = 1.0
    nfe: int = 0
    step: int = 0
    steps: int
    end: int
    streams: ClassVar[tuple[Stream, ...]]

    def __init__(
        self, process: NoiseProcess, ids: Sequence[int | None], **args: Unpack[RowArgs]
    ) -> None:
        rules, device = args["rules"], args["device"]
        self.process, self.stop_ids, self.rules = process, tuple(args["stop_ids"]), rules
        self.record = args.get("record", False)
        self._states: list[tuple[Tensor, Tensor, float]] = []
        self._check(ids)
        self.constrained = torch.zeros(len(ids), dtype=torch.bool, device=device)
        self.constrained[rules.positions] = True
        self.given = torch.tensor([0 if i is None else i for i in ids], device=device)
        self.open = torch.tensor([i is None for i in ids], device=device)
        self.end = len(ids)
        self.probs = torch.full(self.given.shape, torch.nan, device=device)
        self.noise = Noise(args["seed"], args["index"], len(ids), device, self.streams)

    @property
    def done(self) -> bool:
        return self.step == self.steps

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """Rows of one kind can take their next steps together."""

    @abstractmethod
    def wave(self, others: Sequence[Row]) -> Wave:
        """The next step of this row and of others of its kind."""

    def stepped(self, z: Tensor, time: float, probs: Tensor) -> None:
        if not self.step:
            self._note()
        self.z, self.time, self.probs, self.step = z, time, probs, self.step + 1
        self._note()

    def trajectory(self) -> Trajectory | None:
        """Every state so far, where they were to be recorded."""
        if not self.record:
            return None
        frames, probs, times = zip(*self._states, strict=True)
        return Trajectory(
            torch.stack(frames)[:, None].cpu(), times, self.process.special_ids,
            torch.stack(probs[1:])[:, None].cpu(),
        )  # fmt: skip

    def _note(self) -> None:
        if self.record:
            self._states.append((self.z.to(torch.int32), self.probs, self.time))

    def widened(self, needed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Positions to ask about, and those whose whole law is wanted: if a token of a constrained blank
        is needed, all of them are, since they are drawn together."""
        if not self.rules.blanks or not bool((needed & self.constrained).any()):
            return needed.nonzero()[:, 0], None
        law_at = torch.tensor(self.rules.positions, device=needed.device)
        return (needed | self.constrained).nonzero()[:, 0], law_at

    def impose(
        self, found: Prediction, positions: Tensor, law: Tensor, reshape: Filter, numbers: Tensor
    ) -> Prediction:
        """The prediction with the tokens of constrained blanks drawn together. In their places it is
        certain of the token drawn: the present one has probability 1 if it is that one, else 0."""
        temperature = reshape.temperature or 1.0
        probs = law.double().softmax(-1)
        weights = (law.double() / temperature).softmax(-1)
        # What the model all but rules out must stay possible, or a pattern could not be honoured.
        weights = torch.where(law > -torch.inf, weights.clamp_min(1e-30), 0.0)
        start = 0
        for blank in self.rules.blanks:
            span = slice(start, start + len(blank.positions))
            start = span.stop
            where = torch.tensor(blank.positions, device=law.device)
            present = self.z[where]
            clean = self._clean(present, weights[span])
            tokens = blank.automaton.draw(clean.cpu(), numbers[where].cpu(), reshape).to(where)
            p_token = probs[span].gather(1, tokens[:, None])[:, 0]
            at = torch.searchsorted(positions, where)
            found = Prediction(
                found.token.index_put((at,), tokens),
                found.p_token.index_put((at,), p_token),
                found.p_present.index_put((at,), (tokens == present).double()),
                found.sure.index_put((at,), p_token),
            )
        return found

    @abstractmethod
    def _clean(self, present: Tensor, weights: Tensor) -> Tensor:
        """How likely each clean token is at n positions, [n, V] up to factors, given the present tokens [n]
        and the model's weights [n, V]."""

    def _check(self, ids: Sequence[int | None]) -> None:
        size, special = self.process.vocab.size, self.process.special_ids
        if None not in ids:
            raise UserError("there is no position to fill")
        for token in (*ids, *self.stop_ids, *self.rules.banned):
            if token is not None and (not 0 <= token < size or token in special):
                raise UserError(f"{token} is no token of a text: they lie in 0..{size - 1}")
        if len({*special, *self.rules.banned}) >= size:
            raise UserError("every token is banned: none is left to write")
        if self.rules.blanks and self.stop_ids:
            raise UserError(
                "a text with patterns has its length: leave out what would end it sooner"
            )
        if any(ids[position] is not None for position in self.rules.positions):
            raise UserError("a pattern is for positions that are to be filled")


class Wave(ABC):
    """A step that some rows take together."""

    rows: Sequence[Row]

    @abstractmethod
    def settle(self) -> Sequence[Row]:
        """Rows whose step needs nothing of the model take it, and leave the wave."""

    @abstractmethod
    def ask(self) -> Ask:
        """What the rows that are left need of the model."""

    @abstractmethod
    def tell(self, found: Prediction, law: Tensor | None) -> None:
        """Take the step that was asked for; `law` [R', V] are the logits where they were asked for."""

    @abstractmethod
    def split(self) -> Sequence[Wave]:
        """The same, row by row."""


class Noise:
    """A row's random numbers of some streams, those of several steps at a time."""

    def __init__(
        self, seed: int, index: int, length: int, device: torch.device, streams: Sequence[Stream]
    ) -> None:
        self.seed, self.index = seed, torch.tensor(index, device=device)
        self.position = torch.arange(length, device=device)
        self.streams = torch.tensor(streams, device=device)[:, None, None]
        self._block, self._ahead = -1, torch.empty(0)

    def at(self, step: int) -> Tensor:
        """[S, L], in the order of the streams."""
        block, offset = divmod(step, _STEPS_AHEAD)
        if block != self._block:
            steps = torch.arange(_STEPS_AHEAD, device=self.position.device) + block * _STEPS_AHEAD
            self._ahead = uniform(
                self.seed, self.streams, self.index, self.position, steps[:, None]
            )
            self._block = block
        return self._ahead[:, offset]
