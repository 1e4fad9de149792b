"""Measuring models."""

from xdlm.evaluation.baseline import unigram_entropy
from xdlm.evaluation.likelihood import Likelihood, likelihood, row_bounds

__all__ = ["Likelihood", "likelihood", "row_bounds", "unigram_entropy"]
