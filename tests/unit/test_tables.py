"""Tables and figures from records, and what they refuse."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from test_generation import record

from xdlm import UserError
from xdlm.cli.main import main
from xdlm.evaluation.records import EvalRecord, append_records
from xdlm.report.dynamics import courses, crossover_table, leads
from xdlm.report.figures import Spot, draw_trade_off, trade_off
from xdlm.report.sweep import both_ends, sweep
from xdlm.report.tables import generation_table, method_of, perplexity_table


def of(kind: str, model: str, k: float | None = None, **changes: object) -> EvalRecord:
    return record(model=model, config={"process": {"kind": kind, "k": k}}, **changes)


def ppl(
    kind: str, model: str, value: float, data: str = "ptb:test", **changes: object
) -> EvalRecord:
    settings = {"data_sha256": data, "length": 128, **changes}
    return of(kind, model, value=value, data=data, **settings)


def gen(kind: str, model: str, steps: int, value: float, **changes: object) -> list[EvalRecord]:
    settings = {
        "steps": steps,
        "sampler": "thinned",
        "temperature": 1.0,
        "top_p": 1.0,
        "length": 128,
    }
    settings |= changes
    judged = {"judge": "j", "judge_sha256": "1", **settings}
    return [
        of(kind, model, metric="gen_ppl", value=value, **judged),
        of(kind, model, metric="entropy", value=3.0, **settings),
    ]


def test_names_of_methods() -> None:
    assert [method_of(of(kind, "m")) for kind in ("masked", "uniform", "gidd")] == [
        "MDLM", "UDLM", "GIDD",
    ]  # fmt: skip
    assert method_of(of("mixed", "m", 0.5)) == "XDLM k=0.5"
    assert method_of(of("mixed", "m")) == "XDLM k=0.1"


def test_perplexity_table() -> None:
    table = perplexity_table([
        ppl("masked", "a", 20.0), ppl("mixed", "b", 21.0), ppl("masked", "a", 30.0, "lm1b:test"),
    ])  # fmt: skip
    assert table is not None
    assert table.columns == ["model", "ptb:test", "lm1b:test"]
    assert table.rows == [
        ["MDLM", "20.00 ± 0.10", "30.00 ± 0.10"],
        ["XDLM k=0.1", "21.00 ± 0.10", ""],
    ]
    assert "| MDLM | 20.00 ± 0.10 | 30.00 ± 0.10 |" in table.markdown()
    assert table.csv().splitlines()[0] == "model,ptb:test,lm1b:test"
    assert perplexity_table(gen("masked", "a", 8, 5.0)) is None


def test_models_of_one_method_are_told_apart() -> None:
    table = perplexity_table([ppl("masked", "a", 20.0), ppl("masked", "b", 21.0, step=9)])
    assert table is not None
    assert [row[0] for row in table.rows] == ["MDLM (a, step 5)", "MDLM (b, step 9)"]


@pytest.mark.parametrize(("field", "value"), [
    ("data_sha256", "other"), ("dtype", "bfloat16"), ("weights", "raw"), ("length", 64),
    ("tokenizer_sha256", "other"), ("n", 9),
])  # fmt: skip
def test_unlike_perplexities_are_refused(field: str, value: object) -> None:
    with pytest.raises(UserError, match=f"records differ in {field}"):
        perplexity_table([ppl("masked", "a", 20.0), ppl("mixed", "b", 21.0, **{field: value})])


@pytest.mark.parametrize(("field", "value"), [
    ("judge", "other"), ("judge_sha256", "2"), ("temperature", 0.9), ("top_p", 0.5), ("dtype", "x"),
])  # fmt: skip
def test_unlike_texts_are_refused(field: str, value: object) -> None:
    other = gen("mixed", "b", 8, 5.0)
    changed = [EvalRecord(**{**vars(r), field: value}) if getattr(r, field) else r for r in other]
    with pytest.raises(UserError, match=f"records differ in {field}"):
        generation_table([*gen("masked", "a", 8, 5.0), *changed])


def test_two_results_for_one_cell_are_refused() -> None:
    with pytest.raises(UserError, match="two different results for MDLM, ptb:test"):
        perplexity_table([ppl("masked", "a", 20.0), ppl("masked", "a", 25.0)])


def test_frontier() -> None:
    records = [
        ppl("masked", "a", 20.0), *gen("masked", "a", 8, 90.0),
        ppl("mixed", "b", 21.0), *gen("mixed", "b", 8, 60.0),
        ppl("uniform", "c", 30.0), *gen("uniform", "c", 8, 70.0),
        ppl("gidd", "d", 25.0),
    ]  # fmt: skip
    points = trade_off(records, data="ptb:test", steps=8)
    assert [(name, best) for name, _, _, best in points] == [
        ("MDLM", True), ("XDLM k=0.1", True), ("UDLM", False),
    ]  # fmt: skip
    with pytest.raises(UserError, match="no model has both"):
        trade_off(records, data="ptb:test", steps=16)


def test_the_mean_of_mauve_and_real_text_stand_beside() -> None:
    """MAUVE has a column where it was measured, and the judge's view of real text is in the title."""
    real = of("masked", "a", metric="real_ppl", value=12.0, data="d", data_sha256="d", judge="j",
              judge_sha256="1")  # fmt: skip
    score = of("masked", "a", metric="mauve", value=0.5, steps=8, sampler="thinned", temperature=1.0,
               top_p=1.0, length=128, judge="j", judge_sha256="1", stderr=None)  # fmt: skip
    table = generation_table([*gen("masked", "a", 8, 90.0), score, real])
    assert table is not None
    assert table.columns == ["model", "perplexity, 8 steps", "entropy, 8 steps", "MAUVE, 8 steps"]
    assert table.rows == [["MDLM", "90.00 ± 0.10", "3.000 ± 0.100", "0.500"]]
    assert table.title.endswith("real text (d): 12.00 ± 0.10")


def test_tables_show_the_last_checkpoint() -> None:
    table = perplexity_table([ppl("masked", "a", 30.0, step=5), ppl("masked", "a", 20.0, step=9)])
    assert table is not None and table.rows == [["MDLM", "20.00 ± 0.10"]]


def course(model: str, *values: float, kind: str = "masked", **changes: object) -> list[EvalRecord]:
    steps = range(100, 100 * len(values) + 1, 100)
    return [
        ppl(kind, model, value, step=step, **changes)
        for step, value in zip(steps, values, strict=True)
    ]


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


@pytest.mark.parametrize(("field", "value"), [
    ("data_sha256", "other"), ("dtype", "bfloat16"), ("n", 9), ("weights", "raw"),
])  # fmt: skip
def test_unlike_checkpoints_are_refused(field: str, value: object) -> None:
    """They may differ in their step, and in nothing else that matters."""
    assert courses([*course("a", 8, 8), *course("b", 9, 9)])
    other = course("b", 9, 9, kind="mixed", **{field: value})
    with pytest.raises(UserError, match=f"records differ in {field}"):
        courses([*course("a", 8, 8), *other])
    with pytest.raises(UserError, match=f"records differ in {field}"):
        courses([*course("a", 8, 8)[:1], *course("a", 8, 8, **{field: value})[1:]])


def of_ratio(k: float, model: str, **changes: object) -> list[EvalRecord]:
    kind = {0: "masked", 1: "uniform"}.get(k, "mixed")
    about = {"k": k if kind == "mixed" else None, **changes}
    return [ppl(kind, model, 20 + k, **about), *gen(kind, model, 8, 9 - k, **about)]


RATIOS = {0.0: "a", 0.001: "b", 0.1: "c", 0.9: "d", 1.0: "e"}


def test_sweep_over_the_mixing_ratio() -> None:
    records = [r for k, model in RATIOS.items() for r in of_ratio(k, model)]
    panels = sweep([*records, ppl("gidd", "g", 3.0)])
    assert list(panels) == ["perplexity of text", "generative perplexity", "entropy, nats"]
    assert [(p.x, p.y) for p in panels["perplexity of text"]["ptb:test"]] == [
        (k, 20 + k) for k in RATIOS
    ]
    assert [p.x for p in panels["generative perplexity"]["8 steps"]] == list(RATIOS)
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
    draw_trade_off(axes, [*spots, Spot("UDLM", 90, 20, True)], "ptb:test", 8)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 6
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_command_draws_sweeps_or_says_why_not(tmp_path: Path, capsys) -> None:
    file = tmp_path / "r.jsonl"
    append_records(file, [r for k, model in RATIOS.items() for r in of_ratio(k, model)])
    main(["report", "--records", str(file), "--out", str(tmp_path / "one")])
    assert (tmp_path / "one" / "k-sweep.png").is_file() and (
        tmp_path / "one" / "k-sweep.svg"
    ).is_file()
    append_records(file, of_ratio(0.5, "f", step=77))
    capsys.readouterr()
    main(["report", "--records", str(file), "--out", str(tmp_path / "two")])
    assert "k-sweep not drawn: k sweep: records differ in step" in capsys.readouterr().err
    assert not (tmp_path / "two" / "k-sweep.png").exists()


def test_command(tmp_path: Path, capsys) -> None:
    file, out = tmp_path / "r.jsonl", tmp_path / "report"
    append_records(file, [ppl("masked", "a", 20.0), *gen("masked", "a", 8, 90.0),
                          *gen("masked", "a", 32, 50.0), ppl("mixed", "b", 21.0),
                          *gen("mixed", "b", 8, 60.0), *gen("mixed", "b", 32, 55.0)])  # fmt: skip
    command = ["report", "--records", str(file), "--out", str(out), "--trade-off", "ptb:test"]
    main(command)
    assert "| XDLM k=0.1 | 21.00 ± 0.10 |" in capsys.readouterr().out
    names = {f.name for f in out.iterdir()}
    assert names == {
        "report.md", "perplexity.csv", "generation.csv", "generation.png", "generation.svg",
        "trade-off.png", "trade-off.svg",
    }  # fmt: skip
    before = {f.name: f.read_bytes() for f in out.iterdir()}
    main(command)
    assert {f.name: f.read_bytes() for f in out.iterdir()} == before
    append_records(file, [ppl("uniform", "c", 20.0, data_sha256="other")])
    with pytest.raises(SystemExit):
        main(["report", "--records", str(file), "--out", str(tmp_path / "new")])
    assert "records differ in data_sha256" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
