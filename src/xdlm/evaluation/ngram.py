"""A judge that needs nothing but the package: a trigram model of the embedded novels.

    p(w | u, v) = (1 - a) count(u, v, w)/count(u, v) + a p(w | v),   and so on down to the uniform law

with a = 1/2 where the context was seen and 1 where it was not. It knows word order over three tokens and
no more: good for telling text from noise, not for comparing good models.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from xdlm.data import pack, read_documents
from xdlm.evaluation.scoring import Score
from xdlm.tokens import TextTokenizer

#: What records call it, before its text.
NAME = "trigrams of"
_BACK_OFF = 0.5


class NgramJudge:
    """Scores texts by the tokens of `tokenizer`."""

    def __init__(self, tokenizer: TextTokenizer, source: str = "corpus:train") -> None:
        self.name = f"{NAME} {source}"
        self._tokenizer = tokenizer
        rows = pack(read_documents(source), tokenizer, 2)
        tokens = rows.stream.read(0, rows.stream.n_tokens).astype(np.int64)
        self._orders = [_Counts(tokens, tokenizer.size, order) for order in (1, 2, 3)]
        what = f"{rows.digest} {tokenizer.digest} {_BACK_OFF}"
        self.sha256 = hashlib.sha256(what.encode()).hexdigest()

    def score(self, text: str) -> Score:
        """Every token counts, the first ones given the end of a text before them."""
        ids = self._tokenizer.encode(text)
        padded = np.asarray([self._tokenizer.eos_id] * 2 + ids, dtype=np.int64)
        p: NDArray[np.float64] = np.full(len(ids), 1 / self._tokenizer.size)
        for counts in self._orders:
            share, seen = counts.share(padded)
            p = np.where(seen, (1 - _BACK_OFF) * share + _BACK_OFF * p, p)
        return Score(float(-np.log(p).sum()), len(ids))


class _Counts:
    """How often each run of `order` tokens occurs, and each context of one."""

    def __init__(self, tokens: NDArray[np.int64], size: int, order: int) -> None:
        self._size, self._order = size, order
        self._runs, self._run_counts = np.unique(self._keys(tokens, order), return_counts=True)
        contexts = self._keys(tokens[:-1], order - 1) if order > 1 else np.zeros(len(tokens), int)
        self._contexts, self._context_counts = np.unique(contexts, return_counts=True)

    def _keys(self, tokens: NDArray[np.int64], order: int) -> NDArray[np.int64]:
        """Runs of tokens as single numbers."""
        n = len(tokens) - order + 1
        keys = np.zeros(max(n, 0), dtype=np.int64)
        for i in range(order):
            keys = keys * self._size + tokens[i : i + n]
        return keys

    def share(self, padded: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """For each token after the first two: its share after its context, and whether that was seen."""
        own = padded[3 - self._order :]
        runs = _look_up(self._runs, self._run_counts, self._keys(own, self._order))
        before = (
            self._keys(own[:-1], self._order - 1) if self._order > 1 else np.zeros(len(own), int)
        )
        contexts = _look_up(self._contexts, self._context_counts, before)
        return runs / np.maximum(contexts, 1), contexts > 0


def _look_up(
    keys: NDArray[np.int64], counts: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.int64]:
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, counts[place], 0)
