"""A server that several files ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Server, started


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    pytest.importorskip("uvicorn")
    yield from started(
        "--model", "pocket", "pocket-mdlm", "--max-length", "160", "--max-body", "65536"
    )
