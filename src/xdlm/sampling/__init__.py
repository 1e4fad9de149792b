"""Samplers, filters, templates and the record of what a run did."""

from xdlm.sampling.ancestral import Sample, SamplerConfig, sample, time_grid
from xdlm.sampling.filters import Filter
from xdlm.sampling.infill import parse_template
from xdlm.sampling.step import ancestral_step, dense_step
from xdlm.sampling.trajectory import Change, Trajectory

__all__ = [
    "Change",
    "Filter",
    "Sample",
    "SamplerConfig",
    "Trajectory",
    "ancestral_step",
    "dense_step",
    "parse_template",
    "sample",
    "time_grid",
]
