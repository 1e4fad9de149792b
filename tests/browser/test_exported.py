"""Pages that stand alone, in a real browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from xdlm.report import Recording
from xdlm.report.exporting import export
from xdlm.report.strip import change_maps, states
from xdlm.sampling import Trajectory
from xdlm.tokens import Pixels

pytestmark = pytest.mark.xdist_group("browser")
PIXELS = """number => {
  const canvas = document.querySelectorAll("canvas")[number];
  return [...canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data];
}"""


def test_a_page_of_images_shows_every_state(browser: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    frames = torch.randint(257, (4, 2, 48))
    frames[0] = 256
    path, pixels = Trajectory(frames, (1.0, 0.5, 0.2, 0.0), (256,)), Pixels(4)
    file = tmp_path / "images.html"
    export(Recording.of_images(path, pixels, {}), file, title="Images")
    page, said = browser.new_page(), []
    # Chromium has advice for those who read canvases, as this test does.
    page.on("console", lambda m: None if "getImageData" in m.text else said.append(m.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{file.as_uri()}#step=0&sample=2")
    for step in range(4):
        state, changed = (np.array(page.evaluate(PIXELS, n)).reshape(4, 4, 4) for n in range(2))
        np.testing.assert_array_equal(state[..., :3], states(path, pixels, 1)[step])
        # Nothing is drawn where nothing changed; in Python that is white.
        seen = np.where(changed[..., 3:] > 0, changed[..., :3], 255)
        np.testing.assert_array_equal(seen, change_maps(path, pixels, 1)[step])
        page.keyboard.press("ArrowRight")
    assert page.inner_text("#clock").startswith("step 3 / 3") and said == []
    page.close()
