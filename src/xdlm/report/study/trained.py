"""What was trained, on what, and how long it took."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from xdlm.evaluation.records import EvalRecord
from xdlm.report.comparison import method_of
from xdlm.report.study import paper
from xdlm.report.study.beside import plot_curves
from xdlm.report.study.collection import Study, seed_of
from xdlm.report.study.commands import train_again
from xdlm.report.study.page import Section, missing
from xdlm.report.study.verdict import estimate
from xdlm.report.tables import markdown_table

_COLUMNS = [
    "run", "noise", "model", "steps", "batch", "tokens", "device", "seconds of training", "of measuring",
]  # fmt: skip
#: What runs may differ in without being trained otherwise: where they lie, and how they were watched.
_ASIDE = {
    "process", "train.out", "train.minutes", "train.device", "train.log_every", "train.eval_every",
    "train.eval_rows", "train.save_every", "train.keep", "train.keep_every", "train.tensorboard",
    "train.wandb", "train.micro_batch", "train.start",
}  # fmt: skip


#: Commands of a study of images that are of no model: real images, their codec, and pictures of all.
_OF_ALL_IMAGES = {"real", "codec", "paint"}


def trained(study: Study) -> Section:
    """Models of text; sections of images tell of theirs."""
    times = _text_seconds(study)
    parts = [
        *what_it_took(study),
        *_of_text(study),
        *missing(_ends(study), times, "device time of training"),
    ]
    curves = {
        method_of(r): study.curves[name]
        for r in study.last if (name := _name(r.model)) in study.curves
    }  # fmt: skip
    figures = {"losses": partial(plot_curves, curves)} if curves else {}
    return Section(
        "What was trained",
        (),
        parts,
        figures=figures,
        records=list(times.values()),
        command=train_again(study),
    )


def train_seconds(study: Study) -> dict[str, EvalRecord]:
    """Device time of each model's training."""
    return {r.model: r for r in _last([r for r in study.records if r.metric == "train_seconds"])}


def what_it_took(study: Study) -> list[str]:
    """A table of all models of text, and the time of their commands."""
    ends, times = _ends(study), _text_seconds(study)
    models = list(dict.fromkeys([*ends, *times]))
    others = {*map(_name, _painted(study)), *_OF_ALL_IMAGES}
    commands = {c: s for c, s in study.seconds.items() if not _is_of(c, others)}
    return _took(study, {model: (ends.get(model), times.get(model)) for model in models}, commands)


def painting_took(study: Study, records: Sequence[EvalRecord]) -> list[str]:
    """The same of the models of some images."""
    times = train_seconds(study)
    ends = {r.model: (r, times.get(r.model)) for r in _last(records)}
    commands = {c: s for c, s in study.seconds.items() if _is_of(c, set(map(_name, ends)))}
    return _took(study, ends, commands)


def _took(
    study: Study,
    models: Mapping[str, tuple[EvalRecord | None, EvalRecord | None]],
    commands: Mapping[str, float],
) -> list[str]:
    """A line for each model, from a record of its end and one of the time of its training."""
    rows = [[*_row(*both), _measured(study, _name(model))] for model, both in models.items()]
    training = math.fsum(time.value or 0.0 for _, time in models.values() if time is not None)
    names = set(map(_name, models))
    measuring = math.fsum(s for c, s in commands.items() if c not in names)
    return [
        markdown_table(_COLUMNS, rows),
        f"By their own clocks the models took {_minutes(training)} of training, and commands "
        f"{_minutes(measuring)} of measuring, several of them at a time on one device.",
    ]


def _text_seconds(study: Study) -> dict[str, EvalRecord]:
    painted = _painted(study)
    return {model: r for model, r in train_seconds(study).items() if model not in painted}


def _painted(study: Study) -> set[str]:
    """Models of images."""
    return {r.model for r in study.painted}


def _name(model: str) -> str:
    """Of a run, which its commands begin with."""
    return PurePosixPath(model).name


def _is_of(command: str, runs: Iterable[str]) -> bool:
    return any(command == run or command.startswith(f"{run}.") for run in runs)


def _of_text(study: Study) -> list[str]:
    return [
        alike(study.trained),
        "Errors (±) are standard errors over rows and draws, or over texts: they do not tell how much "
        "another training run would differ." + _seeds(study),
        *missing(paper.METHODS, study.methods, "methods"),
        *_unfinished(study),
    ]


def _ends(study: Study) -> dict[str, EvalRecord]:
    """A record of each model at its last step, methods first."""
    return {
        r.model: r
        for r in _last([*study.trained, *study.repeats, *study.adapted, *study.reference])
    }


def _last(records: Sequence[EvalRecord]) -> list[EvalRecord]:
    found: dict[str, EvalRecord] = {}
    for record in records:
        held = found.setdefault(record.model, record)
        if record.step > held.step:
            found[record.model] = record
    return list(found.values())


def _row(record: EvalRecord | None, time: EvalRecord | None) -> list[str]:
    one = time or record
    assert one is not None
    config, details = one.config, time.details if time else {}
    train, data, model = (config.get(part) or {} for part in ("train", "data", "model"))
    batch, length = train.get("batch"), data.get("length")
    tokens = details.get("tokens", one.step * batch * length if batch and length else None)
    size = f", {details['parameters'] / 1e6:.1f} M" if "parameters" in details else ""
    return [
        _name(one.model),
        method_of(one) if "process" in config else "none",
        f"{_shape(model)}{size}".strip(", "),
        f"{one.step:,}",
        f"{batch:,} × {length:,}" if batch and length else "",
        "" if tokens is None else f"{tokens / 1e6:,.1f} M",
        one.device,
        "?" if time is None or time.value is None else f"{time.value:,.0f}",
    ]


def _shape(model: Mapping[str, Any]) -> str:
    if "channels" in model:
        return f"U-Net {model['channels']}"
    return f"{model['depth']} × {model['width']}" if "depth" in model else ""


def _measured(study: Study, run: str) -> str:
    own = [s for command, s in study.seconds.items() if command.startswith(f"{run}.")]
    return f"{math.fsum(own):,.0f}" if own else "?"


def _minutes(seconds: float) -> str:
    return f"{seconds:,.0f} s ({seconds / 60:.1f} min)" if seconds else "an unknown time"


def alike(records: Sequence[EvalRecord]) -> str:
    """Whether the methods of some records were trained alike, by their configurations."""
    other = differing({r.model: r for r in records}.values())
    if other:
        return f"The methods' configurations differ in more than the noise: {', '.join(other)}."
    return "By their configurations the methods were trained alike but for the noise."


def differing(records: Iterable[EvalRecord]) -> list[str]:
    """Settings in which the training of some models differs, the noise aside."""
    configs = [_flat(r.config) for r in records]
    names = sorted({name for config in configs for name in config})
    return [
        name for name in names if not any(name == a or name.startswith(f"{a}.") for a in _ASIDE)
        and len({str(config.get(name)) for config in configs}) > 1
    ]  # fmt: skip


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        found |= (
            _flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
        )
    return found


def _seeds(study: Study) -> str:
    """What further training seeds say of that."""
    own = [r for r in study.repeats if r.metric == "ppl" and r.data == study.validation]
    firsts = study.perplexities(study.validation)
    told = [
        f"{method_of(r)}, seed {seed_of(r)}: {estimate(r).shown()} against "
        f"{firsts[method_of(r)].shown()}"
        for r in own if r.step == study.step and method_of(r) in firsts
    ]  # fmt: skip
    return f" Validation perplexity of other training seeds: {'; '.join(told)}." if told else ""


def _unfinished(study: Study) -> list[str]:
    """Methods whose training ended elsewhere, and is not shown for that."""
    ends = {r.model: r for r in _last(study.trained)}
    short = [f"{method_of(r)} ({r.step:,})" for r in ends.values() if r.step != study.step]
    note = f"Results are of step {study.step:,}; these ended at another and stand under training alone: "
    return [f"{note}{', '.join(short)}."] if short else []
