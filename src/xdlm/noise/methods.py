"""The noise processes: each is its coefficients and nothing else.

| method | alpha_t | b on an ordinary token | b on the mask |
|---|---|---|---|
| `Masked` (MDLM) | schedule | 0 | 1 - alpha |
| `Uniform` (UDLM) | schedule | (1 - alpha)/N | (1 - alpha)/N where the vocabulary has one |
| `Mixed` (XDLM) | schedule | k (1 - alpha)/N | (1 - alpha)(k/N + 1 - k) |
| `Gidd` | (1-t)/C_t | c_t/(C_t (N-1)) | t/C_t |

The uniform part of `Mixed` covers all N states, the mask included; that of `Gidd` leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from xdlm.errors import UserError, check_number
from xdlm.noise.process import NoiseProcess
from xdlm.noise.schedules import LogLinear, Schedule
from xdlm.structs import Coefs, TokenValues, Vocab


class Stationary(NoiseProcess):
    """`b_t = (1 - alpha_t) pi` for one fixed law `pi = k u + sum_i mu_i e_i` (Lemma 1).

    `k` weighs the uniform law u over all N states and `mu[i]` the point mass on special token i;
    together they sum to 1.
    """

    def __init__(
        self, vocab: Vocab, *, k: float, mu: Mapping[int, float], schedule: Schedule | None = None
    ) -> None:
        _check_vocab(vocab)
        check_number("the mixing ratio k", k)
        if not 0 <= k <= 1:
            raise UserError(f"the mixing ratio k must lie in [0, 1], got {k}")
        if not isinstance(mu, Mapping):
            raise UserError(
                f"mu takes special tokens to their weights, such as {{9: 0.5}}, got {mu!r}"
            )
        for weight in mu.values():
            check_number("the weight of a special token", weight)
        outside = [i for i in mu if not 0 <= i < vocab.size]
        if outside:
            raise UserError(f"special token {outside[0]} is outside the vocabulary of {vocab.size}")
        if not all(weight >= 0 for weight in mu.values()):
            raise UserError(f"the weights of the special tokens must be >= 0, got {dict(mu)}")
        total = k + sum(mu.values())
        if not abs(total - 1) <= 1e-9:
            raise UserError(f"k and the special tokens' weights must sum to 1, got {total:.6g}")
        self.vocab = vocab
        self.k = float(k)
        self.mu = {int(i): float(weight) for i, weight in mu.items()}
        if vocab.mask_id is not None:  # data never holds the mask, whatever noise makes of it
            self.mu.setdefault(vocab.mask_id, 0.0)
        if isinstance(schedule, type) or not (schedule is None or callable(schedule)):
            raise UserError(f"a schedule is a function of time, such as Cosine(), got {schedule!r}")
        self.schedule: Schedule = schedule if schedule is not None else LogLinear()
        mask_first = sorted(self.mu, key=lambda i: (i != vocab.mask_id, i))
        self.special_ids = tuple(mask_first)
        if len(self.special_ids) == vocab.size:
            raise UserError("every token is special: none is left for data")

    @property
    def has_uniform_noise(self) -> bool:
        return self.k > 0

    def _pi(self, like: Tensor) -> TokenValues:
        base = self.k / self.vocab.size
        # Filled in place: copying Python numbers to a GPU would make the host wait.
        special = like.new_empty(*like.shape, len(self.special_ids))
        for i, token_id in enumerate(self.special_ids):
            special[..., i].fill_(base + self.mu[token_id])
        return TokenValues(torch.full_like(like, base), special, self.special_ids)

    def coefs(self, t: Tensor | float) -> Coefs:
        t = torch.as_tensor(t, dtype=torch.float64)
        alpha, d_alpha = self.schedule(t)
        pi = self._pi(alpha)
        return Coefs(alpha, pi.scale(1 - alpha), d_alpha, pi.scale(-d_alpha))

    def terminal(self, like: Tensor | float) -> Coefs:
        zero = torch.zeros_like(torch.as_tensor(like, dtype=torch.float64))
        pi = self._pi(zero)
        return Coefs(zero, pi, zero, pi.scale(zero))


class Masked(Stationary):
    """MDLM: tokens turn into the mask and stay there."""

    def __init__(self, vocab: Vocab, *, schedule: Schedule | None = None) -> None:
        super().__init__(vocab, k=0.0, mu={_mask_of(vocab, "Masked"): 1.0}, schedule=schedule)


class Uniform(Stationary):
    """UDLM: tokens turn into any of the N states alike.

    The vocabulary usually has no mask. Where it has one, noise reaches the mask as any other state, but
    data never holds it.
    """

    wants_mask: ClassVar[bool] = False

    def __init__(self, vocab: Vocab, *, schedule: Schedule | None = None) -> None:
        super().__init__(vocab, k=1.0, mu={}, schedule=schedule)


class Mixed(Stationary):
    """XDLM: `K = (k/N) J + sum_i mu_i M_i`; k = 0 is `Masked`, k = 1 is `Uniform`.

    `mu` gives several special tokens their weights (summing to 1 - k); without it the mask has all.
    """

    settings: ClassVar[tuple[str, ...]] = ("k",)

    def __init__(
        self,
        vocab: Vocab,
        *,
        k: float = 0.1,
        mu: Mapping[int, float] | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        _check_vocab(vocab)
        check_number("the mixing ratio k", k)
        if mu is None:
            no_mask_needed = k == 1 and vocab.mask_id is None
            mu = {} if no_mask_needed else {_mask_of(vocab, f"Mixed with k={k}"): 1.0 - k}
        super().__init__(vocab, k=k, mu=mu, schedule=schedule)

    def _told(self) -> dict[str, object]:
        told = super()._told()
        return {"k": told.pop("k"), "mu": self.mu, **told} if len(self.mu) > 1 else told


class Gidd(NoiseProcess):
    """GIDD: masking with a bump of uniform noise in the middle of the time range.

    `alpha = (1-t)/C`, `b_mask = t/C`, `b_tok = c/(C (N-1))`, with `c = B (t (1-t))^(gamma/2)`,
    `C = 1 + c` and `B = 2^gamma p_uniform/(1 - p_uniform)`, so that at t = 1/2 uniform noise has
    probability `p_uniform`. Up to gamma = 2 noise is only ever added: b_tok/alpha never falls.
    """

    settings: ClassVar[tuple[str, ...]] = ("p_uniform", "gamma")
    has_schedule: ClassVar[bool] = False
    time_range: ClassVar[tuple[float, float]] = (1e-4, 1 - 1e-4)

    def __init__(self, vocab: Vocab, *, p_uniform: float = 0.1, gamma: float = 1.0) -> None:
        check_number("GIDD's p_uniform", p_uniform)
        check_number("GIDD's gamma", gamma)
        if not 0 <= p_uniform < 1:
            raise UserError(f"GIDD's p_uniform must lie in [0, 1), got {p_uniform}")
        if not 0 < gamma <= 2:
            raise UserError(
                f"GIDD's gamma must lie in (0, 2], got {gamma}: beyond, noise would be taken away again"
            )
        self.vocab = vocab
        self.special_ids = (_mask_of(vocab, "Gidd"),)
        self.p_uniform, self.gamma = float(p_uniform), float(gamma)
        self._scale = 2.0**gamma * p_uniform / (1 - p_uniform)

    @property
    def has_uniform_noise(self) -> bool:
        return self.p_uniform > 0

    def coefs(self, t: Tensor | float) -> Coefs:
        t = torch.as_tensor(t, dtype=torch.float64)
        half, n_ordinary = self.gamma / 2, self.vocab.size - 1
        parabola = t * (1 - t)
        c = self._scale * parabola**half
        # At the two ends the slope is infinite for gamma < 2; `time_range` stays clear of them.
        d_c = self._scale * half * parabola ** (half - 1) * (1 - 2 * t)
        if self._scale == 0:
            c, d_c = torch.zeros_like(t), torch.zeros_like(t)
        total = 1 + c
        shrink = d_c / total**2
        return Coefs(
            alpha=(1 - t) / total,
            b=self._values(c / total / n_ordinary, t / total),
            d_alpha=-1 / total - (1 - t) * shrink,
            d_b=self._values(shrink / n_ordinary, 1 / total - t * shrink),
        )

    def terminal(self, like: Tensor | float) -> Coefs:
        zero = torch.zeros_like(torch.as_tensor(like, dtype=torch.float64))
        return Coefs(zero, self._values(zero, zero + 1), zero, self._values(zero, zero))

    def _values(self, tok: Tensor, mask: Tensor) -> TokenValues:
        return TokenValues(tok, mask[..., None], self.special_ids)


def _check_vocab(vocab: Vocab) -> None:
    if not isinstance(vocab, Vocab):
        raise UserError(
            f"a noise process takes a vocabulary, such as Vocab(101, mask_id=100), got {vocab!r}"
        )


def _mask_of(vocab: Vocab, who: str) -> int:
    _check_vocab(vocab)
    if vocab.mask_id is None:
        raise UserError(f"{who} needs a mask: give the vocabulary a mask_id")
    return vocab.mask_id
