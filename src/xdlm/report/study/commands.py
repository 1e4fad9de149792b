"""What to type to measure again: templates, filled from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from xdlm.bundled import bundled_folder
from xdlm.data import ZERO_SHOT
from xdlm.evaluation.judges import NGRAM
from xdlm.evaluation.known_law import BOUND, CALCULATED, ZIPF
from xdlm.evaluation.markov_law import MARKOV, SUFFIX
from xdlm.evaluation.ngram import NAME as TRIGRAMS
from xdlm.evaluation.perplexity import ZERO_SHOT_MEAN
from xdlm.evaluation.records import EvalRecord
from xdlm.report.study.beside import GUMBEL
from xdlm.report.study.collection import Study, seed_of

#: Where the script of images keeps models at a CPU's size.
_SMALL = "runs/cifar10-small/"
#: Where the script of texts keeps the judge that it trains.
_KEPT = "runs/repro/kept"


def train_again(study: Study) -> str:
    """Trains all methods and adapted models, measures them, and goes on where it stopped."""
    return _script(study, 60)


def measure_again(study: Study) -> str:
    """What there is, without training."""
    return _script(study, 0)


def repeat_again(again: Study, *, whole: bool = False) -> str:
    """Trains some of the methods with another seed, and measures what came out: the last checkpoint alone,
    or the `whole` of it, foreign samplers too."""
    ends = {PurePosixPath(r.model).name: r for r in (*again.last, *again.adapted, *again.reference)}
    seed = min(seed_of(r) for r in again.last)
    texts = {r.steps or 0: r.n for r in again.last if r.judge is not None}
    steps, numbers = (" ".join(map(str, part)) for part in (texts, texts.values()))
    written = f" --steps {steps} --n {numbers}" if texts else ""
    early = sorted({r.steps for r in again.trained if r.judge and r.step != again.step and r.steps})
    last = f" --early-steps {' '.join(map(str, early or texts))}" if whole else " --last-only"
    return f"{_script(again, 60)} --seed {seed}{last} --runs {' '.join(ends)}{written}"


def draw_again(drawn: Study, sampler: str) -> str:
    """The same, with texts that are drawn otherwise."""
    return f"{repeat_again(drawn)} --impl {sampler}"


def _script(study: Study, minutes: int) -> str:
    """It has its own judge anyhow."""
    others = [
        path for judge in study.judges if not (path := _judge(study, judge)).startswith(_KEPT)
    ]
    named = f" --judge {' '.join(others)}" if others else ""
    written = {r.dtype for r in study.trained if r.judge is not None}
    # Said even where it is usual: what is depends on the machine.
    precision = "".join(f" --precision {dtype}" for dtype in sorted(written))
    return f"python recipes/repro/run.py --minutes {minutes}{named}{precision}"


def _judge(study: Study, name: str) -> str:
    """Where it is looked for; what was not trained here is a folder or file of that name in models/."""
    if name in {PurePosixPath(r.model).name for r in study.reference}:
        return f"{_KEPT}/{name}"
    if name.startswith(TRIGRAMS):
        return NGRAM
    return name if bundled_folder(name) else f"models/{name}"


def read_again(records: Sequence[EvalRecord]) -> str:
    """Perplexity of texts."""
    texts = sorted({str(r.data) for r in records} - {*ZERO_SHOT, ZERO_SHOT_MEAN})
    data = f" --data {' '.join(texts)}" if texts else ""
    zero_shot = " --zero-shot" if any(r.data == ZERO_SHOT_MEAN for r in records) else ""
    most = max((r.n for r in records if r.data != ZERO_SHOT_MEAN), default=0)
    settings = sorted({(r.draws, r.seed) for r in records})
    rows = " --row-nats" if any(r.row_nats is not None for r in records) else ""
    return "\n".join(
        f"xdlm eval dynamics {_runs(records)}{data}{zero_shot} --max-rows {most} --draws {draws}{rows} "
        f"{_running(records, seed)} --steps{_at(records)} --records results.jsonl"
        for draws, seed in settings
    )


def write_again(study: Study, records: Sequence[EvalRecord]) -> str:
    """Generated texts, a line for each seed and for the judges who saw the same ones."""
    judged = [r for r in records if r.judge is not None]
    seen: dict[tuple[int, tuple[tuple[int, int], ...]], list[str]] = {}
    for judge, seed in sorted({(str(r.judge), r.seed) for r in judged}):
        own = {(r.steps or 0, r.n) for r in judged if (r.judge, r.seed) == (judge, seed)}
        seen.setdefault((seed, tuple(sorted(own))), []).append(_judge(study, judge))
    return "\n".join(
        f"xdlm eval dynamics {_runs(judged)} --steps {' '.join(str(steps) for steps, _ in made)} "
        f"--n {' '.join(str(n) for _, n in made)} --judge {' '.join(judges)} "
        f"{_running(judged, seed)}{_at(judged)} --records results.jsonl"
        for (seed, made), judges in seen.items()
    )


def paint_again(records: Sequence[EvalRecord]) -> str:
    """Generated images, a line for each model, number of images and seed."""
    lines = []
    for model, n, seed in dict.fromkeys((r.model, r.n, r.seed) for r in records):
        own = [r for r in records if (r.model, r.n, r.seed) == (model, n, seed)]
        steps, scales = _steps_and_scales(own)
        lines.append(
            f"xdlm eval image --model {model} --data {own[0].data}{_limit(own[0])} --steps {steps} "
            f"--guidance {scales} --n {n} {_running(own, seed)} --records results.jsonl"
        )
    return "\n".join(lines)


def _steps_and_scales(records: Sequence[EvalRecord]) -> tuple[str, str]:
    """All numbers of sampling steps, and all scales of guidance."""
    steps = sorted({r.steps or 0 for r in records})
    scales = sorted({r.guidance or 1.0 for r in records})
    return " ".join(map(str, steps)), " ".join(f"{scale:g}" for scale in scales)


def _limit(record: EvalRecord) -> str:
    """Where only some images of a data set were compared with."""
    limit = record.details.get("reference_limit")
    return "" if limit is None else f" --limit {limit:.0f}"


def train_images_again(records: Sequence[EvalRecord]) -> str:
    """Trains and paints models of images as these were, a line for those that were alike."""
    alike: dict[tuple[str, str, int, int, str, str], list[EvalRecord]] = {}
    for r in records:
        if r.guidance is not None:
            size = "120 --lanes 2 --small" if r.model.startswith(_SMALL) else "60"
            kind = "code-" if is_coded(r) else ""
            key = (size, kind, r.config["train"]["steps"], r.n, _limit(r), r.dtype)
            alike.setdefault(key, []).append(r)
    lines = []
    for (size, kind, trained, n, limit, dtype), own in alike.items():
        runs = " ".join(dict.fromkeys(PurePosixPath(r.model).name for r in own))
        steps, scales = _steps_and_scales(own)
        lines.append(
            f"python recipes/cifar10/run.py --minutes {size} --runs {runs} --{kind}train-steps {trained} "
            f"--{kind}steps {steps} --{kind}guidance {scales} --n {n}{limit} --precision "
            f"{dtype}"
        )
    return "\n".join(lines)


def is_coded(record: EvalRecord) -> bool:
    """Whether it is of a model of codes, and not of pixels."""
    return str(record.config["data"]["tokenizer"]).startswith("vq:")


def draw_known_again(records: Sequence[EvalRecord]) -> str:
    """Texts of known laws, a line for each law, noise and way to draw. A law that was learned is learned
    in its first line, and kept for the others."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for r in (r for r in records if r.metric != BOUND):
        drawn = f"--impl {r.sampler} --n {r.n} --length {r.length} --seed {r.seed}"
        calculated = f"--impl {GUMBEL} --calculate --length {r.length}"
        how = calculated if r.sampler == CALCULATED else drawn
        steps = lines.setdefault((_law(r), _noise(r), how), [])
        steps += [r.steps or 0] * (r.steps not in steps)
    bounds = {(_law(r), _noise(r)): f"--bound {r.n} " for r in records if r.metric == BOUND}
    kept: dict[str, str] = {}
    found = []
    for (law, noise, how), steps in lines.items():
        file = f"law-{len(kept) + 1}{SUFFIX}"
        if law in kept:
            opened = kept[law]
        elif law.startswith(f"--law {MARKOV} "):
            opened, kept[law] = f"{law} --keep-law {file}", f"--law {file}"
        else:
            opened = law
        bound = bounds.pop((law, noise), "")
        numbers = " ".join(map(str, sorted(steps)))
        found.append(
            f"xdlm eval draws {opened} {noise} {how} --steps {numbers} {bound}--records results.jsonl"
        )
    return "\n".join(found)


def _law(record: EvalRecord) -> str:
    learned = record.config.get("law")
    if learned is not None:
        return _flags({"law": MARKOV, **learned})
    if record.data:
        return _flags({"law": f"models/{record.model}", "data": record.data})
    tokens = f"{record.details['vocabulary']:.0f}"
    return _flags({"exponent": record.model.removeprefix(f"{ZIPF}-"), "tokens": tokens})


def _noise(record: EvalRecord) -> str:
    settings = record.config["process"].items()
    return _flags({f"process.{name}": value for name, value in settings if value is not None})


def _flags(settings: Mapping[str, object]) -> str:
    return " ".join(f"--{name} {value}" for name, value in settings.items())


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


def _at(records: Sequence[EvalRecord]) -> str:
    """Of all checkpoints that were kept only this one, if it is one."""
    steps = {r.step for r in records}
    return f" --every {steps.pop()}" if len(steps) == 1 and 0 not in steps else ""
