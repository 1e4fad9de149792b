"""Samplers, filters, templates and the record of what a run did."""

from xdlm.sampling.ancestral import GUMBEL, STARVED, THINNED, SamplerConfig, sample
from xdlm.sampling.confidence import ConfidenceConfig, decode
from xdlm.sampling.filters import Filter
from xdlm.sampling.guidance import Guidance
from xdlm.sampling.infill import parse_template
from xdlm.sampling.result import Sample
from xdlm.sampling.reverse import time_grid
from xdlm.sampling.schedule import Block, plan_blocks
from xdlm.sampling.step import ancestral_step, dense_step
from xdlm.sampling.trajectory import Change, Trajectory
from xdlm.sampling.writing import How, configure, write

__all__ = [
    "GUMBEL",
    "STARVED",
    "THINNED",
    "Block",
    "Change",
    "ConfidenceConfig",
    "Filter",
    "Guidance",
    "How",
    "Sample",
    "SamplerConfig",
    "Trajectory",
    "ancestral_step",
    "configure",
    "decode",
    "dense_step",
    "parse_template",
    "plan_blocks",
    "sample",
    "time_grid",
    "write",
]
