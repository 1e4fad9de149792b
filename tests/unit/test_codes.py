"""Images as codes, all the way: a codec, a model of its codes with classes, images from both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_images import DIT, recipe, some_images
from test_vq import SMALL

from xdlm.api import tokenizer_of
from xdlm.cli.codec import Options
from xdlm.cli.train import make_trainer
from xdlm.config import RunConfig, dump_config, load_config, parse_config
from xdlm.data import load_images
from xdlm.errors import UserError
from xdlm.images import load_image_model
from xdlm.report.strip import BLANK, change_maps, states
from xdlm.sampling import Guidance, SamplerConfig
from xdlm.tokens import Codes, Pixels, read_tokenizer
from xdlm.training.codec import save_codec, train_codec


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run on the codes of images of 8 x 8, four by four of them."""
    config = recipe(tmp_path, DIT)
    rows = load_images(config.data.train, Pixels(8))
    save_codec(train_codec(rows, SMALL, steps=2, batch=4), tmp_path / "codec")
    data = replace(config.data, tokenizer=f"vq:{tmp_path / 'codec'}", length=16)
    return replace(config, data=data)


def test_images_there_and_back(config: RunConfig) -> None:
    codes = tokenizer_of(config.data)
    assert isinstance(codes, Codes) and (codes.side, codes.size, codes.length) == (8, 32, 16)
    images = some_images(3, 8)
    tokens = codes.encode(images)
    np.testing.assert_array_equal(tokens, codes.codec.encode(images))
    np.testing.assert_array_equal(codes.decode(tokens), codes.codec.decode(tokens))
    masked = tokens.astype(np.int64)
    masked[0, 5] = 32  # the second cell of the second row
    shown = codes.decode(masked, blank=7)
    assert (shown[0, 2:4, 2:4] == 7).all() and not (shown[0, :2] == 7).all()
    assert Codes.from_json(codes.to_json()) == codes


def test_mirror_images_have_codes_of_their_own(config: RunConfig) -> None:
    codes = tokenizer_of(config.data)
    assert isinstance(codes, Codes)
    plain = load_images(config.data.train, Pixels(8))
    rows = load_images(config.data.train, codes, mirrored=True)
    assert len(rows) == 24 and rows.labels([1, 13]).tolist() == [1, 1]
    images = Pixels(8).decode(plain.take([1]))
    np.testing.assert_array_equal(rows.take([1]), codes.encode(images))
    np.testing.assert_array_equal(rows.take([13]), codes.encode(images[:, :, ::-1]))


def test_a_model_of_codes_from_training_to_images(config: RunConfig, tmp_path: Path) -> None:
    assert parse_config(dump_config(config)) == config
    make_trainer(config, tokenizer_of(config.data)).run()
    (folder,) = (tmp_path / "run").glob("step-*")
    assert read_tokenizer(folder / "tokenizer.json") == tokenizer_of(config.data)
    model = load_image_model(tmp_path / "run", device="cpu")
    assert model.process.vocab.size == 33
    drawn = model.sample(3, config=SamplerConfig(steps=2, guidance=Guidance(2.0)), trajectory=True)
    assert drawn.images.shape == (3, 8, 8, 3) and drawn.labels.tolist() == [0, 1, 2]
    assert drawn.trajectory is not None
    last = states(drawn.trajectory, model.tokenizer, 1)[-1]
    np.testing.assert_array_equal(last, drawn.images[1])
    assert change_maps(drawn.trajectory, model.tokenizer).shape == (4, 8, 8, 3) and BLANK > 0


def test_a_codec_that_is_another_one_is_refused(config: RunConfig, tmp_path: Path) -> None:
    codes = tokenizer_of(config.data)
    moved = codes.to_json().replace('/codec"', '/elsewhere"')
    with pytest.raises(UserError, match="no codec at"):
        Codes.from_json(moved)
    rows = load_images(config.data.train, Pixels(8))
    save_codec(train_codec(rows, SMALL, steps=1, batch=4, seed=1), tmp_path / "elsewhere")
    with pytest.raises(UserError, match="another codec than the model was trained with"):
        Codes.from_json(moved)
    with pytest.raises(UserError, match="not that of a square of codes"):
        tokenizer_of(replace(config.data, length=15))
    with pytest.raises(UserError, match="not a grid of images of 16 x 16"):
        load_images(config.data.train, Codes.open(str(tmp_path / "codec"), 64))


def test_a_codec_moves_with_its_models(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same folders elsewhere, and another working directory."""
    make_trainer(config, tokenizer_of(config.data)).run()
    moved = tmp_path / "other/machine"
    moved.mkdir(parents=True)
    for name in ("codec", "run"):
        (tmp_path / name).rename(moved / name)
    monkeypatch.chdir(tmp_path)
    model = load_image_model("other/machine/run", device="cpu")
    assert isinstance(model.tokenizer, Codes)
    assert Path(model.tokenizer.folder) == moved / "codec"
    rows = load_images(config.data.train, Pixels(8))  # another codec is where this one was
    save_codec(train_codec(rows, SMALL, steps=1, batch=4, seed=1), tmp_path / "codec")
    model = load_image_model("other/machine/run", device="cpu")
    assert Path(model.tokenizer.folder) == moved / "codec"
    (moved / "codec").rename(tmp_path / "unrelated")
    with pytest.raises(UserError, match="another codec than the model was trained with"):
        load_image_model("other/machine/run", device="cpu")
    (tmp_path / "codec").rename(tmp_path / "other-codec")
    with pytest.raises(UserError, match="no codec at"):
        load_image_model("other/machine/run", device="cpu")


def test_the_recipe_fits_the_codec_that_it_names() -> None:
    """A default codec has cells of 4 x 4 pixels."""
    config = load_config(Path(__file__).parents[2] / "recipes" / "cpu-codes.yaml")
    assert config.data.is_images and config.model.n_classes == 10
    assert config.data.length == (32 // Options(out="").shape.shrink) ** 2
