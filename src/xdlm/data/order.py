"""The order in which training sees rows: a pure function of the seed and the sample's number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class ShuffledOrder:
    """Sample number -> row. Each epoch visits every row once, in an order of its own."""

    def __init__(self, n_rows: int, seed: int) -> None:
        self.n_rows, self.seed = n_rows, seed
        self._epoch = -1
        self._permutation: NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def rows(self, first: int, count: int) -> NDArray[np.int64]:
        """Rows of the samples first, first + 1, ..., which may span epochs."""
        picked = []
        while count > 0:
            epoch, offset = divmod(first, self.n_rows)
            part = self._of_epoch(epoch)[offset : offset + count]
            picked.append(part)
            first, count = first + len(part), count - len(part)
        return np.concatenate(picked)

    def _of_epoch(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._permutation, self._epoch = generator.permutation(self.n_rows), epoch
        return self._permutation
