"""Models that read the same rows are compared row by row."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from xdlm import UserError, load
from xdlm.evaluation.perplexity import measure_perplexity, plan_perplexity
from xdlm.evaluation.records import append_records, measurement, read_records
from xdlm.report.study.balance import distance
from xdlm.report.study.collection import collect
from xdlm.report.study.course import gaps, shrinks
from xdlm.report.study.verdict import (
    Estimate,
    Outcome,
    below,
    combination,
    difference,
    estimate,
    logarithm,
    mean_of,
)

TEXT = ["It was a dark and stormy night; the rain fell in torrents, except now and then. " * 40]


def shares(rows: np.ndarray) -> tuple[tuple[float, ...], ...]:
    return (tuple(rows.tolist()),)


def test_the_error_is_that_of_the_differences() -> None:
    """Over 2,000 sets of 200 rows: what both find hard scatters ten times as much as what differs."""
    rng = np.random.default_rng(0)
    found, errors = [], []
    for _ in range(2000):
        hard = rng.normal(0, 1.0, 200)
        ours, theirs = (hard + rng.normal(shift, 0.1, 200) for shift in (0.02, 0.0))
        lead = difference(
            Estimate(ours.sum(), 14.0, shares(ours)), Estimate(theirs.sum(), 14.0, shares(theirs))
        )
        found.append(lead.value)
        errors.append(lead.stderr)
    assert np.mean(errors) == pytest.approx(np.std(found), rel=0.05)
    assert np.mean(errors) == pytest.approx(0.1 * math.sqrt(2 * 200), rel=0.02)


def test_without_rows_or_with_others_both_are_independent() -> None:
    three, four = ((1.0, 2.0, 4.0),), ((1.0, 2.0, 4.0, 1.0),)
    for one, other in (((), ()), (three, ()), (three, four)):
        assert difference(Estimate(9, 3, one), Estimate(4, 4, other)) == Estimate(5, 5.0)


def test_weights_count_in_sums_of_several() -> None:
    """What all rows share cancels where weights add up to nothing; what is left scatters as it should."""
    rng = np.random.default_rng(0)
    hard, own = rng.normal(0, 1.0, 4000), rng.normal(0, 0.1, (3, 4000))
    parts = [Estimate(float(n), 63.0, shares(hard + rows)) for n, rows in enumerate(own)]
    found = combination(list(zip((0.25, 0.75, -1.0), parts, strict=True)))
    assert found.value == pytest.approx(-1.25)
    assert found.stderr == pytest.approx(0.1 * math.sqrt(4000 * (1 / 16 + 9 / 16 + 1)), rel=0.05)
    apart = [part._replace(shares=()) for part in parts]
    assert combination(list(zip((3.0, 4.0, 0.0), apart, strict=True)))[:2] == (4.0, 5 * 63.0)


def test_a_logarithm_has_relative_errors() -> None:
    rows = ((1.0, 2.0, 4.0),)
    assert logarithm(Estimate(2.0, 0.1, rows)) == (math.log(2), 0.05, ((0.5, 1.0, 2.0),))


def over_training(kept: tuple[int, ...]) -> dict[str, dict[int, Estimate]]:
    """A gap of 10 % that grows to 12 % while rows scatter by as much as ten times that; rows are known at
    some steps only."""
    rng = np.random.default_rng(0)
    cells: dict[str, dict[int, Estimate]] = {"MDLM": {}, "XDLM k=0.1": {}}
    for step, gap in ((100, 1.10), (200, 1.12)):
        hard = rng.normal(0.25, 0.05, 400)
        for name, value in (("MDLM", 100.0), ("XDLM k=0.1", 100.0 * gap)):
            rows = shares(value / 100 * (hard + rng.normal(0, 0.002, 400)))
            cells[name][step] = Estimate(value, value / 100, rows if step in kept else ())
    return cells


@pytest.mark.parametrize(
    ("kept", "outcome"),
    [((), Outcome.NOISE), ((200,), Outcome.NOISE), ((100, 200), Outcome.FAILS)],
)
def test_gaps_over_training_are_compared_row_by_row(
    kept: tuple[int, ...], outcome: Outcome
) -> None:
    found = gaps(over_training(kept))
    apart = math.hypot(0.01, 0.01)
    for step, one in found.items():
        assert (step in kept) == (one.stderr < apart / 10)
        assert (step in kept) != (one.stderr == pytest.approx(apart))
    assert shrinks("x", "y", found).outcome == outcome


def test_places_on_the_line_are_compared_row_by_row() -> None:
    """Perplexities of text that differ by the same in every row put no error on the distance."""
    rows = np.random.default_rng(0).normal(0.1, 0.05, 100)
    read = {name: Estimate(x, 5.0, shares(rows + x / 100)) for name, x in
            (("MDLM", 50.0), ("XDLM k=0.1", 55.0), ("UDLM", 60.0))}  # fmt: skip
    wrote = {"MDLM": Estimate(150, 3), "UDLM": Estimate(90, 4), "XDLM k=0.1": Estimate(100, 0)}
    away = distance({name: (read[name], wrote[name]) for name in read})
    assert away is not None and away[:2] == pytest.approx((20, 2.5))


def test_a_mean_of_texts_has_the_rows_of_all() -> None:
    texts = [Estimate(10, 1, ((2.0, 4.0),)), Estimate(20, 1, ((6.0, 8.0),))]
    assert mean_of(texts, Estimate(15, 0.7)).shares == ((1.0, 2.0), (3.0, 4.0))
    assert mean_of([texts[0], Estimate(20, 1)], Estimate(15, 0.7)).shares == ()


def test_records_keep_the_rows_that_are_asked_for(tmp_path: Path) -> None:
    """They add up to the perplexity; two models are told apart where their own errors overlap."""
    found = []
    for name in ("pocket-mdlm", "pocket-udlm"):
        model = load(name, device="cpu")
        rows = model.pack(TEXT)
        plan = plan_perplexity(model, name, "a night", rows, draws=2, max_rows=len(rows))
        with_rows, plain = (
            measure_perplexity(model, plan, rows, row_nats=asked) for asked in (True, False)
        )
        assert plain.row_nats is None and with_rows.row_nats is not None
        assert measurement(plain) == measurement(with_rows)
        mean = sum(with_rows.row_nats) / (rows.length * len(rows))
        assert mean == pytest.approx(plain.details["nats_per_token"], abs=1e-5)
        append_records(tmp_path / f"{name}.jsonl", [with_rows])
        assert read_records(tmp_path / f"{name}.jsonl") == [with_rows]
        found.append(estimate(with_rows))
    apart = difference(found[1], found[0])
    assert apart.stderr < math.hypot(found[0].stderr, found[1].stderr)
    assert "standard errors" in below("a", found[0], "b", found[1]).words


def test_other_seeds_have_rows_in_another_order() -> None:
    model = load("pocket-mdlm", device="cpu")
    plan = plan_perplexity(model, "a", "a night", model.pack(TEXT))
    one = replace(plan, value=9.0, stderr=1.0, row_nats=[1.0, 2.0, 4.0], details={"tokens": 9.0})
    uniform = plan_perplexity(load("pocket-udlm", device="cpu"), "b", "a night", model.pack(TEXT))
    other = replace(one, model="b", config=uniform.config)
    assert all(e.shares for e in collect([one, other]).perplexities("a night").values())
    unlike = collect([one, replace(other, seed=1)]).perplexities("a night")
    assert len(unlike) == 2 and not any(e.shares for e in unlike.values())
    averaged = collect([one, replace(one, seed=1), other]).perplexities("a night")
    assert not averaged["MDLM"].shares


def test_rows_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    model = load("pocket-mdlm", device="cpu")
    rows = model.pack(TEXT)
    plan = plan_perplexity(model, "pocket-mdlm", "a night", rows)
    append_records(tmp_path / "r.jsonl", [plan])
    line = (tmp_path / "r.jsonl").read_text().rstrip()[:-1]
    assert "row_nats" not in line
    (tmp_path / "r.jsonl").write_text(f'{line}, "row_nats": [1.0, "2"]}}\n')
    with pytest.raises(UserError, match="row_nats cannot be"):
        read_records(tmp_path / "r.jsonl")
