"""Folders of images with classes: cut as LlamaGen cuts them, encoded once, read back with their labels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_images import DIT, recipe
from test_vq import SMALL, published, small

from xdlm.api import tokenizer_of
from xdlm.cli.main import main
from xdlm.cli.train import make_trainer
from xdlm.data import ImageFolder, Views, coded, load_images, prepare_codes
from xdlm.data.crops import centre_crop
from xdlm.errors import UserError
from xdlm.images import load_image_model
from xdlm.sampling import SamplerConfig
from xdlm.tokens import Codes, Pixels
from xdlm.training.codec import save_codec

COUNTS = {"ape": 3, "bee": 2, "cat": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of several sizes; one of them is grey."""
    draw = np.random.default_rng(0)
    for number, (name, count) in enumerate(COUNTS.items()):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(count):
            shape = (9 + 3 * i, 20 - number, 3)
            image = Image.fromarray(draw.integers(0, 256, shape, dtype=np.uint8))
            image = image.convert("L") if (number, i) == (1, 1) else image
            image.save(tmp_path / "images" / name / f"{i}.png")
    return tmp_path / "images"


@pytest.fixture
def codes(tmp_path: Path) -> Codes:
    save_codec(small(), tmp_path / "codec")
    return Codes.open(str(tmp_path / "codec"), 16)


def test_the_middle_of_an_image() -> None:
    """An image of the right height is not scaled, one of twice that is averaged over fours."""
    image = np.arange(8 * 12 * 3, dtype=np.uint8).reshape(8, 12, 3)
    np.testing.assert_array_equal(centre_crop(image, 8), image[:, 2:10])
    twice = image.repeat(2, axis=0).repeat(2, axis=1)
    np.testing.assert_array_equal(centre_crop(twice, 8), image[:, 2:10])
    assert centre_crop(image[:5], 8).shape == (8, 8, 3)


def test_views_are_those_of_llamagen() -> None:
    """As torchvision's TenCrop orders them: four corners and the middle, then those of the mirror image."""
    image = np.random.default_rng(0).integers(0, 256, (11, 11, 3), dtype=np.uint8)
    views = Views(8, "ten", 1.4).of(image)  # 8 x 1.4 is 11
    assert views.shape == (10, 8, 8, 3)
    corners = [image[:8, :8], image[:8, 3:], image[3:, :8], image[3:, 3:], image[2:10, 2:10]]
    np.testing.assert_array_equal(views[:5], corners)
    np.testing.assert_array_equal(views[5], image[:8, 3:][:, ::-1])
    np.testing.assert_array_equal(views[6], image[:8, :8][:, ::-1])
    centre = Views(8, "centre").of(image)
    np.testing.assert_array_equal(centre, [centre[0], centre[0][:, ::-1]])


def test_pixels_of_a_folder(folder: Path) -> None:
    rows = load_images(str(folder), Pixels(8), mirrored=True)
    assert len(rows) == 18 and rows.n_classes == 3
    assert rows.labels(range(9)).tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    with Image.open(folder / "bee" / "0.png") as image:
        middle = centre_crop(np.asarray(image), 8)
    np.testing.assert_array_equal(Pixels(8).decode(rows.take([3]))[0], middle)
    np.testing.assert_array_equal(Pixels(8).decode(rows.take([12]))[0], middle[:, ::-1])
    grey = Pixels(8).decode(rows.take([4]))[0]
    assert (grey[..., 0] == grey[..., 2]).all()
    assert len(load_images(str(folder), Pixels(8), limit=1)) == 3
    assert load_images(str(folder), Pixels(8)).digest != rows.digest


@pytest.mark.parametrize("crops", ["ten", "centre"])
def test_codes_of_a_folder(folder: Path, codes: Codes, tmp_path: Path, monkeypatch, crops) -> None:
    monkeypatch.setattr(coded, "SHARD_IMAGES", 4)
    views, found = Views(8, crops), ImageFolder.open(folder)
    made = prepare_codes(found, codes, tmp_path / "out", views=views, workers=2)
    assert len(made.shards) == 3 and made.counts == [3, 2, 4]
    rows = load_images(str(tmp_path / "out"), codes)
    assert len(rows) == 9 * views.number and rows.n_classes == 3
    last = 4 * views.number
    assert rows.labels([0, last - 1, last]).tolist() == [0, 1, 1]
    np.testing.assert_array_equal(
        rows.take(range(last, last + views.number)), codes.encode(views.of(found.image(4)))
    )


def test_an_interrupted_run_goes_on(
    folder: Path, codes: Codes, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(coded, "SHARD_IMAGES", 4)
    views, found = Views(8, "centre"), ImageFolder.open(folder)
    prepare_codes(found, codes, tmp_path / "whole", views=views)

    def stop(done: int, total: int) -> None:
        if done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_codes(found, codes, tmp_path / "part", views=views, on_progress=stop)
    with pytest.raises(UserError, match="unfinished"):
        load_images(str(tmp_path / "part"), codes)
    seen: list[int] = []
    prepare_codes(
        found, codes, tmp_path / "part", views=views, on_progress=lambda n, _: seen.append(n)
    )
    assert seen == [4, 8]
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "part" / file.name).read_bytes() == file.read_bytes()
    prepare_codes(found, codes, tmp_path / "part", views=views, on_progress=stop)  # was there


def test_what_does_not_fit_is_refused(folder: Path, codes: Codes, tmp_path: Path) -> None:
    found, out = ImageFolder.open(folder), tmp_path / "out"
    prepare_codes(found, codes, out, views=Views(8, "centre"))
    with pytest.raises(UserError, match="views differs"):
        prepare_codes(found, codes, out, views=Views(8, "ten"))
    with pytest.raises(UserError, match="holds something else"):
        prepare_codes(found, codes, folder, views=Views(8))
    torch.manual_seed(1)
    save_codec(type(small())(SMALL), tmp_path / "other")
    with pytest.raises(UserError, match="another codec"):
        load_images(str(out), Codes.open(str(tmp_path / "other"), 16))
    with pytest.raises(UserError, match="remove data"):
        load_images(str(out), codes, mirrored=True)
    with pytest.raises(UserError, match="holds codes, and pixels are wanted"):
        load_images(str(out), Pixels(8))
    with pytest.raises(UserError, match="xdlm prepare imagenet"):
        load_images(str(folder), codes)
    shard = out / "codes-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(UserError, match="truncated"):
        load_images(str(out), codes)
    tree = json.loads((out / "codes.json").read_text())
    (out / "codes.json").write_text(json.dumps(tree | {"counts": [1, 2, 3]}))
    with pytest.raises(UserError, match="counts do not agree"):
        load_images(str(out), codes)


def test_bad_folders_get_one_line(folder: Path, tmp_path: Path) -> None:
    (folder / "bee" / "0.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"bee/0.png is damaged or not an image"):
        load_images(str(folder), Pixels(8)).take([3])
    (folder / "stray.png").write_bytes(b"")
    with pytest.raises(
        UserError, match=r"has images beside its class folders, such as stray.png \(1 in"
    ):
        ImageFolder.open(folder)
    (folder / "stray.png").unlink()
    (folder / "dog").mkdir()
    with pytest.raises(UserError, match="dog holds no images"):
        ImageFolder.open(folder)
    (tmp_path / "empty").mkdir()
    for nothing in ("empty", "absent"):
        with pytest.raises(UserError, match=f"{nothing} holds no images"):
            ImageFolder.open(tmp_path / nothing)


def test_a_folder_of_images_without_classes(folder: Path, codes: Codes, tmp_path: Path) -> None:
    rows = load_images(str(folder / "cat"), Pixels(8), limit=3)
    assert len(rows) == 3 and rows.n_classes == 0 and rows.labels([0]) is None
    whole = load_images(str(folder), Pixels(8))
    np.testing.assert_array_equal(rows.take([1]), whole.take([6]))
    with pytest.raises(UserError, match="cat holds no folders of images, one for each class"):
        prepare_codes(ImageFolder.open(folder / "cat"), codes, tmp_path / "out", views=Views(8))


def test_a_damaged_image_leaves_what_was_done_and_no_more(
    folder: Path, codes: Codes, tmp_path: Path, monkeypatch
) -> None:
    whole, views, out = ImageFolder.open(folder), Views(8, "centre"), tmp_path / "out"
    first = folder / "ape" / "0.png"
    content = first.read_bytes()
    first.write_bytes(b"no image")
    with pytest.raises(UserError, match="damaged or not an image: of no known format"):
        prepare_codes(whole, codes, out, views=views)
    assert not out.exists()
    first.write_bytes(content)
    monkeypatch.setattr(coded, "SHARD_IMAGES", 4)
    last = folder / "cat" / "3.png"
    content = last.read_bytes()
    last.write_bytes(bytes(len(content)))
    with pytest.raises(UserError, match=r"cat/3.png is damaged"):
        prepare_codes(ImageFolder.open(folder), codes, out, views=views)
    last.write_bytes(content)
    whole, done = ImageFolder.open(folder), []
    prepare_codes(whole, codes, out, views=views, on_progress=lambda n, _: done.append(n))
    assert done == [8]


def test_a_model_of_prepared_codes(folder: Path, codes: Codes, tmp_path: Path) -> None:
    main(["prepare", "imagenet", "--data", str(folder), "--codec", codes.folder, "--out",
          str(tmp_path / "out"), "--side", "8", "--crops", "centre", "--device", "cpu"])  # fmt: skip
    config = recipe(tmp_path, DIT)
    data = replace(
        config.data, train=str(tmp_path / "out"), val=str(tmp_path / "out"), length=16,
        tokenizer=f"vq:{codes.folder}", flips=False, limit=None,
    )  # fmt: skip
    config = replace(config, data=data)
    make_trainer(config, tokenizer_of(config.data)).run()
    model = load_image_model(tmp_path / "run", device="cpu")
    drawn = model.sample(2, config=SamplerConfig(steps=2))
    assert drawn.images.shape == (2, 8, 8, 3)


def test_a_published_codec_is_imported(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("xdlm.tokens.vq.VqConfig", lambda: SMALL)
    torch.save(published(small()), tmp_path / "vq.pt")
    command = ["import", "--from", "llamagen", str(tmp_path / "vq.pt"), "--out"]
    main([*command, str(tmp_path / "codec")])
    assert "each of 2 x 2 pixels" in capsys.readouterr().err
    monkeypatch.undo()
    codes = Codes.open(str(tmp_path / "codec"), 16)
    image = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    np.testing.assert_array_equal(codes.encode(image), small().encode(image))
    for flags, message in (
        ([str(tmp_path / "b")], "another codec"),
        ([str(tmp_path / "b"), "--shift"], "--shift has no meaning"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*command, *flags])
        assert stop.value.code == 2 and message in capsys.readouterr().err
