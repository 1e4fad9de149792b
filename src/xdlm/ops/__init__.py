"""Tensor operations with a fast and a slow form: row statistics, draws, counter-based randomness."""

from xdlm.ops.categorical import categorical, draw_and_weigh
from xdlm.ops.counter import Stream, uniform
from xdlm.ops.rows import forbid, head_logits, resolve_impl, row_loss, row_stats, stats_of_logits

__all__ = [
    "Stream",
    "categorical",
    "draw_and_weigh",
    "forbid",
    "head_logits",
    "resolve_impl",
    "row_loss",
    "row_stats",
    "stats_of_logits",
    "uniform",
]
