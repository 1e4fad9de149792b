"""Exact reverse steps, `sampling.ancestral`, of rows that are each at a step of their own."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Unpack

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.ops import Stream, draw_and_weigh, head_logits, uniform
from xdlm.sampling.ancestral import THINNED, SamplerConfig
from xdlm.sampling.filters import Filter
from xdlm.sampling.predictions import Prediction
from xdlm.sampling.result import find_ends
from xdlm.sampling.reverse import time_grid
from xdlm.sampling.rows import Ask, HeadKey, Places, Row, RowArgs, Wave
from xdlm.sampling.step import Plan, StepUniforms, apply_plan, is_noise, plan_step
from xdlm.structs import Coefs


class AncestralRow(Row):
    """A row that takes exact reverse steps."""

    streams = (Stream.BRANCH, Stream.ACCEPT, Stream.TOKEN, Stream.NOISE)

    def __init__(
        self,
        process: NoiseProcess,
        ids: Sequence[int | None],
        config: SamplerConfig,
        **args: Unpack[RowArgs],
    ) -> None:
        super().__init__(process, ids, **args)
        if config.impl != THINNED:
            raise UserError(
                f"banned and blanks work with impl='thinned' only, not with '{config.impl}'"
            )
        self.config, self.steps = config, config.steps + 1
        self.times, self.coefs = _grid(process, config.steps, self.given.device)
        first = uniform(self.noise.seed, Stream.PRIOR, self.noise.index, self.noise.position)
        prior = process.prior((1, len(ids)), uniform=first[None])[0]
        self.z = torch.where(self.open, prior, self.given)

    @property
    def head(self) -> HeadKey:
        """How the next step looks at its predictions."""
        config = self.config
        if config.last == "argmax" and self.step == self.steps - 1:
            config = replace(config, filter=replace(config.filter, temperature=0.0))
        return HeadKey(config, self.rules.banned)

    @property
    def kind(self) -> Hashable:
        alone = id(self) if self.rules.blanks else None
        return self.process, len(self.z), self.head, alone

    def wave(self, others: Sequence[Row]) -> Wave:
        rows = [row for row in (self, *others) if isinstance(row, AncestralRow)]
        return AncestralWave(rows)

    def _clean(self, present: Tensor, weights: Tensor) -> Tensor:
        """`p(x = e | z_t) ~ x~_e (alpha_t [e = z_t] + b_t(z_t))`: a mask is noise for certain."""
        at_t = self.coefs.index(slice(self.step, self.step + 1))
        noise = at_t.b.at(present[None])[0]
        kept = torch.zeros_like(weights).scatter_(1, present[:, None], at_t.alpha.item())
        certain = torch.zeros_like(weights).scatter_(1, present[:, None], 1.0)
        return torch.where((noise > 0)[:, None], weights * (kept + noise[:, None]), certain)


class AncestralWave(Wave):
    """The next steps of rows of one process, length and settings."""

    rows: Sequence[AncestralRow]
    plan: Plan

    def __init__(self, rows: Sequence[AncestralRow]) -> None:
        first = rows[0]
        self.rows, self.process, self.head = list(rows), first.process, first.head
        self.z = torch.stack([row.z for row in rows])
        step = torch.tensor([row.step for row in rows], device=self.z.device)
        self.at_t, self.at_s = first.coefs.index(step), first.coefs.index(step + 1)
        numbers = torch.stack([row.noise.at(row.step) for row in rows], dim=1)
        self.uniforms = StepUniforms(*numbers)
        free = torch.stack([row.open for row in rows])
        self.plan = plan_step(
            self.process, self.at_s, self.at_t, self.z, self.uniforms.branch, free
        )
        self.needed = self.plan.needs_head

    def settle(self) -> Sequence[Row]:
        busy = self.needed.any(1).tolist()
        if all(busy):
            return []
        idle = self._part([lane for lane, it_is in enumerate(busy) if not it_is])
        nothing = torch.empty(0, dtype=torch.int64, device=self.z.device)
        idle._apply((nothing, nothing), nothing.bool(), nothing, nothing.double())
        self.__dict__ = self._part([lane for lane, it_is in enumerate(busy) if it_is]).__dict__
        return idle.rows

    def ask(self) -> Ask:
        first, law_at = self.rows[0], None
        self.places: Places
        if first.rules.blanks:  # then it is alone
            positions, wanted = first.widened(self.needed[0])
            self.places = torch.zeros_like(positions), positions
            law_at = None if wanted is None else (torch.zeros_like(wanted), wanted)
        else:
            lanes, positions = self.needed.nonzero().unbind(1)
            self.places = lanes, positions
        t = torch.tensor([row.times[row.step] for row in self.rows], device=self.z.device)
        token = self.uniforms.token[self.places]
        return Ask(self.z, None, t, self.places, token, self.head, law_at)

    def tell(self, found: Prediction, law: Tensor | None) -> None:
        places = self.places
        if law is not None:
            config = self.head.config
            assert isinstance(config, SamplerConfig)
            numbers = self.uniforms.token[0]
            found = self.rows[0].impose(found, places[1], law, config.filter, numbers)
            needed = self.needed[places]
            found = Prediction(*(part[needed] for part in found))
            places = places[0][needed], places[1][needed]
        accept = self.uniforms.accept[places]
        noisy = is_noise(self.at_t.index(places[0]), found.p_present, self.z[places], accept)
        written = noisy & self.plan.from_model[places]
        for row in self.rows:
            row.nfe += 1
        self._apply(places, noisy, found.token, torch.where(written, found.p_token, torch.nan))

    def split(self) -> Sequence[Wave]:
        return [self._part([lane]) for lane in range(len(self.rows))]

    def _part(self, lanes: Sequence[int]) -> AncestralWave:
        """The wave of some of the rows."""
        take = torch.tensor(lanes, dtype=torch.int64, device=self.z.device)
        part = copy.copy(self)
        part.rows = [self.rows[lane] for lane in lanes]
        part.z, part.needed = self.z[take], self.needed[take]
        part.at_t, part.at_s = self.at_t.index(take), self.at_s.index(take)
        part.uniforms = StepUniforms(*(numbers[take] for numbers in self.uniforms))
        part.plan = Plan(*(choice[take] for choice in self.plan))
        return part

    def _apply(self, places: Places, noisy: Tensor, drawn: Tensor, probs: Tensor) -> None:
        after = apply_plan(
            self.process, self.at_s, self.z, self.plan, self.uniforms.noise, places, noisy, drawn
        )
        thought = torch.full(after.shape, torch.nan, device=after.device)
        thought[places] = probs.float()
        for row, z, p in zip(self.rows, after, thought, strict=True):
            row.stepped(z, row.times[row.step + 1], p)
            if row.done:
                row.end = int(find_ends(z[None], row.open[None], row.stop_ids)[0])


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


@lru_cache(maxsize=64)
def _grid(
    process: NoiseProcess, steps: int, device: torch.device
) -> tuple[tuple[float, ...], Coefs]:
    """Times from 1 to 0, and the coefficients at them."""
    legs = list(time_grid(process, steps, torch.zeros(1, device=device)))
    times = (*(leg.t for leg in legs), legs[-1].s)
    return times, Coefs.join([*(leg.at_t for leg in legs), legs[-1].at_s])
