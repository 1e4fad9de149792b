"""What a study finds: verdicts that numbers alone decide, and how the numbers come about."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from studies import RUNS, changes, config, gen, of, page_of, ppl, verdicts, whole

from xdlm.cli.side_by_side import who_writes_best
from xdlm.data import ZERO_SHOT
from xdlm.report.dynamics import interrupted
from xdlm.report.figures import Point
from xdlm.report.study import paper
from xdlm.report.study.balance import bowed, distance
from xdlm.report.study.changes import counts_of
from xdlm.report.study.collection import averaged, once
from xdlm.report.study.course import gaps, shrinks
from xdlm.report.study.crossover import against_masked, ahead, crossing
from xdlm.report.study.judges import _verdict, compare
from xdlm.report.study.likelihood import ranked
from xdlm.report.study.page import Section
from xdlm.report.study.verdict import Estimate, Finding, Outcome, agreement, below, positive

JUDGES = "Two judges put the methods in the same order"


def test_what_follows_the_paper_holds() -> None:
    page = page_of(whole())
    found = verdicts(page)
    assert len(found) == 15 and set(found.values()) == {"holds"}, found
    assert "| MDLM | 23.32 ± 0.10 | +0.0 % | 23.321 | +0.0 % |" in page
    assert (
        "XDLM k=0.1 and MDLM change places under SmolLM2-135M-Instruct-Q8_0.gguf at 111 steps"
        in page
    )
    assert "under judge at 111 steps; in the paper at 108 steps" in page
    assert "Not measured" not in page.replace("Not measured (sampling steps", "")
    assert "models took 1,284 s (21.4 min) of training" in page, "7 x 180 + 2 x 12"
    assert "| adapt-xdlm | XDLM k=0.1 | 8 × 384 | 300 |" in page
    assert "alike but for the noise" in page


def test_what_contradicts_the_paper_does_not_hold() -> None:
    swap = {"MDLM": "UDLM", "UDLM": "MDLM"}
    records = [
        replace(r, model=RUNS[swap[m]], config=config(swap[m]))
        if (m := {v: k for k, v in RUNS.items()}.get(r.model)) in swap and r.metric != "train_seconds"
        else r
        for r in whole()
    ]  # fmt: skip
    found = verdicts(page_of(records))
    for claim in (
        "Validation perplexity",
        "Mean zero-shot",
        "8 sampling steps: XDLM k=0.1 writes better than MDLM",
    ):
        assert next(v for k, v in found.items() if k.startswith(claim)) == "does not hold"


def test_what_noise_hides_is_said_to_be_hidden() -> None:
    noisy = [replace(r, stderr=10 * r.value) if r.value and r.stderr else r for r in whole()]
    found = verdicts(page_of(noisy))
    assert found[f"{JUDGES}, fewer than 128 steps"] == "not separated by the noise"
    assert set(found.values()) == {"not separated by the noise"}, found


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        ((10, 1), (20, 1), Outcome.HOLDS), ((20, 1), (10, 1), Outcome.FAILS),
        ((10, 1), (12.8, 1), Outcome.NOISE), ((12.8, 1), (10, 1), Outcome.NOISE),
        ((10, 1), (12.9, 1), Outcome.HOLDS), ((10, 0), (10, 0), Outcome.NOISE),
        ((10, 0), (11, 0), Outcome.HOLDS), ((10, math.nan), (99, 1), Outcome.UNKNOWN),
        ((10, 1), (math.inf, math.nan), Outcome.UNKNOWN),
    ],
)  # fmt: skip
def test_verdicts(low: tuple, high: tuple, outcome: Outcome) -> None:
    """Two standard errors of the difference, √2 here, decide."""
    assert below("a", Estimate(*low), "b", Estimate(*high)).outcome == outcome


def test_verdicts_in_words() -> None:
    clear = below("a", Estimate(10, 1), "b", Estimate(20, 1))
    assert clear.words == "a 10.00 ± 1.00 < b 20.00 ± 1.00, 7.1 standard errors"
    assert clear.brief == "10.00 < 20.00 (7.1 se)"
    nothing = below("a", None, "b", Estimate(20, 1))
    assert (nothing.outcome, nothing.words) == (Outcome.UNKNOWN, "a not measured")
    noise = positive(Estimate(1, 1), "so", "so")
    assert Finding("c", "p", [clear, noise]).outcome == Outcome.NOISE
    assert Finding("c", "p", [clear, nothing, noise]).outcome == Outcome.UNKNOWN
    fails = positive(Estimate(-9, 1), "so", "so")
    assert Finding("c", "p", [clear, nothing, fails]).outcome == Outcome.FAILS
    assert Finding("c", "p", []).sentence == "c: **not measured**."
    assert "- c: **holds** (a 10.00" in Section(
        "t", findings=[Finding("c", "p", [clear])]
    ).markdown("f")


def test_seeds_of_evaluation_are_averaged() -> None:
    """Other texts, smaller errors; the same text under other noise keeps its error."""
    texts = [gen("MDLM", value, 8, seed=seed)[0] for seed, value in enumerate((90.0, 110.0))]
    (one,) = averaged([replace(r, stderr=3.0) for r in texts])
    assert one.value == 100 and one.stderr == pytest.approx(3 / math.sqrt(2))
    (read,) = averaged(
        [ppl("MDLM", 20.0, seed=0, stderr=1.0), ppl("MDLM", 22.0, seed=1, stderr=1.0)]
    )
    assert (read.value, read.stderr) == (21, 1)
    assert len(once([*texts, *texts])) == 2


def test_seeds_of_training_stand_beside() -> None:
    other = config("MDLM", seed=1)
    page = page_of([*whole(), ppl("MDLM", 24.0, model="runs/repro/mdlm-s1", config=other)])
    assert "MDLM, seed 1: 24.00 ± 0.10 against 23.32 ± 0.10" in page
    assert "| MDLM | 23.32 ± 0.10 | +0.0 %" in page


def test_an_autoregressive_model_stands_beside_and_takes_no_part() -> None:
    own = {**config("MDLM"), "process": {"kind": "autoregressive"}}
    exact = [ppl("MDLM", 15.0, model="runs/repro/judge", config=own, step=s) for s in (1000, 2000)]
    time = of("MDLM", "train_seconds", 99.0, model="runs/repro/judge", config=own)
    page = page_of([*whole(), *exact, time])
    assert "15.00 ± 0.10 for the autoregressive judge, exact and no bound." in page
    assert "| judge | AR | 8 × 384 | 2,000 |" in page and page.count("15.00 ± 0.10") == 1
    assert verdicts(page) == verdicts(page_of(whole()))


def test_gaps_over_training() -> None:
    cells = {
        "MDLM": {100: Estimate(100, 1), 200: Estimate(50, 0.5), 300: Estimate(40, 0.4)},
        "XDLM k=0.1": {100: Estimate(150, 1.5), 200: Estimate(60, 0.6), 400: Estimate(1, 1)},
    }
    found = gaps(cells)
    assert list(found) == [100, 200]
    assert found[100][:2] == pytest.approx((math.log(1.5), 0.01 * math.sqrt(2)))
    assert shrinks("x", "y", found).outcome == Outcome.HOLDS
    assert (
        shrinks("x", "y", dict(zip((1, 2), reversed(found.values()), strict=True))).outcome
        == Outcome.FAILS
    )
    assert shrinks("x", "y", {100: found[100]}).outcome == Outcome.UNKNOWN


def test_a_line_breaks_where_a_checkpoint_was_left_out() -> None:
    point = {x: Point(x, 10.0 - x, 0.1) for x in (1.0, 2.0, 3.0, 4.0)}
    drawn = interrupted(
        {"all": list(point.values()), "ends": [point[1], point[4]], "last": [point[4]]}
    )
    assert drawn["all"] == list(point.values()) and drawn["last"] == [point[4]]
    assert [math.isnan(one.y) for one in drawn["ends"]] == [False, True, True, False]


def test_where_lines_cross() -> None:
    """Straight on logarithmic axes: 4 to 1 against 2 to 2 over 8 to 32 steps meet halfway."""
    assert crossing({8: 4.0, 32: 1.0}, {8: 2.0, 32: 2.0}) == pytest.approx([16])
    assert crossing({8: 4.0, 32: 3.0}, {8: 2.0, 32: 2.0}) == []


def test_who_is_surely_ahead() -> None:
    cells = {
        "MDLM": {8: Estimate(20, 1), 16: Estimate(12, 1), 32: Estimate(9, 1), 64: Estimate(5, 1)},
        "XDLM k=0.1": {8: Estimate(10, 1), 16: Estimate(10, 1), 32: Estimate(10, 1), 128: Estimate(9, 1)},
    }  # fmt: skip
    assert ahead(cells) == "XDLM k=0.1 at 8 and MDLM at none"
    swapped = {"MDLM": cells["XDLM k=0.1"], "XDLM k=0.1": cells["MDLM"]}
    assert ahead(swapped) == "XDLM k=0.1 at none and MDLM at 8"


def test_the_demo_says_what_may_be_chance() -> None:
    levels = {"pocket-mdlm": (90.0, 50.0), "pocket-xdlm": (60.0, 52.0), "pocket-udlm": (80.0, 70.0)}
    records = [
        of("MDLM", "gen_ppl", value, model=model, steps=steps, stderr=2.0)
        for model, values in levels.items() for steps, value in zip((4, 32), values, strict=True)
    ]  # fmt: skip
    assert who_writes_best(records, (4, 8, 32)) == (
        "XDLM, k = 0.1 writes best in 4 steps; MDLM writes best in 32 steps here, by less than such few "
        "texts can tell."
    )


def test_quality_beside_masked_noise() -> None:
    """Relative errors of 3 and 4 % make one of 5 %; what is beyond all numbers is not drawn, nor what
    masked noise has nothing beside."""
    lines = against_masked({
        "MDLM": {8: Estimate(100, 3), 32: Estimate(50, 1)},
        "UDLM": {8: Estimate(80, 3.2), 32: Estimate(math.inf, math.nan), 64: Estimate(1, 1)},
    })  # fmt: skip
    assert lines["MDLM"] == [(8, 1, 0), (32, 1, 0)], "nothing to compare with itself"
    assert lines["UDLM"] == [pytest.approx((8, 0.8, 0.8 * 0.05))]


def test_an_order_of_one_method_is_none() -> None:
    found = {"MDLM": Estimate(2.0, 0.1), "GIDD": Estimate(1.0, 0.1)}
    said = ranked(found, {"MDLM": 1.0, "GIDD": 2.0})
    assert "τ -1.00)" in said and "nan" not in said


def test_the_distance_from_the_line() -> None:
    places = {
        "MDLM": (Estimate(50, 0), Estimate(150, 3)), "UDLM": (Estimate(60, 0), Estimate(90, 4)),
        "XDLM k=0.1": (Estimate(55, 1), Estimate(100, 0)),
    }  # fmt: skip
    away = distance(places)
    # Halfway the line is at 120; errors are half of 3 and of 4, and the slope of -6 times 1.
    assert away[:2] == pytest.approx((20, math.hypot(1.5, 2, 6)))
    assert bowed(places).outcome == Outcome.HOLDS
    above = {**places, "XDLM k=0.1": (Estimate(55, 0), Estimate(140, 0))}
    assert bowed(above).outcome == Outcome.FAILS
    outside = {**places, "XDLM k=0.1": (Estimate(70, 0), Estimate(80, 0))}
    assert "not between" in bowed(outside).words
    assert bowed({}).outcome == Outcome.UNKNOWN


def test_judges_that_disagree() -> None:
    def cells(*values: float) -> dict[str, dict[int, Estimate]]:
        return {name: {8: Estimate(v, 1)} for name, v in zip("abc", values, strict=True)}

    (same,) = compare(cells(10, 20, 30), cells(1, 20, 21))
    assert (same.tau, same.pairs, same.sure, same.opposed) == (1, 3, 2, [])
    (other,) = compare(cells(10, 20, 30), cells(30, 20, 10))
    assert other.tau == -1 and len(other.opposed) == 3
    assert _verdict("x", [same]).outcome == Outcome.HOLDS
    assert _verdict("x", [same, other]).outcome == Outcome.FAILS
    close = replace(same, pairs=40)
    assert _verdict("x", [close]).outcome == Outcome.NOISE, "2 of 40 say nothing of the others"
    assert agreement([1, 2, 3], [1, 3, 2]) == pytest.approx(1 / 3)


def test_counts_of_changes() -> None:
    counts = counts_of(changes("XDLM k=0.1"))
    assert counts.total("unmask")[:2] == pytest.approx((8 * 33, math.sqrt(8 * 33 / 64)))
    assert counts.per_step["remask"][0] == 3 and counts.per_step["remask"][32] == 0
    assert counts_of(changes("UDLM")).total("unmask")[:2] == (0, 0)
    assert counts_of(changes("MDLM")).total("unmask")[:2] == (8 * 33, 0), "as long as every text is"
    assert counts_of(changes("MDLM")).total("unmask", slice(8)).stderr > 0
    # 66 refined tokens a text, known to ± 3.0466: three times √(66/64), so all counts scatter like that.
    wide = counts_of(replace(changes("XDLM k=0.1"), stderr=3 * math.sqrt(66 / 64)))
    assert wide.total("unmask").stderr == pytest.approx(3 * math.sqrt(8 * 33 / 64))


def test_figures_of_the_paper() -> None:
    """Read off the paper by eye."""
    assert paper.VALIDATION.column("PPL")["XDLM k=0.001"] == 23.495
    assert paper.ZERO_SHOT.value("XDLM k=0.5", "pubmed:test") == 43.373
    assert paper.ZERO_SHOT.value("UDLM", "zero-shot") == 59.574
    assert paper.TRAJECTORY.value("remask", 24) == 1 and paper.TRAJECTORY.value("unmask", 8) == 30
    assert paper.OWT_QUALITY.value("UDLM", 1024) == 106.666
    assert paper.OWT_ENTROPY.value("MDLM", 8) == 5.872
    assert paper.LM1B_QUALITY.value("XDLM k=0.1", 4) == 246.134
    assert paper.LM1B_QUALITY.value("XDLM k=0.9", 4) is None
    assert paper.LM1B_ENTROPY.value("UDLM", 128) == 4.336
    assert paper.LM1B_COURSE.value("GIDD", "500,000") == 102.367
    assert paper.ZERO_SHOT_COURSE.value("XDLM k=0.1", "100,000") == 64.847
    assert paper.ADAPTATION.value("continued as XDLM k=0.1", "MBPP") == 15.0
    sets = [c for c in paper.ZERO_SHOT.columns if c != "zero-shot"]
    assert sorted(sets) == sorted(ZERO_SHOT)
    for method in paper.METHODS:
        mean = sum(paper.ZERO_SHOT.value(method, s) or 0 for s in sets) / len(sets)
        assert mean == pytest.approx(paper.ZERO_SHOT.value(method, "zero-shot"), abs=1e-3)
