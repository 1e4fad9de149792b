"""A study of all methods as one page: every table of the paper that was measured again, beside the paper's.

`write_study` reads a folder of records and writes the page and its figures, the same bytes for the same
records. Verdicts are computed: a difference against its standard error.
"""

from __future__ import annotations

import os
from pathlib import Path

from xdlm.files import check_writable, write_atomic
from xdlm.report.study.adapted import adaptation
from xdlm.report.study.balance import balance
from xdlm.report.study.changes import transitions
from xdlm.report.study.collection import Study, read_study
from xdlm.report.study.course import dynamics
from xdlm.report.study.judges import judges
from xdlm.report.study.likelihood import validation, zero_shot
from xdlm.report.study.page import Section, summary
from xdlm.report.study.trained import trained
from xdlm.report.study.verdict import SURE
from xdlm.report.study.writing import generation

SECTIONS = (
    trained, validation, zero_shot, generation, judges, balance, dynamics, transitions, adaptation,
)  # fmt: skip


def write_study(results: Path, page: Path) -> Study:
    """`page` from the records of a folder; figures go into its folder `figures`."""
    study = read_study(results)
    sections = [section(study) for section in SECTIONS]
    figures = results / "figures"
    check_writable(figures)
    check_writable(page.absolute().parent)
    for section in sections:
        for name, plot in section.figures.items():
            plot(figures / f"{name}.png")
    write_atomic(page, _markdown(study, sections, _relative(results, page), page.name))
    return study


def _relative(results: Path, page: Path) -> str:
    """The folder as the page sees it, so that both may lie anywhere together."""
    return Path(os.path.relpath(results.resolve(), page.resolve().parent)).as_posix()


def _markdown(study: Study, sections: list[Section], results: str, name: str) -> str:
    findings = [finding for section in sections for finding in section.findings]
    head = f"""# Results

The paper's findings at a size that one GPU trains in minutes, at training step {study.step:,}. This page is
written by `xdlm report --results {results} --out {name}` from the records in [{results}]({results}),
verdicts included: a finding *holds* or *does not hold* where the difference is more than {SURE:g} of its
standard errors, and is *not separated by the noise* where it is less. Values are ± one standard error.
Scale, data and judges differ from the paper's: compare orders and gaps, not values.

{summary(findings)}
"""
    return "\n".join([head, *(section.markdown(f"{results}/figures") for section in sections)])


__all__ = ["Study", "read_study", "write_study"]
