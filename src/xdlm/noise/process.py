"""What every noise process can do, given nothing but its coefficients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.structs import (
    Bridge,
    Coefs,
    TokenValues,
    Vocab,
    align,
    batch_times,
    check_order,
    check_times,
    check_tokens,
    is_special,
)  # fmt: skip


class NoiseProcess(ABC):
    """`q_t(z | x) = alpha_t [z = x] + b_t(z)` with `sum_z b_t(z) = 1 - alpha_t`.

    A process is its coefficients (`coefs`) and where they end (`terminal`). Everything here follows
    from them: corruption, the prior, the bridge between two times, the posterior.

    `special_ids` are the tokens that noise treats differently and that data never holds, the mask
    first. A prediction must give them no probability.
    """

    vocab: Vocab
    special_ids: tuple[int, ...]

    #: Settings that a configuration may give it, besides `schedule` where it has one.
    settings: ClassVar[tuple[str, ...]] = ()
    has_schedule: ClassVar[bool] = True
    #: Whether a vocabulary made for this process gets a mask.
    wants_mask: ClassVar[bool] = True

    #: Times between which the continuous-time loss is finite and is integrated; the steps from pure
    #: noise to the upper end and from the lower end to the data are `objective.bound`'s.
    time_range: ClassVar[tuple[float, float]] = (1e-3, 1.0)

    @property
    @abstractmethod
    def has_uniform_noise(self) -> bool:
        """Whether b is ever positive on ordinary tokens, so that losses need the sum S."""

    @abstractmethod
    def coefs(self, t: Tensor | float) -> Coefs:
        """alpha, b and their derivatives at the times `t` in [0, 1], in float64. A function that
        `torch.func` can transform: it does not look whether times are there."""

    @abstractmethod
    def terminal(self, like: Tensor | float) -> Coefs:
        """Pure noise, alpha = 0: what a sampler starts from. Shaped and placed as `like`."""

    def __repr__(self) -> str:
        said = "".join(f", {name}={value}" for name, value in self._told().items())
        return f"{type(self).__name__}({self.vocab}{said})"

    def _told(self) -> dict[str, object]:
        """What distinguishes it from others of its class, for `repr`."""
        own: dict[str, object] = {name: getattr(self, name) for name in self.settings}
        return {**own, "schedule": getattr(self, "schedule", None)} if self.has_schedule else own

    def check_logits(self, logits: Tensor, *tokens: Tensor) -> None:
        """Raise unless logits [..., N] are over the vocabulary, at the positions of the tokens [...]."""
        if logits.shape[-1] != self.vocab.size:
            raise UserError(
                f"logits are over {logits.shape[-1]} tokens, the vocabulary has {self.vocab.size}"
            )
        for each in tokens:
            if each.shape != logits.shape[:-1]:
                raise UserError(
                    f"logits of shape {list(logits.shape)} go with tokens of shape "
                    f"{list(logits.shape[:-1])}, got {list(each.shape)}"
                )

    def check_states(self, n_states: int) -> None:
        """Raise unless a model has one logit for each state."""
        if n_states != self.vocab.size:
            raise UserError(
                f"the model predicts {n_states} states, the noise process has {self.vocab.size}"
            )

    def check_noisy(self, z: Tensor) -> None:
        """Raise unless noisy tokens are integers and (checked on the CPU) in the vocabulary."""
        check_tokens(z, self.vocab.size, "the noisy text")

    def check_data(self, x: Tensor) -> None:
        """The same of clean tokens, of which (checked on the CPU) none may be special."""
        check_tokens(x, self.vocab.size, "the data")
        if x.device.type != "cpu":
            return
        special = is_special(x, self.special_ids)
        if special.any():
            where = special.nonzero()[0].tolist()
            raise UserError(
                f"the data holds token {int(x[tuple(where)])} (at {where}), which is special to the noise, "
                "as the mask is: clean data never does; was it tokenised for another vocabulary?"
            )

    # -- forward ---------------------------------------------------------------------------------

    def corrupt(
        self,
        x: Tensor,
        t: Tensor | float,
        *,
        generator: torch.Generator | None = None,
        uniform: Tensor | None = None,
    ) -> Tensor:
        """Draw `z ~ q_t(. | x)`. One number in [0, 1) per position decides everything: below alpha
        the token stays, the rest of the interval is the inverse distribution of b."""
        self.check_data(x)
        return self.corrupt_with(self.coefs(batch_times(t, x)), x, _uniform(x, generator, uniform))

    def corrupt_with(self, coefs: Coefs, x: Tensor, uniform: Tensor) -> Tensor:
        """`corrupt` under given coefficients, by given numbers, and without checks."""
        alpha = align(coefs.alpha, x)
        keep = uniform < alpha
        rest = (uniform - alpha) / (1 - alpha).clamp_min(1e-300)
        return torch.where(keep, x, self.draw_noise(coefs.b, rest))

    def prior(
        self,
        shape: Sequence[int],
        *,
        generator: torch.Generator | None = None,
        uniform: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Draw `z_1` from pure noise."""
        if not isinstance(shape, Sequence):
            raise UserError(f"prior takes a shape such as (4, 128), rows and tokens, got {shape!r}")
        if device is None:
            device = generator.device if generator is not None else "cpu"
        where = uniform if uniform is not None else torch.empty(shape, device=device)
        uniform = _uniform(where, generator, uniform)
        return self.draw_noise(self.terminal(uniform.new_zeros(shape[:1])).b, uniform)

    def draw_noise(self, b: TokenValues, uniform: Tensor) -> Tensor:
        """A token from the law `b / sum(b)`, by inverting its distribution function.

        The interval is laid out as the special tokens first, in order, then the ordinary ones.
        """
        n_ordinary = self.vocab.size - len(self.special_ids)
        position = uniform * align(b.total(self.vocab.size), uniform)
        start = torch.zeros_like(position)
        token = torch.full_like(position, -1, dtype=torch.int64)
        for i, token_id in enumerate(self.special_ids):
            end = start + align(b.special[..., i], position)
            token = torch.where((token < 0) & (position < end), token_id, token)
            start = end
        width = align(b.tok, position)
        rank = ((position - start) / width.clamp_min(1e-300)).floor()
        rank = rank.clamp(0, max(n_ordinary - 1, 0)).to(torch.int64)
        for token_id in sorted(self.special_ids):
            rank = rank + (rank >= token_id)
        ordinary_possible = width > 0
        # Rounding can push a position past the last special token when b leaves the rest no mass.
        fallback = self.special_ids[-1] if self.special_ids else 0
        rank = torch.where(ordinary_possible, rank, fallback)
        return torch.where(token < 0, rank, token)

    # -- between two times -----------------------------------------------------------------------

    def bridge(self, s: Tensor | float | Coefs, t: Tensor | float | Coefs) -> Bridge:
        """`alpha_ts = alpha_t / alpha_s` and `b_ts = b_t - alpha_ts b_s` for s < t."""
        at_s, at_t = (
            v
            if isinstance(v, Coefs)
            else self.coefs(check_times(torch.as_tensor(v, dtype=torch.float64)))
            for v in (s, t)
        )
        alpha_ts = at_t.alpha / at_s.alpha
        # b_ts is non-negative, but where the two terms cancel, rounding may take it below zero.
        b_ts = (at_t.b - at_s.b.scale(alpha_ts)).map(lambda v: v.clamp_min(0))
        return Bridge(alpha_ts, b_ts)

    def posterior(self, probs: Tensor, z: Tensor, s: Tensor | float, t: Tensor | float) -> Tensor:
        """Dense `q(z_s = e | z_t = z, x ~ probs)`, [B, L, N], for inspection and tests:

        `f_s(probs, e) (alpha_ts [e = z] + b_ts(z)) / f_t(probs, z)` (Lemma 2).

        Probabilities that `probs` [B, L, N] gives special tokens are ignored, as everywhere else.
        """
        self.check_logits(probs, z)
        self.check_noisy(z)
        s, t = batch_times(s, z), batch_times(t, z)
        check_order(s, t)
        special = torch.tensor(self.special_ids, dtype=torch.int64, device=probs.device)
        probs = probs.double().index_fill(-1, special, 0.0)
        total = probs.sum(-1, keepdim=True)
        if probs.device.type == "cpu" and not bool((probs >= 0).all() and (total > 0).all()):
            raise UserError(
                "a posterior needs probabilities, some of them of ordinary tokens: take the softmax of "
                "logits"
            )
        probs = probs / total
        return self.posterior_between(probs, z, self.coefs(s), self.coefs(t))

    def posterior_between(self, probs: Tensor, z: Tensor, at_s: Coefs, at_t: Coefs) -> Tensor:
        """`posterior` between given coefficients; `at_t` may be the terminal ones."""
        between = self.bridge(at_s, at_t)
        probs = probs.double()
        noise = at_s.b.dense(self.vocab.size)
        if noise.ndim < probs.ndim:
            noise = noise[..., None, :]
        f_s = align(at_s.alpha, probs) * probs + noise
        arrive = align(between.alpha, probs) * _one_hot(z, probs) + between.b.at(z)[..., None]
        joint = f_s * arrive
        total = joint.sum(-1, keepdim=True)
        # A token that cannot be noise stays, even where the prediction gives it no probability.
        return torch.where(total > 0, joint / total, _one_hot(z, probs))


def _one_hot(z: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(-1, z[..., None], 1.0)


def _uniform(like: Tensor, generator: torch.Generator | None, given: Tensor | None) -> Tensor:
    if given is not None:
        return given
    return torch.rand(like.shape, generator=generator, device=like.device, dtype=torch.float64)
