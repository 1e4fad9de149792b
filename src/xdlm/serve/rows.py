"""One row on its way from noise to text, a step at a time, for an engine that runs many side by side.

A row asks (`ask`) what it needs of the model in its next step, if anything, and is told (`tell`). All else
is its own: its times, its random numbers, its settings. So what becomes of it cannot depend on which rows
are beside it, as long as the model's answers do not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.ops import Stream, draw_and_weigh, head_logits, uniform
from xdlm.sampling.ancestral import Leg, SamplerConfig, time_grid
from xdlm.sampling.confidence import ConfidenceConfig, Turn, stop_rows, surest, turns
from xdlm.sampling.constraints import Rules
from xdlm.sampling.filters import Filter
from xdlm.sampling.predictions import PredictingHead, Prediction
from xdlm.sampling.result import find_ends
from xdlm.sampling.schedule import plan_blocks
from xdlm.sampling.step import StepUniforms, apply_plan, is_noise, plan_step
from xdlm.sampling.writing import Config

#: Steps whose random numbers are computed together: one by one they would cost more than a small model.
_STEPS_AHEAD = 32


class HeadKey(NamedTuple):
    """What decides how a head looks at its rows: the sampler's settings, and tokens that are banned."""

    config: Config
    banned: tuple[int, ...]


class Ask(NamedTuple):
    """What a row needs of the model: predictions at `positions` [R] of `z` [L] at time `t`, by the head of
    its settings; `blind` [L] is the row without its prompt, for guidance. `uniform` [R] is to draw by.
    Where `law_at` [R'] is given, the whole predictions there are asked for too."""

    z: Tensor
    blind: Tensor | None
    t: float
    positions: Tensor
    uniform: Tensor
    head: HeadKey
    law_at: Tensor | None = None


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

    def __init__(
        self,
        process: NoiseProcess,
        ids: Sequence[int | None],
        *,
        seed: int,
        index: int,
        stop_ids: Sequence[int],
        device: torch.device,
        rules: Rules,
    ) -> None:
        self.process, self.stop_ids, self.rules = process, tuple(stop_ids), rules
        self.constrained = torch.zeros(len(ids), dtype=torch.bool, device=device)
        self.constrained[rules.positions] = True
        self._check_rules(ids)
        self.given = torch.tensor([0 if i is None else i for i in ids], device=device)
        self.open = torch.tensor([i is None for i in ids], device=device)
        self.end = len(ids)
        self.probs = torch.full(self.given.shape, torch.nan, device=device)
        self.noise = _Noise(seed, index, len(ids), device)

    @property
    def done(self) -> bool:
        return self.step == self.steps

    @abstractmethod
    def ask(self) -> Ask | None:
        """What the next step needs of the model. None where it needs nothing: it is then done."""

    @abstractmethod
    def tell(self, found: Prediction, law: Tensor | None = None) -> None:
        """Take the step that was asked for; `law` [R', V] are the logits where they were asked for."""

    def _check_rules(self, ids: Sequence[int | None]) -> None:
        known = {*self.process.special_ids, *self.rules.banned}
        if len(known) >= self.process.vocab.size:
            raise UserError("every token is banned: none is left to write")
        if self.rules.blanks and self.stop_ids:
            raise UserError(
                "a text with patterns has its length: leave out what would end it sooner"
            )
        if any(ids[position] is not None for position in self.rules.positions):
            raise UserError("a pattern is for positions that are to be filled")

    def _widened(self, needed: Tensor) -> tuple[Tensor, Tensor | None]:
        """Positions to ask about, and those whose whole law is wanted: if a token of a constrained blank
        is needed, all of them are, since they are drawn together."""
        if not bool((needed & self.constrained).any()):
            return needed.nonzero()[:, 0], None
        law_at = torch.tensor(self.rules.positions, device=needed.device)
        return (needed | self.constrained).nonzero()[:, 0], law_at

    def _impose(
        self, found: Prediction, positions: Tensor, law: Tensor, reshape: Filter, numbers: Tensor
    ) -> Prediction:
        """The prediction with the tokens of constrained blanks drawn together; where such a token is the
        present one, that is certain to be clean text, and where not, to be noise."""
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
        """What clean tokens are likely at n positions, given the present ones [n] and the model's weights
        [n, V]."""

    def _stepped(self, z: Tensor, time: float, positions: Tensor, probs: Tensor) -> None:
        self.probs = torch.full(z.shape, torch.nan, device=z.device)
        self.probs[positions] = probs.float()
        self.z, self.time, self.step = z, time, self.step + 1


class AncestralRow(Row):
    """Exact reverse steps: `sampling.ancestral`, one row at a time."""

    def __init__(
        self,
        process: NoiseProcess,
        ids: Sequence[int | None],
        config: SamplerConfig,
        **args: object,
    ) -> None:
        super().__init__(process, ids, **args)  # type: ignore[arg-type]
        self.config, self.steps = config, config.steps + 1
        self.legs = _legs(process, config.steps, self.given.device)
        prior = process.prior((1, len(ids)), uniform=self.noise.at(Stream.PRIOR, 0))[0]
        self.z = torch.where(self.open, prior, self.given)

    def ask(self) -> Ask | None:
        leg, z = self.legs[self.step], self.z[None]
        draws = (Stream.BRANCH, Stream.ACCEPT, Stream.TOKEN, Stream.NOISE)
        self.uniforms = StepUniforms(*(self.noise.at(stream, self.step) for stream in draws))
        self.plan = plan_step(
            self.process, leg.at_s, leg.at_t, z, self.uniforms.branch, self.open[None]
        )
        positions, law_at = self._widened(self.plan.needs_head[0])
        if not len(positions):
            nothing = positions.double()
            self._apply(leg, positions, positions.bool(), positions, nothing)
            return None
        head = self.config
        if leg.last and head.last == "argmax":
            head = replace(head, filter=replace(head.filter, temperature=0.0))
        key = HeadKey(head, self.rules.banned)
        return Ask(self.z, None, leg.t, positions, self.uniforms.token[0, positions], key, law_at)

    def tell(self, found: Prediction, law: Tensor | None = None) -> None:
        leg, (positions, _) = self.legs[self.step], self._widened(self.plan.needs_head[0])
        if law is not None:
            last = leg.last and self.config.last == "argmax"
            reshape = replace(self.config.filter, temperature=0.0) if last else self.config.filter
            found = self._impose(found, positions, law, reshape, self.uniforms.token[0])
            needed = self.plan.needs_head[0, positions]
            found, positions = Prediction(*(part[needed] for part in found)), positions[needed]
        first = torch.zeros_like(positions)
        accept = self.uniforms.accept[0, positions]
        noisy = is_noise(leg.at_t.index(first), found.p_present, self.z[positions], accept)
        written = noisy & self.plan.from_model[0, positions]
        probs = torch.where(written, found.p_token, torch.nan)
        self.nfe += 1
        self._apply(leg, positions, noisy, found.token, probs)

    def _clean(self, present: Tensor, weights: Tensor) -> Tensor:
        """`p(x = e | z_t) ~ x~_e (alpha_t [e = z_t] + b_t(z_t))`: a mask is noise for certain."""
        leg = self.legs[self.step]
        noise = leg.at_t.b.at(present[None])[0]
        kept = torch.zeros_like(weights).scatter_(1, present[:, None], leg.at_t.alpha.item())
        certain = torch.zeros_like(weights).scatter_(1, present[:, None], 1.0)
        return torch.where((noise > 0)[:, None], weights * (kept + noise[:, None]), certain)

    def _apply(
        self, leg: Leg, positions: Tensor, noisy: Tensor, drawn: Tensor, probs: Tensor
    ) -> None:
        rows = (torch.zeros_like(positions), positions)
        after = apply_plan(
            self.process, leg.at_s, self.z[None], self.plan, self.uniforms.noise, rows, noisy, drawn
        )
        self._stepped(after[0], leg.s, positions, probs)
        if self.done:
            self.end = int(find_ends(after, self.open[None], self.stop_ids)[0])


class ConfidenceRow(Row):
    """The paper's Algorithm 1: `sampling.confidence`, one row at a time."""

    def __init__(
        self,
        process: NoiseProcess,
        ids: Sequence[int | None],
        config: ConfidenceConfig,
        **args: object,
    ) -> None:
        super().__init__(process, ids, **args)  # type: ignore[arg-type]
        mask_id = process.vocab.mask_id
        if mask_id is None:
            raise UserError("confidence decoding fills masks, and this model's noise has none")
        if config.refresh is not None:
            raise UserError("refresh remembers states of one request alone; leave it out here")
        if config.guidance != 1 and bool(self.open.all()):
            raise UserError(
                "guidance is away from the text without its prompt, so it needs a prompt"
            )
        self.config, self.mask_id = config, mask_id
        self.plan = list(
            turns(
                plan_blocks(
                    int(self.open.sum()), steps=config.steps, block_length=config.block_length,
                    k=config.k,
                )
            )
        )  # fmt: skip
        self.steps = len(self.plan)
        self.rewrites = any(turn.rewrite for turn in self.plan)
        self.place = self.open.cumsum(0) - 1  # of an open position among all open ones
        self.z = torch.where(self.open, mask_id, self.given)

    def ask(self) -> Ask | None:
        turn = self.plan[self.step]
        masked = self.z == self.mask_id
        inside = (self.place >= turn.block.start) & (self.place < turn.block.stop)
        self.fillable = self.open & masked & inside & (turn.fill > 0)
        self.written = self.open & ~masked & (turn.rewrite > 0)
        positions, law_at = self._widened(self.fillable | self.written)
        if not len(positions):
            self._advance(turn, self.z, positions, positions.double())
            return None
        guided = self.config.guidance != 1
        blind = torch.where(self.open, self.z, self.mask_id) if guided else None
        token = self.noise.at(Stream.TOKEN, self.step)[0, positions]
        key = HeadKey(self.config, self.rules.banned)
        return Ask(self.z, blind, turn.before, positions, token, key, law_at)

    def tell(self, found: Prediction, law: Tensor | None = None) -> None:
        turn = self.plan[self.step]
        positions, _ = self._widened(self.fillable | self.written)
        if law is not None:
            numbers = self.noise.at(Stream.TOKEN, self.step)[0]
            found = self._impose(found, positions, law, self.config.filter, numbers)
        present = self.z[positions]
        sure = found.sure
        if self.config.confidence == "random":
            sure = self.noise.at(Stream.ORDER, self.step)[0, positions]
        doubted = (found.token != present) & (found.p_token >= found.p_present)
        fill = torch.where(self.fillable[positions], sure.double(), -torch.inf)
        rewrite = torch.where(self.written[positions] & doubted, found.p_token, -torch.inf)
        chosen = surest(fill[None], turn.fill)[0] | surest(rewrite[None], turn.rewrite)[0]
        z = self.z.clone()
        z[positions[chosen]] = found.token[chosen]
        self.nfe += 1 if self.config.guidance == 1 else 2
        self._advance(turn, z, positions, torch.where(chosen, found.p_token, torch.nan))

    def _clean(self, present: Tensor, weights: Tensor) -> Tensor:
        """Masks are open; what is written in a constrained blank stays."""
        certain = torch.zeros_like(weights).scatter_(1, present[:, None], 1.0)
        return torch.where((present == self.mask_id)[:, None], weights, certain)

    def _advance(self, turn: Turn, z: Tensor, positions: Tensor, probs: Tensor) -> None:
        if self.stop_ids and (turn.closes or not self.rewrites):
            stopped, ends = stop_rows(z[None], self.open[None], self.mask_id, self.stop_ids)
            z, self.end = stopped[0], int(ends[0])
        self._stepped(z, turn.after, positions, probs)
        if self.end < len(z):
            self.steps = self.step  # all that follows is filled already


class AncestralHead:
    """Draws from the prediction after temperature and nucleus, and what that law gives the present token;
    `p_token` is from the prediction as it is."""

    def __init__(self, denoiser: Denoiser, special: tuple[int, ...], reshape: Filter) -> None:
        self.weight, self.bias, self.special = denoiser.head_weight, denoiser.head_bias, special
        self.reshape = reshape

    def law(self, hidden: Tensor, blind: Tensor | None) -> Tensor:
        """Logits [R, V] before temperature and nucleus."""
        return head_logits(hidden, self.weight, self.bias, self.special)

    def __call__(
        self, hidden: Tensor, blind: Tensor | None, uniform: Tensor, present: Tensor
    ) -> Prediction:
        logits = self.law(hidden, blind)
        token, p_present = draw_and_weigh(self.reshape(logits), uniform, present)
        log_p = logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(-1)
        p_token = log_p.double().exp()
        return Prediction(token, p_token, p_present, p_token)


def make_row(
    process: NoiseProcess, ids: Sequence[int | None], config: Config, **args: object
) -> Row:
    """A row of either sampler."""
    if isinstance(config, ConfidenceConfig):
        return ConfidenceRow(process, ids, config, **args)
    if config.impl != "thinned":
        raise UserError(f"requests are answered by the thinned sampler, not by '{config.impl}'")
    return AncestralRow(process, ids, config, **args)


def make_head(
    denoiser: Denoiser, process: NoiseProcess, key: HeadKey
) -> AncestralHead | PredictingHead:
    """What rows of these settings ask."""
    config, special = key.config, (*process.special_ids, *key.banned)
    if isinstance(config, ConfidenceConfig):
        return PredictingHead(
            denoiser, special, config.filter, guidance=config.guidance,
            confidence=config.confidence,
        )  # fmt: skip
    return AncestralHead(denoiser, special, config.filter)


@lru_cache(maxsize=64)
def _legs(process: NoiseProcess, steps: int, device: torch.device) -> list[Leg]:
    return list(time_grid(process, steps, torch.zeros(1, device=device)))


class _Noise:
    """A row's random numbers [1, L], those of several steps at a time."""

    def __init__(self, seed: int, index: int, length: int, device: torch.device) -> None:
        self.seed, self.index = seed, torch.tensor(index, device=device)
        self.position = torch.arange(length, device=device)
        self._ahead: dict[Stream, tuple[int, Tensor]] = {}

    def at(self, stream: Stream, step: int) -> Tensor:
        block, offset = divmod(step, _STEPS_AHEAD)
        known = self._ahead.get(stream)
        if known is None or known[0] != block:
            steps = torch.arange(_STEPS_AHEAD, device=self.position.device) + block * _STEPS_AHEAD
            numbers = uniform(self.seed, stream, self.index, self.position, steps[:, None])
            self._ahead[stream] = known = (block, numbers)
        return known[1][offset : offset + 1]
