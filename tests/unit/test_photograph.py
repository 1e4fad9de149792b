"""Both ways to images on a real one: pieces of a photograph, as pixels and as codes of a codec of our own.

The photograph, of Grace Hopper, is in the public domain and comes with matplotlib.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from xdlm.cli.main import main
from xdlm.data import load_images
from xdlm.tokens import Pixels

Image = pytest.importorskip("PIL.Image")
matplotlib = pytest.importorskip("matplotlib")
RECIPES = Path(__file__).parents[2] / "recipes"
SIDE = 32


@pytest.fixture
def pieces(tmp_path: Path) -> str:
    """A grid of pieces of 32 x 32 pixels, labelled by whether they are of the upper half."""
    file = Path(matplotlib.get_data_path()) / "sample_data" / "grace_hopper.jpg"
    with Image.open(file) as opened:
        photograph = opened.convert("RGB")
        across, down = photograph.width // SIDE, photograph.height // SIDE
        photograph.crop((0, 0, SIDE * across, SIDE * down)).save(tmp_path / "pieces.png")
    labels = [int(2 * row < down) for row in range(down) for _ in range(across)]
    (tmp_path / "pieces_labels.json").write_text(json.dumps(labels))
    return str(tmp_path / "pieces.png")


def train(recipe: str, out: Path, pieces: str, *flags: str) -> list[float]:
    """A few steps from the command line; the losses on the way."""
    common = ["--data.train", pieces, "--data.val", pieces, "--model.n-classes", "2", "--train.out",
              str(out), "--train.log-every", "6", "--train.eval-every", "0", "--train.device",
              "cpu"]  # fmt: skip
    main(["train", str(RECIPES / recipe), *common, "--optim.warmup", "5", *flags])
    lines = (out / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def paint(run: Path, picture: Path) -> None:
    main(["paint", "--model", str(run), "--n", "4", "--steps", "2", "--guidance", "2", "--device", "cpu",
          "--zoom", "1", "--columns", "2", "--out", str(picture)])  # fmt: skip
    with Image.open(picture) as opened:
        assert opened.width > 2 * SIDE and len(np.unique(np.asarray(opened))) > 10


def test_pixels_of_a_photograph_are_learnt(tmp_path: Path, pieces: str) -> None:
    found = train(
        "cpu-pixels.yaml", tmp_path / "run", pieces, "--model.channels", "8", "--train.steps", "24"
    )
    assert found[-1] < 0.9 * found[0]
    paint(tmp_path / "run", tmp_path / "images.png")


def test_codes_of_a_photograph_are_learnt(tmp_path: Path, pieces: str) -> None:
    main(["codec", "--data", pieces, "--out", str(tmp_path / "codec"), "--shape.channels", "8",
          "--shape.codes", "64", "--steps", "40", "--batch", "16", "--device", "cpu"])  # fmt: skip
    codec = f"vq:{tmp_path / 'codec'}"
    found = train(
        "cpu-codes.yaml", tmp_path / "run", pieces, "--data.tokenizer", codec, "--train.steps", "42"
    )
    assert found[-1] < 0.9 * found[0]
    paint(tmp_path / "run", tmp_path / "images.png")
    rows = load_images(pieces, Pixels(SIDE))
    assert len(rows) == 288 and rows.n_classes == 2
