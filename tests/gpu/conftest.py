"""What GPU tests measured is listed behind their results: a log should say more than that they passed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

_FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    def tell(what: str) -> None:
        request.config.stash.setdefault(_FIGURES, []).append(f"{request.node.name}: {what}")

    return tell


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    figures = config.stash.get(_FIGURES, [])
    if figures:
        terminalreporter.section("figures")
        for line in figures:
            terminalreporter.line(line)
