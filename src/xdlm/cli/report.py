"""`xdlm report`: tables and figures from records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from xdlm.cli.options import parse
from xdlm.cli.progress import console
from xdlm.errors import UserError
from xdlm.evaluation.records import EvalRecord, read_records
from xdlm.files import check_writable, write_atomic
from xdlm.report.figures import plot_generation, plot_trade_off, trade_off
from xdlm.report.tables import generation_table, perplexity_table

_DESCRIPTION = """Tables (Markdown and CSV) and figures (PNG and SVG) from the records that `xdlm eval`
wrote. Results that do not compare (other data, judge, precision or settings) are refused, and the
difference is named.

examples:
  xdlm report --records results.jsonl --out report/
  xdlm report --records mdlm.jsonl xdlm.jsonl --out report/ --trade-off corpus:heldout --steps 32
"""


@dataclass(frozen=True)
class Options:
    records: tuple[str, ...]
    """Files of records."""
    out: str
    """Folder to write to."""
    trade_off: str | None = None
    """Draw likelihood of this text against quality of generated text."""
    steps: int = 32
    """The number of sampling steps in that figure."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm report", description=_DESCRIPTION)
    records = [record for file in options.records for record in read_records(Path(file))]
    if not records:
        raise UserError("there are no records; give files that `xdlm eval --records` wrote")
    # All is compared before anything is written, so that what does not compare leaves nothing.
    made = {"perplexity": perplexity_table(records), "generation": generation_table(records)}
    tables = {name: table for name, table in made.items() if table is not None}
    if options.trade_off is not None:
        trade_off(records, data=options.trade_off, steps=options.steps)
    out = Path(options.out)
    check_writable(out)
    figures = _figures(records, options, out)
    pages = [table.markdown() for table in tables.values()]
    pictures = "".join(f"![{name}]({name}.png)\n" for name in figures)
    write_atomic(out / "report.md", "# Results\n\n" + "\n".join(pages) + "\n" + pictures)
    for name, table in tables.items():
        write_atomic(out / f"{name}.csv", table.csv())
    for table in tables.values():
        print(table.markdown())
    console().print(f"-> {out / 'report.md'}", markup=False)


def _figures(records: list[EvalRecord], options: Options, out: Path) -> list[str]:
    """Draw what there is to draw; the names of the figures."""
    names = []
    if any(record.metric == "gen_ppl" for record in records):
        names.append("generation")
        for kind in ("png", "svg"):
            plot_generation(records, out / f"generation.{kind}")
    if options.trade_off is not None:
        names.append("trade-off")
        for kind in ("png", "svg"):
            plot_trade_off(
                records, out / f"trade-off.{kind}", data=options.trade_off, steps=options.steps
            )
    return names
