"""The page of a real server in a real browser."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import MODELS, Server, started

#: Names under which systems have it.
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    pytest.importorskip("fastapi")
    yield from started("--model", *MODELS)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        program = _program(playwright.chromium.executable_path)
        # Inside a container there is often no sandbox to be had; the page is our own.
        running = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield running
        running.close()


def _program(own: str) -> str:
    """A Chromium: the system's, playwright's, or one that is fetched now."""
    for name in _NAMES:
        if (found := shutil.which(name)) is not None:
            return found
    if not Path(own).exists():
        install = [sys.executable, "-m", "playwright", "install", "chromium", "--no-shell"]
        try:
            subprocess.run(install, check=True, capture_output=True, timeout=120)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"there is no Chromium, and none could be installed: {error}")
    return own


@pytest.fixture
def open_page(browser: Any, server: Server) -> Iterator[Callable[..., Any]]:
    """Opens the page in a window of its own, still unless `reduced_motion` says otherwise. At the end no
    page may have complained, unless it was `allowed` to say something."""
    contexts, said = [], []

    def opener(fragment: str = "", *, at: Server = server, allowed: str = "", **how: Any) -> Any:
        how = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **how}
        context = browser.new_context(**how)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(20_000)

        def note(text: str) -> None:
            if not (allowed and allowed in text):
                said.append(text)

        page.on("console", lambda message: note(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: note(f"error: {error}"))
        page.on("request", lambda asked: _stays_here(asked.url, at, said))
        page.goto(f"http://127.0.0.1:{at.port}/{fragment}")
        return page

    yield opener
    for context in contexts:
        context.close()
    assert said == []


def _stays_here(url: str, server: Server, said: list[str]) -> None:
    if not url.startswith((f"http://127.0.0.1:{server.port}/", "blob:")):
        said.append(f"it asked for {url}")
