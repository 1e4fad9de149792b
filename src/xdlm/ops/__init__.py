"""Tensor operations with a fast and a slow form: row statistics, draws, counter-based randomness."""

from xdlm.ops.categorical import categorical
from xdlm.ops.counter import Stream, uniform
from xdlm.ops.rows import forbid, row_stats, special_tuple, stats_of_logits

__all__ = [
    "Stream",
    "categorical",
    "forbid",
    "row_stats",
    "special_tuple",
    "stats_of_logits",
    "uniform",
]
