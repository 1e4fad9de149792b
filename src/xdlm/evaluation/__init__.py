"""Measuring models, and keeping what was found."""

from xdlm.evaluation.baseline import unigram_entropy
from xdlm.evaluation.judges import open_judge
from xdlm.evaluation.likelihood import Likelihood, likelihood, likelihood_by_passes, row_bounds
from xdlm.evaluation.perplexity import mean_perplexity, measure_perplexity, plan_perplexity
from xdlm.evaluation.records import EvalRecord, append_records, read_records
from xdlm.evaluation.writing import measure_writing, plan_writing

__all__ = [
    "EvalRecord",
    "Likelihood",
    "append_records",
    "likelihood",
    "likelihood_by_passes",
    "mean_perplexity",
    "measure_perplexity",
    "measure_writing",
    "open_judge",
    "plan_perplexity",
    "plan_writing",
    "read_records",
    "row_bounds",
    "unigram_entropy",
]
