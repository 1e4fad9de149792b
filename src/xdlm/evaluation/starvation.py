"""What float32 noise makes of a law, calculated.

Where one weight is far above all others, a token of the share R of all weight is drawn with the
probability d / (exp(d / R) - 1), d = 2^-24 (`sampling.starved` says why). A position of known law p is then
a chain of known probabilities: from z a step leads to each other e with that of

    R  =  f_s(p, e) / (1 + f_s(p, z) alpha_ts / b_ts(z)),

or stays by the same rule with `f_s(p, z) (1 + alpha_ts / b_ts(z))` above the line (`noise.process` has the
notation), all divided by their sum, which is 1 but for what is starved. Where no weight is far above the
others, as in the first and in the last step, the rule is good to first order in d V. Tokens of neighbouring
ranks are taken as one class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.evaluation.known_law import IndependentLaw
from xdlm.noise import NoiseProcess
from xdlm.noise.process import Bridge
from xdlm.sampling.reverse import Leg, time_grid
from xdlm.sampling.starved import LEAST, wins
from xdlm.structs import TokenValues

#: Classes of ranks, about as many for each factor between them, and positions that are followed at a time.
_CLASSES, _AT_ONCE = 96, 16


class Classes(NamedTuple):
    """Tokens by their rank in each of L laws: how many are in a class [C], the mean of their probabilities
    [L, C], and by those of -log p; and how many positions have each law [L]."""

    size: Tensor
    p: Tensor
    nats: Tensor
    positions: Tensor

    def mean(self, of_laws: Tensor) -> float:
        """Over positions, of something [L]."""
        return float((of_laws * self.positions).sum() / self.positions.sum())


def classes_of(law: IndependentLaw, n: int = _CLASSES) -> Classes:
    """Ranks from 1 to V, in at most `n` classes."""
    size = len(law.weight)
    edges = torch.logspace(0, 1, n + 1, base=size, dtype=torch.float64).round().long() - 1
    edges[-1] = size
    count = edges.unique_consecutive().diff()
    means: list[list[Tensor]] = [[], []]
    distinct, positions = law.states.unique(dim=0, return_counts=True)
    for states in distinct.split(_AT_ONCE):
        log_p = (states.double() @ law.weight.double().T).log_softmax(-1)
        log_p = log_p.sort(-1, descending=True).values
        parts = log_p.split(count.tolist(), -1)
        total = torch.stack([part.exp().sum(-1) for part in parts], -1)
        entropy = torch.stack([-(part.exp() * part).sum(-1) for part in parts], -1)
        means[0].append(total / count)
        means[1].append(entropy / total)
    p, nats = (torch.cat(part) for part in means)
    return Classes(count.double(), p, nats, positions.double())


def starved_nats(
    classes: Classes,
    process: NoiseProcess,
    steps: int,
    *,
    least: float = LEAST,
    on_step: Callable[[int, int], None] | None = None,
) -> float:
    """Nats per token, under the law, of texts that are drawn by noise whose smallest value is `least`."""
    parts = list(zip(classes.p.split(_AT_ONCE), classes.nats.split(_AT_ONCE), strict=True))
    found, legs = [], list(time_grid(process, steps, torch.zeros(1)))
    for done, (p, nats) in enumerate(parts):
        chain = _Chain(process, p, classes.size, least)
        for i, leg in enumerate(legs):
            chain.step(leg)
            if on_step is not None:
                on_step(done * len(legs) + i + 1, len(parts) * len(legs))
        found.append((chain.tokens * nats).sum(-1))
    return classes.mean(torch.cat(found))


class _Chain:
    """How likely each of L positions is to hold a token of each class [L, C], or the mask [L]."""

    def __init__(self, process: NoiseProcess, p: Tensor, count: Tensor, least: float) -> None:
        assert len(process.special_ids) <= 1, "several special tokens would be several states"
        self._process, self._p, self._count, self._least = process, p, count, least
        start = process.terminal(torch.zeros(1, dtype=torch.float64))
        self.tokens = (start.b.tok * count).expand(len(p), -1)
        self.mask = _of_mask(start.b).expand(len(p))

    def step(self, leg: Leg) -> None:
        bridge = self._process.bridge(leg.at_s, leg.at_t)
        weight = leg.at_s.alpha * self._p + leg.at_s.b.tok  # of one token [L, C]
        mask = _of_mask(leg.at_s.b)
        tokens, masks = self._from_tokens(weight, mask, bridge)
        if self._process.special_ids:
            shown, hidden = self._from_mask(weight, mask, bridge.alpha / _of_mask(bridge.b))
            tokens, masks = tokens + shown, masks + hidden
        self.tokens, self.mask = tokens, masks

    def _from_tokens(self, weight: Tensor, mask: Tensor, bridge: Bridge) -> tuple[Tensor, Tensor]:
        """Where those that hold a token are after a step: tokens [L, C] and mask [L]."""
        if not bridge.b.tok > 0:
            return self.tokens, torch.zeros_like(self.mask)
        once_more = bridge.alpha / bridge.b.tok
        total = 1 + weight * once_more
        one = self._wins(weight[:, None] / total[..., None])  # [L, from, to]: one token
        to = one * self._count
        to.diagonal(dim1=1, dim2=2).sub_(one.diagonal(dim1=1, dim2=2))  # others of the same class
        masked, kept = self._wins(mask / total), self._wins(weight * (1 + once_more) / total)
        per_win = self.tokens / (to.sum(-1) + masked + kept)
        return torch.einsum("lf,lft->lt", per_win, to) + per_win * kept, (per_win * masked).sum(-1)

    def _from_mask(self, weight: Tensor, mask: Tensor, once_more: Tensor) -> tuple[Tensor, Tensor]:
        total = 1 + mask * once_more
        shown = self._wins(weight / total) * self._count
        hidden = self._wins(mask * (1 + once_more) / total).expand(len(weight))
        per_win = self.mask / (shown.sum(-1) + hidden)
        return per_win[:, None] * shown, per_win * hidden

    def _wins(self, share: Tensor) -> Tensor:
        return wins(share, self._least)


def _of_mask(values: TokenValues) -> Tensor:
    """0 where there is none."""
    return values.special[..., 0] if values.special_ids else torch.zeros_like(values.tok)
