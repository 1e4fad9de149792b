"""Measuring models."""

from xdlm.evaluation.likelihood import Likelihood, likelihood, row_bounds

__all__ = ["Likelihood", "likelihood", "row_bounds"]
