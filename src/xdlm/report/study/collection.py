"""The records of a study: which models stand for which method, and what was measured of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from xdlm.config import AUTOREGRESSIVE
from xdlm.data import ZERO_SHOT
from xdlm.errors import UserError
from xdlm.evaluation.perplexity import ZERO_SHOT_MEAN
from xdlm.evaluation.records import EvalRecord, measurement, read_records, record_files
from xdlm.evaluation.writing import FOREIGN
from xdlm.report.comparison import (
    ALWAYS,
    GENERATED,
    PAINTED,
    check_alike,
    check_generation,
    check_perplexity,
    method_of,
    real_text,
)
from xdlm.report.study.beside import (
    ADAPTED,
    AGAIN,
    GUMBEL,
    LAW,
    OTHERWISE,
    SAMPLES,
    Curves,
    Samples,
    is_apart,
    read_curves,
    read_samples,
    read_seconds,
)
from xdlm.report.study.paper import METHODS
from xdlm.report.study.verdict import Estimate, estimate, mean_of
from xdlm.sampling import STARVED

K = TypeVar("K", bound=Hashable)
#: Method -> place in a table -> what was found.
Grid = dict[str, dict[K, Estimate]]

_TRANSITIONS = "transitions"
#: The folder of drawings among the results.
FIGURES = "figures"
#: What texts of two trainings have in common.
_DRAWN = ("sampler", "temperature", "top_p")
#: Samplers that draw by float32 noise, or by its law.
NOISY = (GUMBEL, STARVED)


@dataclass(frozen=True)
class Study:
    """`trained` are records of the methods, one model each, trained from nothing and sampled as trained.
    Those of several evaluation seeds are averaged."""

    records: list[EvalRecord]
    """All of them, each once."""
    trained: list[EvalRecord]
    repeats: list[EvalRecord]
    """The same of further training seeds."""
    adapted: list[EvalRecord]
    """Of models that began with the weights of another."""
    resampled: list[EvalRecord]
    """Of models under a sampler of another process."""
    reference: list[EvalRecord]
    """Of an autoregressive model, whose perplexity is no bound but exact."""
    step: int
    """The training step that results are shown of."""
    painted: list[EvalRecord] = field(default_factory=list)
    """Of models of images, and of real images."""
    pictures: tuple[str, ...] = ()
    """Files beside the records, by their places in the folder."""
    seconds: dict[str, float] = field(default_factory=dict)
    """What commands took, by name: a run's for its training, `RUN.WHAT` for measuring it."""
    curves: Curves = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    again: Study | None = None
    """Some of the methods, trained again."""
    readapted: Study | None = None
    """A masked model that was trained and adapted again."""
    drawn: Drawn | None = None
    """Some of the methods, sampled in two ways."""
    otherwise: dict[str, Study] = field(default_factory=dict)
    """The same under other recipes, by name."""
    law: list[EvalRecord] = field(default_factory=list)
    """Of texts whose law is known, drawn without a model."""

    @property
    def methods(self) -> list[str]:
        return ordered({method_of(record) for record in self.trained})

    @property
    def has_text(self) -> bool:
        """Whether any of it is about models of text; what is empty is said, unless it is about images."""
        text = (self.trained, self.repeats, self.adapted, self.resampled, self.reference)
        return any(text) or not self.painted

    @property
    def last(self) -> list[EvalRecord]:
        return [record for record in self.trained if record.step == self.step]

    @cached_property
    def judges(self) -> list[str]:
        found = [*self.trained, *self.adapted]
        return sorted({r.judge for r in found if r.metric == "gen_ppl" and r.judge is not None})

    @cached_property
    def validation(self) -> str | None:
        """The text of most perplexities that is none of the zero-shot sets."""
        known = {*ZERO_SHOT, ZERO_SHOT_MEAN}
        texts = [r.data for r in self.trained if r.metric == "ppl" and r.data not in known]
        return max(sorted(filter(None, set(texts))), key=texts.count, default=None)

    def of(self, metric: str, **where: Any) -> list[EvalRecord]:
        """What was found of the methods, at the last step unless told otherwise (None: at any)."""
        step = where.pop("step", self.step)
        return [
            record for record in self.trained
            if record.metric == metric and step in (None, record.step)
            and all(getattr(record, name) == value for name, value in where.items())
        ]  # fmt: skip

    @cached_property
    def _groups(self) -> dict[str, list[EvalRecord]]:
        drawn = [] if self.drawn is None else self.drawn.ways
        others = [self.again, self.readapted, *drawn, *self.otherwise.values()]
        apart = [record for other in others if other is not None for record in other.records]
        return grouped([*self.records, *apart, *self.law])

    def sources(self, records: Iterable[EvalRecord]) -> list[EvalRecord]:
        """What records that may be averages were made of."""
        return [one for record in records for one in self._groups[_unseeded(record)]]

    def perplexities(self, data: str | None, step: int | None = None) -> dict[str, Estimate]:
        """By method, at the last step unless told otherwise."""
        at = {"step": self.step if step is None else step}
        found = {method_of(r): estimate(r) for r in _row_by_row(self.of("ppl", data=data, **at))}
        if data != ZERO_SHOT_MEAN:
            return found
        read = _row_by_row([r for r in self.of("ppl", **at) if r.data in ZERO_SHOT])
        sets = grid(read, lambda r: str(r.data))
        # In one order for all methods, since rows are compared with rows of the same text.
        return {
            method: mean_of([cell for _, cell in sorted(sets.get(method, {}).items())], mean)
            for method, mean in found.items()
        }

    def written(self, judge: str | None, **where: Any) -> Grid[int]:
        """The judge's perplexity by number of sampling steps; entropy for no judge."""
        metric = "entropy" if judge is None else "gen_ppl"
        return grid(self.of(metric, judge=judge, **where), lambda r: r.steps or 0)

    def real(self, judge: str | None) -> Estimate | None:
        """The same of real text."""
        beside = [r for r in self.last if r.metric in GENERATED and r.judge in (None, judge)]
        read = [
            r for r in self.records if r.metric.startswith("real_") and r.judge in (None, judge)
        ]
        most = max((r.n for r in read), default=0)
        found = real_text([*beside, *(r for r in read if r.n == most)])
        record = found.get("entropy" if judge is None else "gen_ppl")
        return None if record is None else estimate(record)


class Drawn(NamedTuple):
    """Models whose texts were drawn exactly, and as float32 Gumbel noise draws: by sampler, that noise
    itself or its law."""

    exact: Study
    noisy: dict[str, Study]

    @property
    def ways(self) -> list[Study]:
        return [self.exact, *self.noisy.values()]


def grid(records: Iterable[EvalRecord], place: Callable[[EvalRecord], K]) -> Grid[K]:
    found: Grid[K] = {}
    for record in records:
        found.setdefault(method_of(record), {})[place(record)] = estimate(record)
    return {method: found[method] for method in ordered(found)}


def read_study(folder: Path) -> Study:
    """All records of a folder and those in it; refuses what does not compare."""
    study = _read_one(folder)
    if (folder / AGAIN).is_dir():
        study = with_again(study, _read_one(folder / AGAIN))
    if (folder / ADAPTED).is_dir():
        study = with_readapted(study, _read_one(folder / ADAPTED))
    if (folder / GUMBEL).is_dir():
        exact, noisy = drawn_by_way(_read_all(folder / GUMBEL))
        exact = replace(exact, seconds=read_seconds(folder / GUMBEL))
        study = with_drawn(study, Drawn(exact, noisy))
    for other in sorted(f for f in (folder / OTHERWISE).glob("*") if f.is_dir()):
        study = with_otherwise(study, other.name, _read_one(other))
    if (folder / LAW).is_dir():
        study = replace(study, law=_read_all(folder / LAW))
    return study


def drawn_by_way(records: Sequence[EvalRecord]) -> Drawn:
    """Records of each way to draw apart; what is of none belongs to all. Refuses other models than the
    same, or texts that have no counterpart."""
    noisy = {way: [r for r in records if r.sampler == way] for way in NOISY}
    exact = [r for r in records if r.sampler not in NOISY]
    alone = [r for r in exact if r.sampler is None]
    if not any(noisy.values()) or len(alone) == len(exact):
        raise UserError(
            f"records of '{GUMBEL}' must hold texts of such noise, and exact ones of the same models"
        )
    drawn = Drawn(
        collect(exact), {way: collect([*alone, *own]) for way, own in noisy.items() if own}
    )
    judged = [one.of("gen_ppl") for one in drawn.ways]
    every = [r for own in judged for r in own]
    for method in {method_of(r) for own in judged[1:] for r in own}:
        both = [r for r in every if method_of(r) == method]
        check_alike(
            both,
            (*ALWAYS, "model", "step", "temperature", "top_p"),
            f"{method}, drawn in several ways",
        )
    for judge in {r.judge for own in judged[1:] for r in own}:
        check_alike([r for r in every if r.judge == judge], ("judge_sha256",),
                    f"texts drawn in several ways, judge {judge}")  # fmt: skip
    there, *wanted = ({(method_of(r), r.judge, r.steps) for r in own} for own in judged)
    for way, places in zip(drawn.noisy, wanted, strict=True):
        if alone_there := sorted(places - there, key=str):
            method, who, number = alone_there[0]
            raise UserError(
                f"{way} has texts of {method} in {number} steps under {who}, and no exact ones"
            )
    return drawn


def _read_all(folder: Path) -> list[EvalRecord]:
    found = (f for f in record_files(folder) if not is_apart(f, folder))
    files = [f for f in found if SAMPLES not in f.relative_to(folder).parts]
    raw = once([record for file in files for record in read_records(file)])
    if not raw:
        raise UserError(f"{folder} holds no records; give a folder of files that `xdlm eval` wrote")
    return raw


def _read_one(folder: Path) -> Study:
    """But for methods that were trained apart."""
    raw = _read_all(folder)
    pictures = (p.relative_to(folder) for p in folder.glob("*/*.png") if p.parent.name != FIGURES)
    return replace(
        collect(raw), pictures=tuple(sorted(p.as_posix() for p in pictures)),
        seconds=read_seconds(folder), curves=read_curves(folder), samples=read_samples(folder),
    )  # fmt: skip


def collect(raw: Sequence[EvalRecord]) -> Study:
    own = [
        r for r in raw if r.metric in ("ppl", _TRANSITIONS, *GENERATED) and "process" in r.config
    ]
    order = {method: place for place, method in enumerate(ordered(map(method_of, own)))}
    own = sorted(averaged(own), key=lambda record: order[method_of(record)])
    resampled = [r for r in own if FOREIGN in (r.sampler or "")]
    native = [r for r in own if FOREIGN not in (r.sampler or "")]
    adapted = [r for r in native if start_of(r) is not None]
    scratch = [r for r in native if start_of(r) is None and not _is_autoregressive(r)]
    reference = [r for r in native if _is_autoregressive(r)]
    first = set(_first_models(scratch).values())
    trained = [r for r in scratch if r.model in first]
    _check(trained)
    repeats = [r for r in scratch if r.model not in first]
    step = _common_step(trained)
    painted = averaged(r for r in raw if r.metric.removeprefix("real_") in PAINTED)
    return Study(list(raw), trained, repeats, adapted, resampled, reference, step, painted)


def with_again(study: Study, again: Study) -> Study:
    """With methods that were trained again."""
    _check_again(study, again)
    return replace(study, again=again)


def with_readapted(study: Study, other: Study) -> Study:
    """With another masked model and what became of it."""
    _check_again(study, other)
    return replace(study, readapted=other)


def with_drawn(study: Study, drawn: Drawn) -> Study:
    """With methods that were trained again and sampled in two ways."""
    _check_again(study, drawn.exact)
    return replace(study, drawn=drawn)


def with_otherwise(study: Study, name: str, other: Study) -> Study:
    """With a study of another recipe, which read the same texts."""
    for data in {r.data for r in other.of("ppl")}:
        read = [*study.of("ppl", data=data), *other.of("ppl", data=data)]
        check_alike(read, ("data_sha256",), f"{name}, perplexity of {data}")
    return replace(study, otherwise={**study.otherwise, name: other})


def _check_again(study: Study, again: Study) -> None:
    """Another training must have been measured as the first, but for the number of texts."""
    for metric, alike in (("ppl", (*ALWAYS, "draws")), ("gen_ppl", (*ALWAYS, *_DRAWN))):
        check_alike([*study.of(metric), *again.of(metric)], alike, "trained again")
    for data in {r.data for r in again.of("ppl")}:
        read = [*study.of("ppl", data=data), *again.of("ppl", data=data)]
        check_alike(read, ("data_sha256",), f"trained again, perplexity of {data}")


def _is_autoregressive(record: EvalRecord) -> bool:
    return record.config["process"].get("kind") == AUTOREGRESSIVE


def start_of(record: EvalRecord) -> str | None:
    """Where a model's first weights came from, if not from chance."""
    return record.config.get("train", {}).get("start") or None


def seed_of(record: EvalRecord) -> int:
    seed = record.config.get("train", {}).get("seed", 0)
    assert isinstance(seed, int)
    return seed


def once(records: Iterable[EvalRecord]) -> list[EvalRecord]:
    """Without what stands there twice."""
    found: dict[str, EvalRecord] = {}
    for record in records:
        held = found.setdefault(measurement(record), record)
        if (held.value, held.stderr) != (record.value, record.stderr):
            raise UserError(
                f"two different results for {record.model} at step {record.step}, {record.metric}, "
                f"{record.data or f'{record.steps} steps'}, seed {record.seed}; give one record of each"
            )
    return list(found.values())


def averaged(records: Iterable[EvalRecord]) -> list[EvalRecord]:
    """Over evaluation seeds. Other seeds make other texts, whose errors are independent; of a text that is
    read they only draw other noise, so that its error stays."""
    return [own[0] if len(own) == 1 else _mean(own) for own in grouped(records).values()]


def grouped(records: Iterable[EvalRecord]) -> dict[str, list[EvalRecord]]:
    """Those that differ in the evaluation seed alone."""
    groups: dict[str, list[EvalRecord]] = {}
    for record in records:
        groups.setdefault(_unseeded(record), []).append(record)
    return groups


def _unseeded(record: EvalRecord) -> str:
    return measurement(dataclasses.replace(record, seed=0))


def _mean(records: Sequence[EvalRecord]) -> EvalRecord:
    own, n = [estimate(r) for r in records], len(records)
    errors = [e.stderr for e in own]
    error = math.hypot(*errors) if records[0].data is None else sum(errors)
    names = dict.fromkeys(name for r in records for name in r.details)
    value = sum(e.value for e in own) / n
    return dataclasses.replace(
        records[0], value=value if math.isfinite(value) else None, stderr=error / n,
        details={name: sum(r.details.get(name, 0.0) for r in records) / n for name in names},
        row_nats=None,
    )  # fmt: skip


def _row_by_row(records: list[EvalRecord]) -> list[EvalRecord]:
    """What each row came to is left out where seeds differ, since rows are then in other orders."""
    if len({r.seed for r in records}) == 1:
        return records
    return [replace(r, row_nats=None) for r in records]


def ordered(methods: Iterable[str]) -> list[str]:
    """In the paper's order; others behind."""
    there = set(methods)
    return [*(m for m in METHODS if m in there), *sorted(there - set(METHODS))]


def _first_models(records: Sequence[EvalRecord]) -> dict[str, str]:
    """For each method the model of its lowest training seed."""
    seeds: dict[str, dict[int, str]] = {}
    for record in records:
        models = seeds.setdefault(method_of(record), {})
        other = models.setdefault(seed_of(record), record.model)
        if other != record.model:
            raise UserError(
                f"there are two models of {method_of(record)} and one seed, {other} and "
                f"{record.model}; keep the records of one"
            )
    return {method: models[min(models)] for method, models in seeds.items()}


def _common_step(records: Sequence[EvalRecord]) -> int:
    """Where most models ended; of those, the last."""
    ends: dict[str, int] = {}
    for record in records:
        ends[record.model] = max(record.step, ends.get(record.model, 0))
    reached = list(ends.values())
    return max(reached, key=lambda step: (reached.count(step), step), default=0)


def _check(records: Sequence[EvalRecord]) -> None:
    """What stands in one column must compare; over training the texts and judges must stay the same."""
    for kind in (True, False):
        check_alike([r for r in records if (r.metric == "ppl") == kind], ALWAYS, "study")
    columns: dict[tuple[Any, ...], list[EvalRecord]] = {}
    judges: dict[str, list[EvalRecord]] = {}
    texts: dict[str, list[EvalRecord]] = {}
    for record in records:
        place = (record.metric, record.step, record.steps, record.judge, record.data)
        columns.setdefault(place, []).append(record)
        if record.judge is not None:
            judges.setdefault(record.judge, []).append(record)
        if record.metric == "ppl":
            texts.setdefault(str(record.data), []).append(record)
    for column in columns.values():
        (check_perplexity if column[0].metric == "ppl" else check_generation)(column)
    for name, own in judges.items():
        check_alike(own, ("judge_sha256",), f"judge {name}")
    for name, own in texts.items():
        check_alike(own, ("data_sha256",), f"perplexity of {name}")
