"""Pages that stand alone, in a real browser."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xdlm.report import Recording, trajectory_page
from xdlm.report.colours import LOOKS
from xdlm.report.exporting import export
from xdlm.report.pieces import visible
from xdlm.report.strip import change_maps, states
from xdlm.sampling import Trajectory
from xdlm.tokens import Pixels

pytestmark = pytest.mark.xdist_group("browser")
#: Tokens that are shown as they are not: invisible, out of order, or markup.
PIECES = ["The", " old", " man", "\n", "", "\u202e", "\x00", "\ud800", "<b>", "👩\u200d🚀"]
PIXELS = """number => {
  const canvas = document.querySelectorAll("canvas")[number];
  return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
}"""


@pytest.fixture
def open_file(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page from disk. At the end none may have complained."""
    said: list[str] = []
    page = browser.new_page()
    # Chromium has advice for those who read canvases, as a test does.
    page.on("console", lambda m: None if "getImageData" in m.text else said.append(m.text))
    page.on("pageerror", lambda error: said.append(str(error)))

    def opener(file: Path, fragment: str) -> Any:
        page.goto(f"{file.as_uri()}#{fragment}")
        return page

    yield opener
    page.close()
    assert said == []


class Pieces:
    def pieces(self, ids: list[int]) -> list[str]:
        return [PIECES[i] if i < len(PIECES) else "" for i in ids]


def test_a_page_of_text_shows_every_state(open_file: Callable[..., Any], tmp_path: Path) -> None:
    """What it shows is what Python would, for every kind of change and every odd piece."""
    torch.manual_seed(0)
    mask = len(PIECES)
    frames = torch.randint(mask + 1, (5, 2, 24))
    frames[-1, 1, :mask] = torch.arange(mask)
    path = Trajectory(frames, (1.0, 0.7, 0.5, 0.2, 0.0), (mask,), torch.rand(4, 2, 24))
    file = tmp_path / "text.html"
    file.write_text(trajectory_page(path, Pieces(), title="A run", details={"steps": "4"}))
    page = open_file(file, "step=0&sample=2")
    for step in range(5):
        ids = frames[step, 1].tolist()
        shown = [visible(piece).replace("↵", "↵\n") for piece in Pieces().pieces(ids)]
        expected = "".join("" if i == mask else s for i, s in zip(ids, shown, strict=True))
        assert page.locator(".tokens").evaluate("box => box.textContent") == expected
        assert page.locator(".tokens .masked").count() == ids.count(mask)
        for kind, counts in path.only(1).counts().items():
            expected_count = 0 if step == 0 else counts[step - 1]
            name = LOOKS[kind].name
            assert page.inner_text(f".count-{name}") == str(expected_count)
            assert page.locator(f".tokens .{name}").count() == expected_count
        page.keyboard.press("ArrowRight")
    page.select_option("#sample", "0")
    assert page.locator(".tokens .masked").count() == int((frames[-1, 0] == mask).sum())
    page.hover(".tokens > span >> nth=0")
    rows = page.locator("#history tr").count()
    moves = int((frames[1:, 0, 0] != frames[:-1, 0, 0]).sum())
    assert rows == moves + 1, "where it began, and what it became"


def test_a_page_of_images_shows_every_state(open_file: Callable[..., Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    frames = torch.randint(257, (4, 2, 48))
    frames[0] = 256
    path, pixels = Trajectory(frames, (1.0, 0.5, 0.2, 0.0), (256,)), Pixels(4)
    file = tmp_path / "images.html"
    export(Recording.of_images(path, pixels, {}), file, title="Images")
    page = open_file(file, "step=0&sample=2")
    for step in range(4):
        state, changed = (np.array(page.evaluate(PIXELS, n)).reshape(4, 4, 4) for n in range(2))
        np.testing.assert_array_equal(state[..., :3], states(path, pixels, 1)[step])
        # Nothing is drawn where nothing changed; in Python that is white.
        seen = np.where(changed[..., 3:] > 0, changed[..., :3], 255)
        np.testing.assert_array_equal(seen, change_maps(path, pixels, 1)[step])
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#clock").startswith("step 3 / 3")
