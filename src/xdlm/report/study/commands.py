"""What to type to measure again: templates, filled from records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from xdlm.data import ZERO_SHOT
from xdlm.evaluation.perplexity import ZERO_SHOT_MEAN
from xdlm.evaluation.records import EvalRecord

#: Trains all methods and adapted models, measures them, and goes on where it stopped.
ALL = "python recipes/repro/run.py --minutes 60"
MEASURE = "python recipes/repro/run.py --minutes 0"


def read_again(records: Sequence[EvalRecord]) -> str:
    """Perplexity of texts, at every checkpoint that was kept."""
    texts = sorted({str(r.data) for r in records} - {*ZERO_SHOT, ZERO_SHOT_MEAN})
    data = f" --data {' '.join(texts)}" if texts else ""
    zero_shot = " --zero-shot" if any(r.data == ZERO_SHOT_MEAN for r in records) else ""
    draws = " ".join(_values(records, "draws"))
    return (
        f"xdlm eval dynamics {_runs(records)}{data}{zero_shot} --draws {draws}{_seed(records)} "
        "--steps --records results.jsonl"
    )


def write_again(records: Sequence[EvalRecord]) -> str:
    """Generated texts under a judge, or each of several."""
    lines = []
    for judge in _values(records, "judge"):
        own = [r for r in records if r.judge == judge]
        lines.append(
            f"xdlm eval dynamics {_runs(own)} --steps {' '.join(_values(own, 'steps'))} "
            f"--n {_values(own, 'n')[-1]} --judge {judge}{_seed(own)} --records results.jsonl"
        )
    return "\n".join(lines)


def _runs(records: Sequence[EvalRecord]) -> str:
    """Folders, with what they share named once, as a shell expands it."""
    models = list(dict.fromkeys(r.model for r in records))
    parents = {str(PurePosixPath(model).parent) for model in models}
    if len(models) == 1 or len(parents) > 1:
        return " ".join(models)
    names = ",".join(PurePosixPath(model).name for model in models)
    return f"{parents.pop()}/{{{names}}}"


def _values(records: Sequence[EvalRecord], name: str) -> list[str]:
    found = {value for r in records if (value := getattr(r, name)) is not None}
    return [str(value) for value in sorted(found)]


def _seed(records: Sequence[EvalRecord]) -> str:
    return f" --seed {' '.join(_values(records, 'seed'))}"
