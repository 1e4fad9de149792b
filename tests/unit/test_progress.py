"""What is said of work under way, where there is no terminal."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from xdlm.cli import progress as module
from xdlm.cli.progress import progress, telling


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    now = iter([0.0, 1.0, 31.0, 40.0, 62.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with progress("reading [my] texts") as show:
        for done in (10, 1000, 1500):
            show(done, 2000)
        show(1900, 0, "and more")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "reading [my] texts: 1,000 of 2,000, 31 s", "reading [my] texts and more: 1,900, 62 s",
    ]  # fmt: skip


def test_a_bar_tells_how_many_and_what_comes_now(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = StringIO()
    screen = Console(file=drawn, force_terminal=True, width=70, markup=False)
    monkeypatch.setattr(module, "console", lambda: screen)
    with progress("measuring [them]") as show:
        show(1200, 2000, "slowly")
    assert "measuring [them] slowly" in drawn.getvalue() and "1,200 of 2,000" in drawn.getvalue()


def test_so_does_one_of_what_has_no_known_end(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    now = iter([5.0, 34.0, 35.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with telling("tokenising") as tell:
        tell("7 documents")
        tell("8 documents")
    assert capsys.readouterr().err == "8 documents, 30 s\n"
