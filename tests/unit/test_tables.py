"""Tables and figures from records, and what they refuse."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from results import RATIOS, course, gen, of, of_ratio, ppl, real, record, three_models
from test_cli import complaint

from xdlm import UserError
from xdlm.cli.main import main
from xdlm.config import ProcessConfig
from xdlm.evaluation.records import EvalRecord, append_records
from xdlm.noise import Mixed
from xdlm.report.comparison import method_name, method_of, ratio, real_text
from xdlm.report.dynamics import courses, dynamics_table, leads
from xdlm.report.figures import plot_generation
from xdlm.report.sweep import sweep
from xdlm.report.tables import generation_table, perplexity_table, unshown
from xdlm.report.trade_off import trade_off


def test_names_of_methods() -> None:
    assert [method_of(of(kind, "m")) for kind in ("masked", "uniform", "gidd")] == [
        "MDLM", "UDLM", "GIDD",
    ]  # fmt: skip
    assert method_of(of("mixed", "m", 0.5)) == "XDLM k=0.5"
    assert [ratio(of(kind, "m")) for kind in ("masked", "uniform", "gidd")] == [0, 1, None]
    assert method_of(record()) == "?" and ratio(record()) is None


def test_the_ratio_that_is_not_given_is_the_default_of_the_process(monkeypatch) -> None:
    assert method_of(of("mixed", "m")) == "XDLM k=0.1"
    monkeypatch.setitem(Mixed.__init__.__kwdefaults__, "k", 0.25)
    assert method_name(ProcessConfig("mixed")) == "XDLM k=0.25" and ratio(of("mixed", "m")) == 0.25


def test_perplexity_table() -> None:
    table = perplexity_table([
        ppl("masked", "a", 20.0), ppl("mixed", "b", 21.0), ppl("masked", "a", 30.0, "lm1b:test"),
    ])  # fmt: skip
    assert table is not None
    assert table.columns == ["model", "step", "ptb:test", "lm1b:test"]
    assert table.rows == [
        ["MDLM", "5", "20.00 ± 0.10", "30.00 ± 0.10"],
        ["XDLM k=0.1", "5", "21.00 ± 0.10", ""],
    ]
    assert "| MDLM | 5 | 20.00 ± 0.10 | 30.00 ± 0.10 |" in table.markdown()
    assert table.csv().splitlines()[0] == "model,step,ptb:test,lm1b:test"
    assert perplexity_table(gen("masked", "a", 8, 5.0)) is None


def test_models_of_one_method_are_told_apart() -> None:
    table = perplexity_table([ppl("masked", "a", 20.0), ppl("masked", "b", 21.0, step=9000)])
    assert table is not None
    assert [row[:2] for row in table.rows] == [["MDLM (a)", "5"], ["MDLM (b)", "9,000"]]


@pytest.mark.parametrize(("stderr", "shown"), [(0.0, "± 0.00"), (None, "± ?")])
def test_an_error_of_nothing_and_an_error_that_is_not_known(
    stderr: float | None, shown: str
) -> None:
    """In every table. A lead whose error is not known is not sure."""
    records = [*course("a", 8, 8, stderr=stderr), *course("b", 9, 9, kind="mixed", stderr=stderr)]
    found = courses(records)
    for table in (perplexity_table(records), dynamics_table(found)):
        assert table is not None and table.rows[0][-1] == f"8.00 {shown}"
        assert ("no error from one row and one draw" in table.markdown()) == (stderr is None)
    assert [lead.sure for lead in leads(found[0].lines)] == [stderr == 0.0]
    texts = generation_table(gen("masked", "a", 8, 9.0, stderr=stderr))
    assert texts is not None and texts.rows[0][3:] == [
        f"9.00 {shown}",
        f"3.000 {shown}".replace("0.00", "0.000"),
    ]


#: All that puts results of several models beside each other.
COMPARING: dict[str, Callable[[list[EvalRecord]], object]] = {
    "perplexity": perplexity_table,
    "generation": generation_table,
    "figure": lambda records: plot_generation(records, Path(os.devnull)),
    "trade-off": lambda records: trade_off(records, data="ptb:test", steps=8),
    "sweep": sweep,
    "courses": courses,
}
ALWAYS = ("dtype", "weights", "tokenizer_sha256", "length")
OTHER = {
    "data_sha256": "x", "dtype": "bfloat16", "weights": "raw", "length": 64, "tokenizer_sha256": "x",
    "n": 9, "sampler": "x", "temperature": 0.9, "top_p": 0.5, "judge": "x", "judge_sha256": "2",
}  # fmt: skip


@pytest.mark.parametrize("field", [*ALWAYS, "data_sha256", "n"])
@pytest.mark.parametrize("name", ["perplexity", "trade-off", "sweep", "courses"])
def test_unlike_perplexities_are_refused(name: str, field: str) -> None:
    whole = three_models()
    assert COMPARING[name](whole)
    one = next(r for r in whole if r.metric == "ppl" and r.step == 5)
    changed = [replace(r, **{field: OTHER[field]}) if r is one else r for r in whole]
    with pytest.raises(UserError, match=f"perplexity.*records differ in {field}"):
        COMPARING[name](changed)


@pytest.mark.parametrize(
    "field", [*ALWAYS, "n", "sampler", "temperature", "top_p", "judge", "judge_sha256"]
)
@pytest.mark.parametrize("name", ["generation", "figure", "trade-off", "sweep", "courses"])
def test_unlike_texts_are_refused(name: str, field: str) -> None:
    whole = three_models()
    one = next(r for r in whole if r.metric == "gen_ppl" and r.step == 5)
    changed = [replace(r, **{field: OTHER[field]}) if r is one else r for r in whole]
    with pytest.raises(UserError, match=f"generated text: records differ in {field}"):
        COMPARING[name](changed)


@pytest.mark.parametrize(("metric", "field"), [("ppl", "data"), ("gen_ppl", "steps")])
def test_what_has_no_place_is_refused(metric: str, field: str) -> None:
    records = [replace(r, **{field: None}) for r in of_ratio(0.0, "a") if r.metric == metric]
    with pytest.raises(UserError, match=f"a record of {metric} for a does not say its {field}"):
        (perplexity_table if metric == "ppl" else generation_table)(records)


def mauve(model: str, **changes: object) -> EvalRecord:
    """MAUVE of the texts that `gen` speaks of."""
    like = gen("masked", model, 8, 1.0)[0]
    about = {"metric": "mauve", "value": 0.5, "stderr": None, "data": "d", "data_sha256": "d"}
    return replace(like, **{**about, **changes})


def test_unlike_real_texts_are_refused() -> None:
    texts = gen("masked", "a", 8, 5.0)
    for changes in ({"data_sha256": "x"}, {"n": 9}, {"length": 64}, {"tokenizer_sha256": "x"}):
        other = real("real_ppl", 12.0, **changes)
        with pytest.raises(UserError, match=f"real text: records differ in {next(iter(changes))}"):
            generation_table([*texts, real("real_ppl", 12.0), other])
    for changes in ({"length": 64}, {"tokenizer_sha256": "x"}):
        with pytest.raises(UserError, match="real text: records differ in"):
            generation_table([*texts, real("real_entropy", 3.0, **changes)])
    with pytest.raises(UserError, match="MAUVE: records differ in data_sha256"):
        generation_table([*texts, mauve("a"), mauve("b", data_sha256="x")])


def test_real_text_under_another_judge_does_not_stand_beside() -> None:
    texts, other = gen("masked", "a", 8, 5.0), real("real_ppl", 12.0, judge_sha256="2")
    assert real_text([*texts, other]) == {}
    assert real_text([*texts, real("real_ppl", 13.0)])["gen_ppl"].value == 13
    table = generation_table([*texts, other])
    assert table is not None and len(table.rows) == 1
    assert unshown([*texts, other], [table]) == [
        "not shown, no texts were generated and judged alike: real_ppl of a"
    ]


def test_two_results_for_one_cell_are_refused() -> None:
    with pytest.raises(UserError, match="two different results for MDLM, ptb:test"):
        perplexity_table([ppl("masked", "a", 20.0), ppl("masked", "a", 25.0)])


def test_all_that_was_measured_stands_in_the_table() -> None:
    """Perplexity, entropy, shares of n-grams and MAUVE, and the same of real text where it is known."""
    texts = gen("masked", "a", 8, 90.0)
    share = replace(texts[1], metric="distinct_1", value=0.25, stderr=None)
    table = generation_table([
        *texts, share, mauve("a"), *gen("masked", "a", 4, 95.0), real("real_ppl", 12.0),
        real("real_distinct_1", 0.75, stderr=None), real("real_shuffled_entropy", 3.5),
    ])  # fmt: skip
    assert table is not None and table.title == "Generated text, judge: j"
    assert table.columns == [
        "model", "step", "sampling steps", "perplexity", "entropy", "distinct-1", "MAUVE",
    ]  # fmt: skip
    assert table.rows == [
        ["MDLM", "5", "4", "95.00 ± 0.10", "3.000 ± 0.100", "", ""],
        ["MDLM", "5", "8", "90.00 ± 0.10", "3.000 ± 0.100", "0.250", "0.500"],
        ["real text (d)", "", "", "12.00 ± 0.10", "", "0.750", ""],
        ["real text, shuffled (d)", "", "", "", "3.500 ± 0.100", "", ""],
    ]
    alone = generation_table([share])
    assert alone is not None and alone.rows == [["MDLM", "5", "8", "0.250"]]


def test_tables_show_the_last_checkpoint() -> None:
    """One and the same for everything that is said of a model."""
    records = [
        ppl("masked", "a", 30.0, step=5), ppl("masked", "a", 20.0, step=9),
        *gen("masked", "a", 8, 5.0, step=5), *gen("mixed", "b", 8, 6.0, step=5),
    ]  # fmt: skip
    read, wrote = perplexity_table(records), generation_table(records)
    assert read is not None and read.rows == [["MDLM", "9", "20.00 ± 0.10"]]
    assert wrote is not None and [row[0] for row in wrote.rows] == ["XDLM k=0.1"]
    assert unshown(records, [read, wrote]) == [
        "not shown, measured before the model's last step: ppl, gen_ppl, entropy of a"
    ]
    assert unshown(records, [read, wrote, dynamics_table(courses(records))]) == []


def test_checkpoints_of_a_model_that_differ_in_more_than_the_step_are_refused() -> None:
    assert courses([*course("a", 8, 8), *course("b", 9, 9)])
    with pytest.raises(UserError, match="records differ in weights"):
        courses([*course("a", 8, 8)[:1], *course("a", 8, 8, weights="raw")[1:]])


def test_infinities_stand_in_tables_and_are_said_to_be_in_no_figure() -> None:
    records = [*course("a", 8, 8, 8), ppl("masked", "a", None, step=400)]
    found = courses(records)
    table = dynamics_table(found)
    assert table.rows[0][2:] == ["8.00 ± 0.10"] * 3 + ["inf"] and len(found[0].lines["MDLM"]) == 3
    assert unshown(records, [table]) == ["without a finite value, so in no figure: ppl of a"]


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
    assert "| XDLM k=0.1 | 5 | 21.00 ± 0.10 |" in capsys.readouterr().out
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


def test_command_says_what_it_leaves_out(tmp_path: Path, capsys) -> None:
    file, out = tmp_path / "r.jsonl", tmp_path / "report"
    append_records(file, [of("masked", "a", metric="blah"), real("real_ppl", 3.0)])
    line = complaint(capsys, "report", "--records", str(file), "--out", str(out))
    assert "nothing to report (not shown, there is no table for it: blah of a; not shown" in line
    assert not out.exists()
    append_records(file, [*of_ratio(0.0, "a"), *of_ratio(0.1, "b"), ppl("gidd", "g", 3.0)])
    main(
        [
            "report",
            "--records",
            str(file),
            "--out",
            str(out),
            "--trade-off",
            "ptb:test",
            "--steps",
            "8",
        ]
    )
    said, page = capsys.readouterr().err, (out / "report.md").read_text()
    for remark in (
        "not shown, there is no table for it: blah of a",
        "trade-off: GIDD has no finite perplexity of texts of 8 steps",
    ):
        assert f"{remark}\n" in said and f"{remark}\n" in page
