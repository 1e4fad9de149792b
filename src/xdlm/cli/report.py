"""`xdlm report`: tables and figures from records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from xdlm.cli.options import parse
from xdlm.cli.progress import console
from xdlm.errors import UserError
from xdlm.evaluation.records import EvalRecord, read_records
from xdlm.files import check_writable, write_atomic
from xdlm.report.benchmarks import benchmark_table
from xdlm.report.dynamics import courses, crossover_table, dynamics_table, plot_dynamics
from xdlm.report.figures import plot_generation
from xdlm.report.study import write_study
from xdlm.report.sweep import plot_sweep, sweep
from xdlm.report.tables import generation_table, image_table, perplexity_table, unshown
from xdlm.report.trade_off import plot_trade_off, trade_off

_DESCRIPTION = """Tables (Markdown and CSV) and figures (PNG and SVG) from the records that `xdlm eval`
wrote: perplexity by text; generated text by number of steps; images; benchmarks; what training did, and
who leads when, where there are results of several checkpoints of a model (the tables of text show each
model's last);
quality by mixing ratio, where there are three ratios or more. Results that do not compare (other data,
judge, precision or settings) are refused, and the difference is named; what is not shown is said.

With --results instead, one page about a whole study of the paper's methods: each of the paper's findings
beside the paper's own figures, with a verdict that is computed from the records. Its figures go into
the folder of the records, and the same records give the same bytes.

examples:
  xdlm report --records results.jsonl --out report/
  xdlm report --records mdlm.jsonl xdlm.jsonl --out report/ --trade-off zero-shot --steps 32
  xdlm report --records dynamics.jsonl --out report/
  xdlm report --results results/repro --out RESULTS.md
"""

Plot = Callable[[Path], None]


@dataclass(frozen=True)
class Options:
    out: str
    """Folder to write to; with --results, the page to write (RESULTS.md)."""
    records: tuple[str, ...] = ()
    """Files of records."""
    results: str | None = None
    """A folder of records of a study (*.jsonl, also packed by xz), to write a page about; figures go to its
    folder figures."""
    trade_off: str | None = None
    """Draw likelihood of this text against quality of generated text; zero-shot is the mean of seven."""
    steps: int = 32
    """The number of sampling steps in that figure."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm report", description=_DESCRIPTION)
    if options.results is not None:
        _study(options, options.results)
        return
    records = [record for file in options.records for record in read_records(Path(file))]
    if not records:
        raise UserError("no records; give files that `xdlm eval --records` wrote")
    # All is compared before anything is written, so that what does not compare leaves nothing.
    course = courses(records)
    made = {
        "perplexity": perplexity_table(records),
        "generation": generation_table(records),
        "images": image_table(records),
        "benchmarks": benchmark_table(records),
        "dynamics": dynamics_table(course) if course else None,
        "crossovers": crossover_table(course),
    }
    tables = {name: table for name, table in made.items() if table is not None}
    remarks = unshown(records, tables.values())
    if not tables:
        raise UserError(f"there is nothing to report ({'; '.join(remarks)})")
    figures = _figures(records, options, remarks)
    if course:
        figures["dynamics"] = partial(plot_dynamics, course)
    out = Path(options.out)
    check_writable(out)
    for name, plot in figures.items():
        for kind in ("png", "svg"):
            plot(out / f"{name}.{kind}")
    pages = [table.markdown() for table in tables.values()]
    pictures = "".join(f"![{name}]({name}.png)\n" for name in figures)
    notes = "".join(f"\n{remark}\n" for remark in remarks)
    write_atomic(out / "report.md", "# Results\n\n" + "\n".join(pages) + "\n" + pictures + notes)
    for name, table in tables.items():
        write_atomic(out / f"{name}.csv", table.csv())
    for table in tables.values():
        print(table.markdown())
    for remark in remarks:
        console().print(remark, soft_wrap=True)
    console().print(f"-> {out / 'report.md'}")


def _study(options: Options, results: str) -> None:
    if options.records or options.trade_off is not None:
        raise UserError(
            "--results reads all records of a folder; leave out --records and --trade-off"
        )
    if Path(options.out).is_dir():
        raise UserError(f"{options.out} is a folder; --results writes a page, as --out RESULTS.md")
    write_study(Path(results), Path(options.out))
    console().print(f"-> {options.out}")


def _figures(records: list[EvalRecord], options: Options, remarks: list[str]) -> dict[str, Plot]:
    """What there is to draw, by name; why something is not drawn is added to the remarks."""
    figures: dict[str, Plot] = {}
    if any(record.metric in ("gen_ppl", "entropy") for record in records):
        figures["generation"] = partial(plot_generation, records)
    if options.trade_off is not None:
        found = trade_off(records, data=options.trade_off, steps=options.steps)
        figures["trade-off"] = partial(plot_trade_off, found)
        remarks += found.left_out
    try:
        panels = sweep(records)
    except UserError as reason:  # the tables may stand without it
        remarks.append(f"k-sweep not drawn: {reason}")
    else:
        if panels:
            figures["k-sweep"] = partial(plot_sweep, panels)
    return figures
