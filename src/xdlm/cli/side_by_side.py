"""The bundled models side by side: what each kind of noise is good at, in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from xdlm.api import Model, load
from xdlm.cli.measures.common import with_error
from xdlm.cli.progress import progress
from xdlm.data import EMBEDDED, Rows, read_documents
from xdlm.evaluation.judges import Judge, open_judge
from xdlm.evaluation.perplexity import measure_perplexity, plan_perplexity
from xdlm.evaluation.real import RealText
from xdlm.evaluation.records import EvalRecord
from xdlm.evaluation.writing import measure_writing, plan_writing
from xdlm.report.study.verdict import SURE, difference, estimate

#: The same model and text under three kinds of noise.
COMPARED = {"pocket-mdlm": "MDLM", "pocket-xdlm": "XDLM, k = 0.1", "pocket-udlm": "UDLM"}
JUDGE = "pocket-judge"


def compare(
    screen: Console, *, steps: Sequence[int], n: int, rows: int, seed: int
) -> list[EvalRecord]:
    """Measure and show the perplexity of held-out text, and what the judge says of generated texts."""
    models = {name: load(name) for name in COMPARED}
    first, *_ = models.values()
    text = first.pack(read_documents(EMBEDDED[1]))
    judge = open_judge(JUDGE, first.tokenizer, first.denoiser.device)
    real = RealText(first, EMBEDDED[1], text, n=n, seed=seed)
    records = [record for kind in real.judged(JUDGE, judge).values() for record in kind]
    written = [f"in {number} steps" for number in steps]
    table = Table("", "perplexity of\nheld-out text", *written)
    for name, model in models.items():
        found = _measured(name, model, text, judge, steps=steps, n=n, rows=rows, seed=seed)
        shown = [r for r in found if r.metric in ("ppl", "gen_ppl")]
        table.add_row(COMPARED[name], *(with_error(r.value, r.stderr, 1) for r in shown))
        records += found
    table.add_row(
        "real text", "", *[with_error(records[0].value, records[0].stderr, 1)] * len(steps)
    )
    screen.print(table)
    screen.print(
        f"On the right: perplexity of {n} generated texts under {JUDGE}, an autoregressive model of the "
        "same size and\ntraining. Lower is better everywhere; ± is one standard error."
    )
    screen.print(who_writes_best(records, steps))
    return records


def _measured(
    name: str,
    model: Model,
    text: Rows,
    judge: Judge,
    *,
    steps: Sequence[int],
    n: int,
    rows: int,
    seed: int,
) -> list[EvalRecord]:
    plan = plan_perplexity(model, name, EMBEDDED[1], text, draws=2, seed=seed, max_rows=rows)
    records = [measure_perplexity(model, plan, text, progress=progress)]
    for number in steps:
        plan = plan_writing(model, name, judge, n=n, steps=number, seed=seed)
        records += measure_writing(model, plan, judge, progress=progress)[1]
    return records


def who_writes_best(records: Sequence[EvalRecord], steps: Sequence[int]) -> str:
    """In words, at the fewest and at the most steps; a lead of less than two standard errors over the
    second may be chance."""
    said = []
    for number in dict.fromkeys((min(steps), max(steps))):
        judged = [r for r in records if r.metric == "gen_ppl" and r.steps == number]
        ranked = sorted((estimate(r) for r in judged), key=lambda e: e.value)
        best = min(judged, key=lambda r: float("inf") if r.value is None else r.value)
        lead = difference(ranked[1], ranked[0])
        sure = lead.value > SURE * lead.stderr
        about = "" if sure else " here, by less than such few texts can tell"
        said.append(f"{COMPARED[best.model]} writes best in {number} steps{about}")
    return "; ".join(said) + "."
