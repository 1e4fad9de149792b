"""Losses from row statistics and coefficients, time sampling, weightings, the ends of the bound."""

from xdlm.objective.bound import End, bound_ends
from xdlm.objective.losses import (
    nelbo,
    nelbo_of_stats,
    row_log_c,
    row_losses,
    step_kl,
    step_kl_between,
    step_kl_of_stats,
)
from xdlm.objective.times import stratified_times
from xdlm.objective.weighting import (
    WEIGHTINGS,
    ClippedWeight,
    DynamicWeight,
    Weighting,
    elbo_weight,
)

__all__ = [
    "WEIGHTINGS",
    "ClippedWeight",
    "DynamicWeight",
    "End",
    "Weighting",
    "bound_ends",
    "elbo_weight",
    "nelbo",
    "nelbo_of_stats",
    "row_log_c",
    "row_losses",
    "step_kl",
    "step_kl_between",
    "step_kl_of_stats",
    "stratified_times",
]
