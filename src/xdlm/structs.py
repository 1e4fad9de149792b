"""Small frozen types that everything else speaks in. Depends on torch alone."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.errors import UserError

#: How far rounding may take a time out of [0, 1].
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Vocab:
    """The state space of the diffusion: `size` states, the mask (if any) among them."""

    size: int
    mask_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("size", "mask_id"):
            value = getattr(self, name)
            if name == "mask_id" and value is None:
                continue
            try:  # numpy's integers are welcome too
                object.__setattr__(self, name, operator.index(value))
            except TypeError:
                raise UserError(
                    f"a vocabulary's {name} must be an integer, got {value!r}"
                ) from None
        if self.size < 2:
            raise UserError(f"a vocabulary needs at least 2 states, got size={self.size}")
        if self.mask_id is not None and not 0 <= self.mask_id < self.size:
            raise UserError(
                f"mask_id={self.mask_id} is outside the vocabulary 0..{self.size - 1} "
                "(size counts the mask itself)"
            )


@dataclass(frozen=True)
class TokenValues:
    """A function of the token that has one value on ordinary tokens and one per special token.

    `tok` is [...] and `special` is [..., S], in the order of `special_ids`. Noise levels, their
    derivatives and the rates are all of this shape, so they are never held as vectors of size N.
    """

    tok: Tensor
    special: Tensor
    special_ids: tuple[int, ...]

    def at(self, z: Tensor) -> Tensor:
        """The value at each token of `z`, whose leading dimensions are those of `tok`."""
        value = align(self.tok, z).expand(z.shape)
        for i, token_id in enumerate(self.special_ids):
            value = torch.where(z == token_id, align(self.special[..., i], z), value)
        return value

    def dense(self, size: int) -> Tensor:
        """All `size` values side by side, [..., N]."""
        everything = torch.arange(size, device=self.tok.device)
        return self.at(everything.expand(*self.tok.shape, size))

    def total(self, size: int) -> Tensor:
        """The sum over all `size` tokens."""
        return self.tok * (size - len(self.special_ids)) + self.special.sum(-1)

    def map(self, fn: Callable[[Tensor], Tensor]) -> TokenValues:
        return TokenValues(fn(self.tok), fn(self.special), self.special_ids)

    def _combine(self, other: TokenValues, op: Callable[[Tensor, Tensor], Tensor]) -> TokenValues:
        assert self.special_ids == other.special_ids
        return TokenValues(
            op(self.tok, other.tok), op(self.special, other.special), self.special_ids
        )

    def __add__(self, other: TokenValues) -> TokenValues:
        return self._combine(other, operator.add)

    def __sub__(self, other: TokenValues) -> TokenValues:
        return self._combine(other, operator.sub)

    def scale(self, factor: Tensor) -> TokenValues:
        """Every value times `factor`, which has the shape of `tok`."""
        return TokenValues(self.tok * factor, self.special * factor[..., None], self.special_ids)


@dataclass(frozen=True)
class Coefs:
    """`q_t(z | x) = alpha [z = x] + b(z)` at given times, and its time derivative; all float64."""

    alpha: Tensor
    b: TokenValues
    d_alpha: Tensor
    d_b: TokenValues

    @property
    def b_tok(self) -> Tensor:
        return self.b.tok

    @property
    def b_mask(self) -> Tensor:
        """b on the first special token: the mask. Zero where the vocabulary has none."""
        return self.b.special[..., 0] if self.b.special_ids else torch.zeros_like(self.alpha)

    @property
    def d_b_tok(self) -> Tensor:
        return self.d_b.tok

    @property
    def d_b_mask(self) -> Tensor:
        return self.d_b.special[..., 0] if self.d_b.special_ids else torch.zeros_like(self.alpha)

    @property
    def log_c(self) -> Tensor:
        """log(alpha / b) on ordinary tokens, and -inf where b = 0 (no sum over the vocabulary)."""
        noisy = self.b.tok > 0
        safe = torch.where(noisy, self.b.tok, 1.0)
        return torch.where(noisy, self.alpha.log() - safe.log(), -torch.inf)

    @property
    def rate(self) -> TokenValues:
        """`b'(z) - (alpha'/alpha) b(z)`: how fast probability flows into z."""
        return self.d_b - self.b.scale(self.d_alpha / self.alpha)

    def of(self, p: Tensor, z: Tensor) -> Tensor:
        """`f(p, z) = alpha p_z + b(z)` for the probability p_z that a distribution gives z."""
        return align(self.alpha, z) * p + self.b.at(z)

    def index(self, rows: Tensor | slice | tuple[Tensor, ...]) -> Coefs:
        """The coefficients of some of the batch entries (or positions), for rows gathered from a batch."""
        take = operator.itemgetter(rows)
        return Coefs(take(self.alpha), self.b.map(take), take(self.d_alpha), self.d_b.map(take))

    def expand(self, n: int) -> Coefs:
        """One entry as a batch of `n` that share it, without a copy."""

        def shared(value: Tensor) -> Tensor:
            return value.expand(n, *value.shape[1:])

        return Coefs(
            shared(self.alpha), self.b.map(shared), shared(self.d_alpha), self.d_b.map(shared)
        )

    @staticmethod
    def join(parts: Sequence[Coefs]) -> Coefs:
        """Several batches as one, concatenated."""
        ids = parts[0].b.special_ids

        def joined(pick: Callable[[Coefs], Tensor]) -> Tensor:
            return torch.cat([pick(part) for part in parts])

        return Coefs(
            joined(lambda c: c.alpha),
            TokenValues(joined(lambda c: c.b.tok), joined(lambda c: c.b.special), ids),
            joined(lambda c: c.d_alpha),
            TokenValues(joined(lambda c: c.d_b.tok), joined(lambda c: c.d_b.special), ids),
        )

    def to(self, device: torch.device) -> Coefs:
        """Moved in one copy, since each of many small ones would cost as much."""
        if device == self.alpha.device:
            return self
        ids, n_special = self.b.special_ids, len(self.b.special_ids)
        columns = [self.alpha, self.d_alpha, self.b.tok, self.d_b.tok]
        columns += [*self.b.special.unbind(-1), *self.d_b.special.unbind(-1)]
        moved = torch.stack(columns).to(device, non_blocking=device.type == "cuda")
        special = [part.movedim(0, -1) for part in moved[4:].split(n_special)] if ids else (
            moved.new_empty(*moved.shape[1:], 0) for _ in range(2)
        )  # fmt: skip
        b, d_b = (
            TokenValues(tok, part, ids) for tok, part in zip(moved[2:4], special, strict=True)
        )
        return Coefs(moved[0], b, moved[1], d_b)


class Bridge(NamedTuple):
    """`q(z_t | z_s) = alpha [z_t = z_s] + b(z_t)` between two times s < t."""

    alpha: Tensor
    b: TokenValues


class RowStats(NamedTuple):
    """All that a loss needs to know of a row of logits; each field has the shape of the rows.

    `lse` = logsumexp of the logits over ordinary tokens, `logit_x` and `logit_z` the logits of the
    clean and of the noisy token (-inf where that token is special), and
    `S = sum_e softplus(logit_e - lse + log c) = sum_e log1p(c p_e)`.

    The first three are float64, since in float32 log p = logit - lse would lose more to cancellation
    than the logits lost to rounding. S has the dtype in which the vocabulary was summed.
    """

    lse: Tensor
    logit_x: Tensor
    logit_z: Tensor
    S: Tensor


class RowLosses(NamedTuple):
    """The losses of rows, float64, and their derivatives by each statistic."""

    losses: Tensor
    d: RowStats


class HeadRows(NamedTuple):
    """Input of the output head: R hidden states, the head's parameters, and for each row the clean
    token, the noisy token and log c (None where no sum over the vocabulary is needed)."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    x: Tensor
    z: Tensor
    log_c: Tensor | None


def is_special(z: Tensor, special_ids: tuple[int, ...]) -> Tensor:
    """Where `z` holds one of the special tokens."""
    found = torch.zeros_like(z, dtype=torch.bool)
    for token_id in special_ids:
        found |= z == token_id
    return found


def batch_times(t: Tensor | float, tokens: Tensor) -> Tensor:
    """Times as float64 on the device of the tokens, one per batch entry (or per position).

    Outside [0, 1], where schedules give no probabilities, they are refused, but for rounding; this is
    checked on the CPU only: on a GPU the host would have to wait for them.
    """
    t = torch.as_tensor(t, dtype=torch.float64, device=tokens.device)
    if t.shape != tokens.shape[: t.ndim]:
        raise UserError(
            f"times of shape {list(t.shape)} for tokens of shape {list(tokens.shape)}: give a number, or "
            f"one for each of the {len(tokens) if tokens.ndim else 1} rows"
        )
    t = check_times(t)
    return t.expand(tokens.shape[:1]) if t.ndim == 0 else t


def check_times(t: Tensor) -> Tensor:
    """Times without what rounding took out of [0, 1]; further out they are refused on the CPU."""
    if t.device.type == "cpu" and not bool(((t >= -_ROUNDING) & (t <= 1 + _ROUNDING)).all()):
        raise UserError(f"times must lie in [0, 1], got {t.min():.4g} to {t.max():.4g}")
    return t.clamp(0, 1)


def check_tokens(tokens: Tensor, size: int, what: str) -> None:
    """Refuse tokens that are not integers or (checked on the CPU only) lie outside 0..size - 1."""
    if not isinstance(tokens, Tensor):
        raise UserError(f"{what} must be a tensor of tokens, got {type(tokens).__name__}")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise UserError(f"{what} must be int64 or int32, got {tokens.dtype}: use .long()")
    if tokens.device.type != "cpu" or not tokens.numel():
        return
    lowest, highest = (int(end) for end in tokens.aminmax())
    if not 0 <= lowest <= highest < size:
        raise UserError(f"{what} holds tokens {lowest}..{highest}, the vocabulary 0..{size - 1}")


def check_order(s: Tensor, t: Tensor) -> None:
    """Refuse steps that do not go from t down to s; checked on the CPU only."""
    if s.device.type == "cpu" and not bool((s < t).all()):
        raise UserError("a step goes from t down to s: s must be smaller than t")


def align(value: Tensor, z: Tensor) -> Tensor:
    """Append dimensions to a per-batch value until it broadcasts against `z`."""
    return value.reshape(value.shape + (1,) * (z.ndim - value.ndim))


@dataclass(frozen=True)
class Batch:
    """Clean data for a loss. `index` [B] numbers the samples globally and keys their noise. It may stay
    on the CPU, which then computes all that is one number per sample: for so few, launches on a GPU would
    take longer. Tokens where `given` [B, L] holds are not noised and do not count."""

    tokens: Tensor
    index: Tensor
    label: Tensor | None = None
    given: Tensor | None = None


class Noised(NamedTuple):
    """A noised batch; all [B, L]. `weight` is that of the likelihood bound. Positions where `picked` holds
    are evaluated and count `scale` times, the inverse of the probability that they were picked; elsewhere
    the scale is 0."""

    z: Tensor
    weight: Tensor
    scale: Tensor
    picked: Tensor
