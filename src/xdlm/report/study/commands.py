"""What to type to measure again: templates, filled from records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from xdlm.data import ZERO_SHOT
from xdlm.evaluation.perplexity import ZERO_SHOT_MEAN
from xdlm.evaluation.records import EvalRecord

#: Trains all methods and adapted models, measures them, and goes on where it stopped.
ALL = "python recipes/repro/run.py --minutes 60"
IMAGES = "python recipes/cifar10/run.py --minutes 60"
MEASURE = "python recipes/repro/run.py --minutes 0"


def read_again(records: Sequence[EvalRecord]) -> str:
    """Perplexity of texts, at every checkpoint that was kept."""
    texts = sorted({str(r.data) for r in records} - {*ZERO_SHOT, ZERO_SHOT_MEAN})
    data = f" --data {' '.join(texts)}" if texts else ""
    zero_shot = " --zero-shot" if any(r.data == ZERO_SHOT_MEAN for r in records) else ""
    most = max((r.n for r in records if r.data != ZERO_SHOT_MEAN), default=0)
    settings = sorted({(r.draws, r.seed) for r in records})
    return "\n".join(
        f"xdlm eval dynamics {_runs(records)}{data}{zero_shot} --max-rows {most} --draws {draws} "
        f"{_running(records, seed)} --steps --records results.jsonl"
        for draws, seed in settings
    )


def write_again(records: Sequence[EvalRecord]) -> str:
    """Generated texts, a line for each judge, number of texts and seed."""
    judged = [r for r in records if r.judge is not None]
    lines = []
    for judge, n, seed in sorted({(r.judge, r.n, r.seed) for r in judged}):
        own = [r for r in judged if (r.judge, r.n, r.seed) == (judge, n, seed)]
        steps = " ".join(str(number) for number in sorted({r.steps or 0 for r in own}))
        lines.append(
            f"xdlm eval dynamics {_runs(own)} --steps {steps} --n {n} --judge {judge} "
            f"{_running(own, seed)} --records results.jsonl"
        )
    return "\n".join(lines)


def paint_again(records: Sequence[EvalRecord]) -> str:
    """Generated images, a line for each model, number of images and seed."""
    lines = []
    for model, n, seed in dict.fromkeys((r.model, r.n, r.seed) for r in records):
        own = [r for r in records if (r.model, r.n, r.seed) == (model, n, seed)]
        steps = " ".join(str(number) for number in sorted({r.steps or 0 for r in own}))
        scales = " ".join(f"{scale:g}" for scale in sorted({r.guidance or 1.0 for r in own}))
        lines.append(
            f"xdlm eval image --model {model} --data {own[0].data} --steps {steps} --guidance {scales} "
            f"--n {n} {_running(own, seed)} --records results.jsonl"
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


def _running(records: Sequence[EvalRecord], seed: int) -> str:
    (dtype,) = {r.dtype for r in records}
    return f"--seed {seed}" + ("" if dtype == "float32" else f" --precision {dtype}")
