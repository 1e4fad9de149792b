"""Trade-offs, sweeps and courses of training, and their figures."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from results import RATIOS, course, gen, of_ratio, ppl, real, three_models

from xdlm import UserError
from xdlm.report.dynamics import courses, crossover_table, leads, plot_dynamics
from xdlm.report.figures import plot_generation
from xdlm.report.sweep import both_ends, plot_sweep, sweep
from xdlm.report.trade_off import Spot, TradeOff, draw_trade_off, plot_trade_off, trade_off


def test_frontier() -> None:
    records = [
        ppl("masked", "a", 20.0), *gen("masked", "a", 8, 90.0),
        ppl("mixed", "b", 21.0), *gen("mixed", "b", 8, 60.0),
        ppl("uniform", "c", 30.0), *gen("uniform", "c", 8, 70.0),
        ppl("gidd", "d", 25.0),
    ]  # fmt: skip
    found = trade_off(records, data="ptb:test", steps=8)
    assert [(spot.name, spot.best) for spot in found.spots] == [
        ("MDLM", True), ("XDLM k=0.1", True), ("UDLM", False),
    ]  # fmt: skip
    assert found.spots[0][1:] == (20.0, 90.0, True, 0.1, 0.1) and found.judge == "j"
    assert [(spot.x, spot.y) for spot in found.entropies] == [(20.0, 3.0), (21.0, 3.0), (30.0, 3.0)]
    assert found.left_out == ["trade-off: GIDD has no finite perplexity of texts of 8 steps"]
    with pytest.raises(UserError, match="no model has both"):
        trade_off(records, data="ptb:test", steps=16)
    with pytest.raises(UserError, match="two different results"):
        trade_off([*records, ppl("masked", "a", 20.1)], data="ptb:test", steps=8)


def test_an_infinite_model_is_left_out_of_the_trade_off_and_said() -> None:
    records = [*of_ratio(0.0, "a"), *of_ratio(0.1, "b"), *of_ratio(1.0, "c", step=9)]
    records = [
        replace(r, value=None) if r.model == "b" and r.metric == "ppl" else r for r in records
    ]
    found = trade_off(records, data="ptb:test", steps=8)
    assert [spot.name for spot in found.spots] == ["MDLM (step 5)", "UDLM (step 9)"]
    assert found.left_out == ["trade-off: XDLM k=0.1 (step 5) has no finite perplexity of ptb:test"]


def test_who_leads_when() -> None:
    """Lines that are straight in the logarithm cross where their logarithms do."""
    found = courses([*course("a", 8, 8, 8), *course("b", 16, 4, 8, kind="mixed")])
    assert [c.quantity for c in found] == ["perplexity of ptb:test"]
    first, second = leads(found[0].lines)
    assert (first.name, first.start, first.sure) == ("MDLM", 100, True)
    assert first.stop == second.start == pytest.approx(150)
    assert (second.name, second.stop, second.sure) == ("XDLM k=0.1", 300, True)
    table = crossover_table(found)
    assert table is not None and [row[3] for row in table.rows] == ["MDLM", "XDLM k=0.1"]


def test_a_lead_within_the_error_is_not_sure() -> None:
    found = courses([*course("a", 8, 8, stderr=1.0), *course("b", 9, 9, kind="mixed", stderr=1.0)])
    assert [(lead.name, lead.sure) for lead in leads(found[0].lines)] == [("MDLM", False)]
    alone = courses(course("a", 8, 8))
    assert leads(alone[0].lines) == [] and crossover_table(alone) is None


def test_who_leads_where_lines_do_not_reach() -> None:
    """Only where two models were measured is anyone ahead of anyone."""
    short = course("b", 9, 9, kind="mixed")[1:]
    longer = course("c", 10, 10, 10, 10, kind="uniform")
    assert leads(courses([*course("a", 8, 8), *short, *longer])[0].lines)[0].name == "MDLM"
    assert leads(courses([*course("a", 8, 8), *short, *longer])[0].lines)[-1].stop == 200


def test_sweep_over_the_mixing_ratio() -> None:
    records = [r for k, model in RATIOS.items() for r in of_ratio(k, model)]
    panels = sweep([*records, ppl("gidd", "g", 3.0)])
    assert list(panels) == ["perplexity of text", "generative perplexity (j)", "entropy, nats"]
    assert [(p.x, p.y) for p in panels["perplexity of text"]["ptb:test"]] == [
        (k, 20 + k) for k in RATIOS
    ]
    assert [p.x for p in panels["generative perplexity (j)"]["8 steps"]] == list(RATIOS)
    assert sweep(records[:6]) == {}, "two ratios are no sweep"
    with pytest.raises(UserError, match=r"two models of k = 0\.1, c and z"):
        sweep([*records, *of_ratio(0.1, "z")])
    with pytest.raises(UserError, match="records differ in step"):
        sweep([*records[:-3], *of_ratio(1.0, "e", step=9)])


def test_the_axis_of_ratios_goes_there_and_back() -> None:
    there, back = both_ends(list(RATIOS))
    k = np.array([-0.001, 0, 1e-4, 0.3, 0.99, 1, 1.01])
    np.testing.assert_allclose(back(there(k)), k, atol=1e-12)
    places = there(np.array(list(RATIOS)))
    assert np.diff(places).min() > 0.08 * (places[-1] - places[0]), "room for each label"


def test_names_of_points_do_not_overlap(tmp_path: Path) -> None:
    """Models that are all but equal, as figures find them."""
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    spots = [Spot(f"XDLM k=0.{i}", 50 + 0.01 * i, 60 - 0.01 * i, True) for i in range(5)]
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    whole = [*spots, Spot("UDLM", 90, 20, True)]
    draw_trade_off(axes, TradeOff("ptb:test", 8, "j", whole, [], None, []))
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 6
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_the_trade_off_has_bars_of_error() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    spot = Spot("MDLM", 20, 50, True, x_error=1, y_error=5)
    draw_trade_off(axes, TradeOff("ptb:test", 8, "j", [spot], [], None, []))
    across, up = (bar.get_segments()[0] for bar in axes.containers[0].lines[2])
    assert across[:, 0].tolist() == [19, 21] and up[:, 1].tolist() == [45, 55]


def drawn(file: Path) -> str:
    """The words of a figure as SVG writes them: as comments beside their outlines."""
    return file.read_text(encoding="utf-8")


def test_figures_name_the_judge_and_real_text(tmp_path: Path) -> None:
    beaten = [ppl("gidd", "g", 40.0), *gen("gidd", "g", 8, 40.0)]
    records = [*three_models(), *beaten, real("real_ppl", 12.0), real("real_entropy", 3.5)]
    plot_generation(records, tmp_path / "generation.svg")
    plot_trade_off(trade_off(records, data="ptb:test", steps=8), tmp_path / "trade-off.svg")
    plot_dynamics(courses(records), tmp_path / "dynamics.svg")
    plot_sweep(sweep(records), tmp_path / "k-sweep.svg")
    for name, panels in {"generation": 2, "trade-off": 1, "dynamics": 2, "k-sweep": 0}.items():
        words = drawn(tmp_path / f"{name}.svg")
        assert "(j)" in words and words.count("<!-- real text -->") == panels, name
    words = drawn(tmp_path / "trade-off.svg")
    assert "no model beats these in both" in words and "beaten in both" in words


def test_a_lead_that_may_be_chance_is_hatched(tmp_path: Path) -> None:
    for stderr, hatched in ((0.1, False), (3.0, True)):
        own = {"stderr": stderr}
        found = courses([*course("a", 8, 8, **own), *course("b", 9, 9, kind="mixed", **own)])
        plot_dynamics(found, tmp_path / "d.svg")
        assert ("<pattern" in drawn(tmp_path / "d.svg")) == hatched


@pytest.mark.filterwarnings("error")
def test_figures_of_nothing_but_infinities(tmp_path: Path) -> None:
    records = [replace(r, value=None) for r in three_models()]
    plot_generation(records, tmp_path / "generation.png")
    plot_dynamics(courses(records), tmp_path / "dynamics.png")
    assert sweep(records) == {} and len(list(tmp_path.iterdir())) == 2
