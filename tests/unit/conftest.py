"""A server and a model that several files ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Server, started

from xdlm import load
from xdlm.api import Model


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    pytest.importorskip("uvicorn")
    yield from started(
        "--model", "pocket", "pocket-mdlm", "--max-length", "160", "--max-body", "65536"
    )


@pytest.fixture(scope="session")
def pocket() -> Model:
    return load("pocket")
