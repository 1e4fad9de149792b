"""A study of all methods as one page: every table of the paper that was measured again, beside the paper's.

`write_study` reads a folder of records and writes the page and its figures, the same bytes for the same
records. Verdicts are computed: a difference against its standard error.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from xdlm.files import check_writable, write_atomic
from xdlm.report.study.adapted import adaptation, adapted_again
from xdlm.report.study.again import TITLE, trained_again
from xdlm.report.study.balance import balance
from xdlm.report.study.changes import transitions
from xdlm.report.study.collection import Study, read_study
from xdlm.report.study.course import dynamics
from xdlm.report.study.gumbel import drawn_by_gumbel
from xdlm.report.study.ideal import ideal_predictions
from xdlm.report.study.images import coded_images, pixel_images
from xdlm.report.study.judges import judges
from xdlm.report.study.law import known_laws
from xdlm.report.study.likelihood import validation, zero_shot
from xdlm.report.study.otherwise import trained_otherwise
from xdlm.report.study.page import Plot, Section, fold, summary
from xdlm.report.study.trained import trained
from xdlm.report.study.verdict import SURE, Finding
from xdlm.report.study.writing import generation

#: Each gives None where there is nothing to tell.
TEXT: tuple[Callable[[Study], Section | None], ...] = (
    trained, validation, zero_shot, generation, judges, trained_again, drawn_by_gumbel, known_laws,
    ideal_predictions, balance, dynamics, trained_otherwise, transitions, adaptation,
    adapted_again,
)  # fmt: skip
IMAGES: tuple[Callable[[Study], Section | None], ...] = (pixel_images, coded_images)


def write_study(results: Path, page: Path) -> None:
    """`page` from the records of a folder; figures go into its folder `figures`."""
    notes = results / "notes.md"
    text, plots = compose(
        read_study(results), _relative(results, page), page.name,
        notes.read_text(encoding="utf-8") if notes.is_file() else "",
    )  # fmt: skip
    figures = results / "figures"
    check_writable(figures)
    check_writable(page.absolute().parent)
    for name, plot in plots.items():
        plot(figures / f"{name}.png")
    write_atomic(page, text)


def _relative(results: Path, page: Path) -> str:
    """The folder as the page sees it, so that both may lie anywhere together."""
    return Path(os.path.relpath(results.resolve(), page.resolve().parent)).as_posix()


def compose(study: Study, results: str, name: str, notes: str = "") -> tuple[str, dict[str, Plot]]:
    """The page called `name`, and its figures by name. `notes` is text of people, such as what was tried
    where a finding does not hold; it stands at the end, as it is."""
    found = [section(study) for section in (*(TEXT if study.has_text else ()), *IMAGES)]
    sections = [section for section in found if section is not None]
    main, aside = (
        [f for s in sections if s.aside == far for f in s.findings] for far in (False, True)
    )
    at = f", at training step {study.step:,}" if study.has_text else ""
    head = f"""# Results

The paper's findings at a size that one GPU trains in minutes{at}. This page is
written by `xdlm report --results {results} --out {name}` from the records in [{results}]({results}),
verdicts included{_by_hand(results, notes)}.

A finding *holds* or *does not hold* where the difference is more than {SURE:g} of its standard errors (se),
and is *not separated by the noise* where it is less. One of several parts, such as two judges, holds where
all do, and does not where one does not. Values are ± one standard error,
which knows nothing of how much another training run would differ{_another(study)}.
{_errors(study)} Scale, data
and judges differ from the paper's, whose models have read hundreds to thousands of times as much text:
compare orders and gaps, not values, and take what does not hold here for not seen at this size, not for
refuted.

{summary(main)}
{_further(aside)}
On this page: {", ".join([*(s.link for s in sections), *["[Notes](#notes)"] * bool(notes.strip())])}.
"""
    pages = [s.markdown(results, study.sources(s.records)) for s in sections]
    if notes.strip():
        pages.append(f"## Notes\n\n*{_OWN_WORDS}*\n\n{notes.strip()}\n")
    plots = {name: plot for section in sections for name, plot in section.figures.items()}
    return "\n".join([head, *pages]), plots


_OWN_WORDS = (
    "These are people's words, and not the report's. Figures in them are of the records too, or are said "
    "to be from logs."
)


def _by_hand(results: str, notes: str) -> str:
    file = f"{results}/notes.md"
    return (
        f"; the [notes](#notes) at its end are written by hand ([{file}]({file}))"
        if notes.strip()
        else ""
    )


def _further(findings: Sequence[Finding]) -> str:
    """What is found without any trained model; folded, for there is much of it."""
    return (
        f"\n{fold('The same for known laws and ideal predictions', summary(findings))}\n"
        if findings
        else ""
    )


def _another(study: Study) -> str:
    link = TITLE.lower().replace(" ", "-")
    return "" if study.again is None else f" (see [{TITLE}](#{link}))"


def _errors(study: Study) -> str:
    if any(r.row_nats is not None for r in study.last):
        return (
            "Perplexities of text are compared row by row where rows were kept, since all methods read the "
            "same ones; what\nelse is compared counts as independent."
        )
    return (
        "A difference's error takes both values for independent, although all methods read the same "
        "rows."
    )


__all__ = ["Study", "compose", "read_study", "write_study"]
