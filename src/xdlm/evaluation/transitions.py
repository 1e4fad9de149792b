"""What a sampler does at each step: tokens that appear, change, and are masked again."""

from __future__ import annotations

import dataclasses
import math

from xdlm.evaluation.records import EvalRecord
from xdlm.sampling import Change, Trajectory

METRIC = "transitions"


def transitions(plan: EvalRecord, trajectory: Trajectory) -> EvalRecord:
    """Of texts that were made as planned. The value is the number of token -> token changes in a text, over
    all steps; `details` holds the mean number of each kind of change at each step, as `refine/0007`, the
    final denoise coming last."""
    codes = trajectory.changes()
    n = codes.shape[1]
    details = {
        f"{kind.name.lower()}/{step:04d}": count / n
        for kind, counts in trajectory.counts().items()
        for step, count in enumerate(counts)
    }
    refined = (codes == Change.REFINE).sum((0, 2)).double()
    stderr = float(refined.std()) / math.sqrt(n) if n > 1 else math.nan
    return dataclasses.replace(
        planned_transitions(plan), value=float(refined.mean()), stderr=stderr, details=details
    )


def planned_transitions(plan: EvalRecord) -> EvalRecord:
    """The record that is yet to be filled: no judge has a say in it."""
    return dataclasses.replace(plan, metric=METRIC, judge=None, judge_sha256=None)
