"""Distances between two sets of images, from their features."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from xdlm.errors import UserError
from xdlm.evaluation.images.features import Gaussian, root_of, shuffled

#: Distances that are held at a time.
_ELEMENTS = 1 << 24
#: Variances below this share of the largest are rounding.
_RANK = 1e-12


def fid(one: Gaussian, other: Gaussian) -> float:
    """Fréchet distance of two normal laws (Heusel et al. 2017):

        |m1 - m2|^2 + tr C1 + tr C2 - 2 tr (C1 C2)^(1/2)

    The last trace is the sum of the singular values of C1^(1/2) C2^(1/2): both roots are of symmetric
    matrices, and singular values are exact to rounding, where eigenvalues of C1 C2 near zero are not. A
    CPU is quicker to find them than a GPU.
    """
    gap = (one.mean - other.mean).square().sum()
    shared = torch.linalg.svdvals((one.root @ other.root).cpu()).sum().to(gap)
    spread = one.covariance.trace() + other.covariance.trace() - 2 * shared
    return float(gap + spread)


def fid_error(reference: Gaussian, other: Gaussian, features: Tensor) -> float:
    """The standard error of `fid(reference, other)` over draws of the other set; these are its features
    [k, d], all or some. To first order an image x moves the distance by

        2 (m - m_r)'(x - m) + (x - m)'(I - T)(x - m) - tr (I - T) C,

    where T carries the other law to the reference: T = C^(-1/2) (C^(1/2) C_r C^(1/2))^(1/2) C^(-1/2).
    Its bias, which all sets of n images share, is no part of it.
    """
    values, vectors = other.spectrum
    seen = values > values[-1] * _RANK
    width = torch.where(seen, values, 1.0).sqrt()
    root, inverse = ((vectors * w) @ vectors.T for w in (width * seen, seen / width))
    inner_root = root_of(*torch.linalg.eigh(root @ reference.covariance @ root))
    carry = inverse @ inner_root @ inverse
    inner = features.double() - other.mean
    moved = inner - inner @ carry
    influence = 2 * inner @ (other.mean - reference.mean) + (inner * moved).sum(1)
    return float(influence.std()) / math.sqrt(other.n)


class Kid(NamedTuple):
    """The mean over parts, and its standard error."""

    value: float
    stderr: float


def kid(one: Tensor, other: Tensor, *, parts: int = 10) -> Kid:
    """Kernel distance (Binkowski et al. 2018) of features [n, d] and [m, d], in random order: the unbiased
    estimate of the squared maximum mean discrepancy under the kernel (x.y/d + 1)^3, averaged over so many
    parts of either side. Parts share no image, so that their spread is their error; where there is one
    alone, none is known. A part is compared with the next one of the other side: two sets of the same
    images would be in the same order."""
    most = min(len(one), len(other))
    if most < 2 or parts < 1:
        raise UserError(f"KID needs at least 2 images on either side, got {most}, in {parts} parts")
    parts = min(parts, most // 2)
    here, there = (list(side.tensor_split(parts)) for side in (one, other))
    pairs = zip(here, [*there[1:], there[0]], strict=True)
    values = torch.stack([_squared_mmd(x.double(), y.double()) for x, y in pairs])
    stderr = float(values.std()) / math.sqrt(parts) if parts > 1 else math.nan
    return Kid(float(values.mean()), stderr)


def _squared_mmd(x: Tensor, y: Tensor) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def off_diagonal(k: Tensor) -> Tensor:
        return (k.sum() - k.diagonal().sum()) / (len(k) * (len(k) - 1))

    return off_diagonal(kernel(x, x)) + off_diagonal(kernel(y, y)) - 2 * kernel(x, y).mean()


class InceptionScore:
    """exp E KL(p(y|x) || p(y)) (Salimans et al. 2016) of images that come in batches: the mean over ten
    parts of the set, drawn at random, and its standard error. What is kept of a part is the sum of all
    p(y|x) and that of their negative entropies."""

    def __init__(self, n: int, head: Callable[[Tensor], Tensor], parts: int = 10) -> None:
        """For `n` images in all, whose features `head` turns into logits of classes."""
        self._head = head
        self._parts, self._seen = min(parts, n), 0
        self._part = shuffled(n) * self._parts // n  # of each image
        self._law = torch.zeros(0)
        self._information = torch.zeros(self._parts, dtype=torch.float64)
        self._counts = torch.zeros(self._parts, dtype=torch.float64)

    def add(self, features: Tensor) -> None:
        """A batch [b, d]."""
        log_p = self._head(features).double().cpu().log_softmax(-1)
        part = self._part[self._seen : self._seen + len(log_p)]
        if self._seen == 0:
            self._law = torch.zeros(self._parts, log_p.shape[1], dtype=torch.float64)
        self._law.index_add_(0, part, log_p.exp())
        self._information.index_add_(0, part, (log_p.exp() * log_p).sum(-1))
        self._counts.index_add_(0, part, torch.ones(len(log_p), dtype=torch.float64))
        self._seen += len(log_p)

    def result(self) -> tuple[float, float]:
        """Value and standard error."""
        law = self._law / self._counts[:, None]
        entropy = -torch.special.xlogy(law, law).sum(-1)
        scores = torch.exp(self._information / self._counts + entropy)
        stderr = float(scores.std()) / math.sqrt(self._parts) if self._parts > 1 else math.nan
        return float(scores.mean()), stderr


class PrecisionRecall(NamedTuple):
    """The share of generated images that look real, and of real ones that could have been generated."""

    precision: float
    recall: float


def precision_recall(real: Tensor, generated: Tensor, *, neighbours: int = 3) -> PrecisionRecall:
    """Kynkaanniemi et al. 2019: a set of features reaches as far as balls around its points, each up to
    its k-th nearest neighbour; what lies in one of them belongs to it."""
    if min(len(real), len(generated)) <= neighbours:
        raise UserError(f"precision and recall need more than {neighbours} images on either side")
    return PrecisionRecall(
        _share_inside(generated, real, neighbours), _share_inside(real, generated, neighbours)
    )


def _share_inside(points: Tensor, centres: Tensor, neighbours: int) -> float:
    radii = torch.cat([
        part.kthvalue(neighbours + 1, dim=1).values for part in _squared_distances(centres, centres)
    ])  # fmt: skip
    inside = [(part <= radii).any(1) for part in _squared_distances(points, centres)]
    return float(torch.cat(inside).double().mean())


def _squared_distances(points: Tensor, centres: Tensor) -> Iterator[Tensor]:
    """Some rows of all of them at a time, as |x|^2 + |y|^2 - 2 x.y: products of matrices, in float64, whose
    rounding is far below that of the features."""
    centres = centres.double()
    lengths = centres.square().sum(1)
    for part in points.split(max(1, _ELEMENTS // len(centres))):
        some = part.double()
        yield torch.addmm(lengths, some, centres.T, alpha=-2) + some.square().sum(1)[:, None]
