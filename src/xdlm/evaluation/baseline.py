"""What a model must beat: token frequencies alone."""

from __future__ import annotations

import numpy as np

from xdlm.data import Rows


def unigram_entropy(rows: Rows, size: int) -> float:
    """Nats per token of a model that knows nothing but how often each token occurs."""
    counts = np.bincount(rows.rows.reshape(-1), minlength=size).astype(float)
    law = counts[counts > 0] / counts.sum()
    return float(-(law * np.log(law)).sum())
