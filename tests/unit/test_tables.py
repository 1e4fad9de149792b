"""Tables and figures from records, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_generation import record

from xdlm import UserError
from xdlm.cli.main import main
from xdlm.evaluation.records import EvalRecord, append_records
from xdlm.report.figures import trade_off
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
