"""What a model must beat: token frequencies alone."""

from __future__ import annotations

import numpy as np

from xdlm.data import Rows


def unigram_entropy(rows: Rows, size: int) -> float:
    """Nats per token of a model that knows nothing but how often each token occurs."""
    tokens = rows.stream.read(0, rows.stream.n_tokens)
    counts = np.bincount(tokens, minlength=size).astype(float)
    law = counts[counts > 0] / counts.sum()
    return float(-(law * np.log(law)).sum())
