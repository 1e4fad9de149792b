"""Trajectories of images as data: the same events as of text, and enough with them to draw any state."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from test_trajectories import errors
from test_vq import small

from xdlm.cli.main import main
from xdlm.errors import UserError
from xdlm.report import Recording, read_recording
from xdlm.report.blocks import ImageFrame
from xdlm.report.colours import LOOKS
from xdlm.report.exporting import FORMATS
from xdlm.report.recording import events, schema
from xdlm.report.strip import BLANK, states
from xdlm.report.viewer import Place, frame_panel
from xdlm.sampling import Change, Trajectory
from xdlm.tokens import Codes, Pixels
from xdlm.training.codec import save_codec


def wander(size: int, length: int, *, steps: int = 4) -> Trajectory:
    """Two images: all masks, then some of everything, and at the end no mask."""
    torch.manual_seed(0)
    frames = torch.randint(size, (steps + 1, 2, length))
    frames[torch.rand(frames.shape) < 0.4] = size
    frames[0], frames[-1] = size, frames[-1] % size
    times = tuple(np.linspace(1, 0, steps + 1).tolist())
    return Trajectory(frames, times, (size,), torch.rand(steps, 2, length))


@pytest.fixture
def pixels() -> Recording:
    return Recording.of_images(wander(256, 3 * 4**2), Pixels(4), {"steps": "4"})


@pytest.fixture
def codes(tmp_path: Path) -> Recording:
    save_codec(small(), tmp_path / "codec")
    tokenizer = Codes.open(str(tmp_path / "codec"), 16)
    return Recording.of_images(wander(tokenizer.size, 16), tokenizer, {})


@pytest.fixture(params=["pixels", "codes"])
def recording(request: pytest.FixtureRequest) -> Recording:
    return request.getfixturevalue(request.param)


def written(recording: Recording, folder: Path) -> Path:
    file = folder / "images.json"
    file.write_text(recording.to_json(), encoding="utf-8")
    return file


def drawn(recording: Recording, frame: int, width: int = 80) -> list[list[tuple]]:
    """The characters on the terminal, with the colours of each: [line][column]."""
    console = Console(width=width, file=io.StringIO(), color_system="truecolor")
    lines = console.render_lines(ImageFrame(recording, frame, 0), pad=False)
    return [
        [(c, _rgb(s.style.color), _rgb(s.style.bgcolor)) for s in line if s.style for c in s.text]
        for line in lines
    ]


def _rgb(colour) -> tuple[int, ...] | None:
    return None if colour is None or colour.triplet is None else tuple(colour.triplet)


def test_document_fits_the_schema_and_gives_the_run_back(recording, tmp_path: Path) -> None:
    data = json.loads(recording.to_json())
    assert list(errors(data, schema())) == [] and data["kind"] == "image"
    assert list(errors(data | {"image": {**data["image"], "channels": 2}}, schema()))
    back = read_recording(written(recording, tmp_path))
    path, again = recording.trajectory, back.trajectory
    assert torch.equal(again.frames, path.frames.int()) and again.times == path.times
    assert (back.layout, back.spelling) == (recording.layout, recording.spelling)
    assert back.to_json() == recording.to_json()
    listed = list(events(again, 1))
    assert len(listed) == int((path.only(1).changes() > 0).sum())
    assert [e.probability for e in listed[:9]] == [
        pytest.approx(float(path.probs[e.step - 1, 1, e.position]), abs=1e-6) for e in listed[:9]
    ]


def test_pixels_are_drawn_from_the_file_alone(pixels: Recording, tmp_path: Path) -> None:
    back = read_recording(written(pixels, tmp_path))
    for sample in range(2):
        np.testing.assert_array_equal(
            states(back.trajectory, back.decoder, sample),
            states(pixels.trajectory, Pixels(4), sample),
        )


def test_codes_have_the_colours_that_their_codec_gives_them(codes, tmp_path: Path) -> None:
    """The file knows no codec: each cell has the colour of its code among its own kind."""
    back = read_recording(written(codes, tmp_path))
    shown, path = states(back.trajectory, back.decoder), codes.trajectory
    assert shown.shape == (5, 8, 8, 3) and (shown[0] == BLANK).all()
    corner = int(path.frames[-1, 0, 0])
    alone = small().decode(np.full((1, 4), corner)).mean(axis=(0, 1, 2))
    np.testing.assert_allclose(shown[-1, 0, 0], alone, atol=0.51)
    assert (shown[-1, :2, :2] == shown[-1, 0, 0]).all()
    own = states(path, codes.decoder)
    np.testing.assert_array_equal(own[-1], codes.tokenizer.decode(path.frames[-1, :1].numpy())[0])


def test_the_terminal_shows_two_pixels_in_a_character(pixels: Recording) -> None:
    first, last = drawn(pixels, 0), drawn(pixels, 4)
    assert len(last) == 2
    assert all(cell[0] == "░" for line in first for cell in line[:4])
    image = Pixels(4).decode(pixels.trajectory.frames[-1, :1].numpy())[0]
    for y, line in enumerate(last):
        for x, (character, upper, lower) in enumerate(line[:4]):
            assert character == "▀"
            assert (upper, lower) == (tuple(image[2 * y, x]), tuple(image[2 * y + 1, x]))
    looks = {tuple(bytes.fromhex(look.colour[1:])) for look in LOOKS.values()}
    seen = {colour for line in drawn(pixels, 2) for cell in line[7:] for colour in cell[1:]}
    assert seen - {None} <= looks and len(seen & looks) >= 2
    codes = pixels.trajectory.only(0).changes()[1]
    assert {int(c) for c in codes.unique()} >= {Change.REFINE, Change.REMASK}


def test_large_images_are_made_to_fit() -> None:
    recording = Recording.of_images(wander(256, 3 * 64**2, steps=1), Pixels(64), {})
    for width in (131, 60, 20, 3):
        lines = drawn(recording, 1, width=width)
        assert max(len(line) for line in lines) <= width
    assert len(drawn(recording, 1, width=200)) == 32


def test_view_of_images(recording: Recording, tmp_path: Path, capsys) -> None:
    file = written(recording, tmp_path)
    main(["view", str(file), "--sample", "2", "--frames", "3"])
    shown = capsys.readouterr().out
    assert [int(n) for n in re.findall(r"step (\d)/4", shown)] == [0, 2, 4]
    side = recording.layout.side
    first, _, last = re.split(r"step \d/4", shown.partition("╰")[0])[1:]
    assert first.count("░") == side * side // 2 and "▀" not in first
    assert "░" not in last and last.count("▀") >= side * side // 2
    with pytest.raises(SystemExit):
        main(["view", str(file), "--sample", "3"])
    assert "--sample must lie in 1..2" in capsys.readouterr().err
    console = Console(width=90, file=io.StringIO())
    console.print(frame_panel(recording, Place(1, 1)))
    assert "image 2/2" in console.file.getvalue() and "step 1/4" in console.file.getvalue()


def test_every_format(recording: Recording, tmp_path: Path, capsys) -> None:
    Image = pytest.importorskip("PIL.Image")
    file = written(recording, tmp_path)
    for ending in FORMATS:
        main(["view", str(file), "--to", str(tmp_path / f"again.{ending}")])
    assert (tmp_path / "again.json").read_text() == file.read_text()
    assert "▀" in (tmp_path / "again.svg").read_text()
    assert '"image":{"side":' in (tmp_path / "again.html").read_text()
    with Image.open(tmp_path / "again.gif") as film:
        assert film.n_frames == 5 and film.size[0] >= 256


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: d.update(kind="film"), "kind 'film'"),
        (lambda d: d.pop("image"), "damaged"),
        (lambda d: d["image"].update(channels=2), "an image of"),
        (lambda d: d["image"].update(cells=2), "tokens for an image of 12"),
        (lambda d: d["image"].update(side=5), "4 cells over 5 pixels"),
        (lambda d: d["image"].update(side=10**9), "cells over"),
        (lambda d: d["tokens"][0].__setitem__(1, "red"), "no colour such as"),
        (lambda d: d["tokens"].pop(), "without text or colour"),
        (lambda d: d["samples"][0]["events"].append(d["samples"][0]["events"][0]), "two events"),
        (lambda d: d["samples"][0]["events"][0].__setitem__(0, 1.5), "whole numbers"),
    ],
)
def test_damaged_files_are_told(pixels: Recording, tmp_path: Path, damage, says) -> None:
    data = json.loads(pixels.to_json())
    damage(data)
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=says):
        read_recording(tmp_path / "run.json")
