"""Models of images from their checkpoints: samples, pictures, measures, recipes."""

from __future__ import annotations

import io
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_cli import ROOT, complaint
from test_image_scores import Toy
from test_images import as_grids, grid, recipe, save_image, some_images
from test_unet import SMALL
from test_vq import small

from xdlm.api import tokenizer_of
from xdlm.cli.main import main
from xdlm.cli.measures import image as command
from xdlm.cli.train import make_trainer
from xdlm.config import load_config
from xdlm.errors import UserError
from xdlm.evaluation.records import measurement, read_records
from xdlm.images import ImageModel, load_image_model
from xdlm.models import UNetConfig, build_denoiser
from xdlm.report import read_recording
from xdlm.report.captions import captioned
from xdlm.report.colours import LOOKS
from xdlm.report.grid import image_grid, png, zoomed
from xdlm.report.strip import BLANK, change_maps, picked_frames, states, strips
from xdlm.sampling import Change, Guidance, SamplerConfig, Trajectory
from xdlm.tokens import Pixels
from xdlm.training.codec import save_codec

Image = pytest.importorskip("PIL.Image")
RECIPES = Path(__file__).parents[2] / "recipes"
UNET = "{kind: unet, side: 8, channels: 8, multipliers: 1-2, blocks: 1, attention: 4, n_classes: 3}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run of a few steps on small images."""
    folder = tmp_path_factory.mktemp("images")
    config = recipe(folder, UNET)
    make_trainer(config, tokenizer_of(config.data)).run()
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> ImageModel:
    return load_image_model(folder / "run", device="cpu")


def test_images_do_not_depend_on_the_batch(model: ImageModel) -> None:
    config = SamplerConfig(steps=3)
    whole = model.sample(5, config=config, seed=1, trajectory=True)
    parts = model.sample(5, config=config, seed=1, batch=2)
    assert whole.images.shape == (5, 8, 8, 3) and whole.images.dtype == np.uint8
    assert whole.labels.tolist() == [0, 1, 2, 0, 1]
    # A model's rounding may differ between batches, and then a draw may.
    assert (whole.images == parts.images).mean() > 0.99
    assert whole.trajectory is not None and whole.trajectory.frames.shape == (5, 5, 192)
    assert not np.array_equal(whole.images, model.sample(5, config=config, seed=2).images)


def test_labels_may_be_given_or_left_out(model: ImageModel) -> None:
    config = SamplerConfig(steps=2)
    assert model.sample(2, labels=[2, 2], config=config).labels.tolist() == [2, 2]
    assert model.sample(2, labels=[-1, -1], config=config).labels.tolist() == [-1, -1]
    guided = SamplerConfig(steps=2, guidance=Guidance(2.0))
    assert model.sample(2, config=guided).nfe == 2 * model.sample(2, config=config).nfe
    with pytest.raises(UserError, match=r"labels must lie in 0\.\.2, got 3"):
        model.sample(1, labels=[3], config=config)
    with pytest.raises(UserError, match="got 1 labels for 2 images"):
        model.sample(2, labels=[0], config=config)


def test_guidance_needs_classes(model: ImageModel) -> None:
    config = replace(model.denoiser.config, n_classes=0)
    without = replace(model, denoiser=build_denoiser(config, model.denoiser.n_states))
    assert without.sample(1, config=SamplerConfig(steps=1)).labels.tolist() == [-1]
    with pytest.raises(UserError, match="guidance needs a model with classes"):
        without.sample(1, config=SamplerConfig(steps=1, guidance=Guidance(2.0)))


def test_arguments_that_are_none_get_one_line(folder: Path, model: ImageModel) -> None:
    for given, says in (
        ({"weights": "emma"}, "unknown weights 'emma'; did you mean 'ema'"),
        ({"precision": "bf16"}, "unknown precision 'bf16'"),
    ):
        with pytest.raises(UserError, match=says):
            load_image_model(folder / "run", device="cpu", **given)
    for how, says in (
        ({"n": 1.5}, "n must be a whole number"),
        ({"seed": 2**64}, r"seed must lie in 0\.\.2\^63-1"),
    ):
        with pytest.raises(UserError, match=says):
            model.sample(**how)


def test_models_and_images_are_shown_in_a_line(model: ImageModel) -> None:
    assert repr(model).startswith("ImageModel(")
    assert "images of 8 x 8, 0.1 M parameters, ema weights of step " in repr(model)
    drawn = model.sample(2, config=SamplerConfig(steps=2))
    assert repr(drawn) == f"ImageSample(images [2, 8, 8, 3], labels [0, 1], nfe={drawn.nfe})"


def test_a_model_of_text_is_no_model_of_images() -> None:
    with pytest.raises(UserError, match="is a text model"):
        load_image_model("pocket", device="cpu")


def test_grids_hold_every_image_in_its_place() -> None:
    images = some_images(5, 8)
    page = image_grid(images, columns=3, gap=2)
    assert page.shape == (18, 28, 3)
    np.testing.assert_array_equal(page[10:18, 10:18], images[4])
    assert (page[8:10] == 255).all() and (page[10:, 20:] == 255).all()
    with Image.open(io.BytesIO(png(zoomed(page, 2)))) as opened:
        np.testing.assert_array_equal(np.asarray(opened)[::2, 1::2], page)
    with pytest.raises(UserError, match="a grid needs images"):
        image_grid(images[:0])


def test_eval_image_writes_records_and_pictures(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    network = Toy()
    monkeypatch.setattr(command, "load_inception", lambda weights, device: network)
    network.classes = None
    records, pictures = folder / "images.jsonl", folder / "pictures"
    arguments = [
        "eval", "image", "--model", str(folder / "run"), "--n", "12", "--steps", "2", "4",
        "--guidance", "1", "2", "--device", "cpu", "--batch", "5", "--cache", str(folder / "cache"),
    ]  # fmt: skip
    main([*arguments, "--records", str(records), "--samples", str(pictures)])
    cost, *found = read_records(records)
    assert cost.metric == "train_seconds"
    assert [r.metric for r in found[:4]] == ["fid", "kid", "precision", "recall"]
    assert [(r.guidance, r.steps, r.nfe) for r in found[::4]] == [
        (1.0, 2, 3.0), (2.0, 2, 6.0), (1.0, 4, 5.0), (2.0, 4, 10.0),
    ]  # fmt: skip
    one = found[0]
    assert one.n == 12 and one.details["reference_n"] == 12 and one.judge == "inception-2015"
    assert one.value is not None and one.value > 0 and one.data == str(folder / "some.png")
    assert len(list(pictures.glob("*.png"))) == 4 and len(list((folder / "cache").iterdir())) == 1
    assert "FID" in capsys.readouterr().out
    calls = network.calls
    main(arguments)
    assert network.calls == 2 * calls - 1  # the data set's features were there already
    main([*arguments, "--records", str(records)])
    assert network.calls == 2 * calls - 1 and len(read_records(records)) == 17
    main([*arguments, "--records", str(records), "--steps", "4", "5", "--guidance", "1"])
    assert [r.steps for r in read_records(records)[17:]] == [5, 5, 5, 5]


def test_an_exported_model_is_measured_as_the_run_it_comes_from(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """In the precision that it was exported in, on another machine: the same model with the same images."""
    network = Toy()
    network.classes = None
    monkeypatch.setattr(command, "load_inception", lambda weights, device: network)
    words = ["eval", "image", "--model", "run", "--n", "8", "--guidance", "2", "--device", "cpu",
             "--precision", "bfloat16", "--records", str(tmp_path / "images.jsonl")]  # fmt: skip
    monkeypatch.chdir(folder)
    main([*words, "--steps", "2"])
    (newest,) = (folder / "run").glob("step-*")
    main(
        [
            "export",
            "--model",
            "run",
            "--out",
            str(tmp_path / "run" / newest.name),
            "--dtype",
            "bfloat16",
        ]
    )
    monkeypatch.chdir(tmp_path)
    assert sorted(f.name for f in (tmp_path / "run" / newest.name).iterdir()) == [
        "checkpoint.json", "config.yaml", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    calls = network.calls
    main([*words, "--steps", "2"])
    assert network.calls == calls + 1  # the data set alone: the rest is known
    main([*words, "--steps", "3"])
    _, one, *_, other = read_records(tmp_path / "images.jsonl")
    assert (one.steps, other.steps) == (2, 3) and other.model == "run"
    assert measurement(replace(one, metric=other.metric, steps=3)) == measurement(other)
    main([*words, "--steps", "2", "--records", str(tmp_path / "again.jsonl")])
    assert read_records(tmp_path / "again.jsonl")[0].value == one.value
    with pytest.raises(SystemExit) as stop:
        main(["export", "--model", "run", "--out", str(tmp_path / "hub"), "--format", "hub"])
    assert stop.value.code == 2 and "makes images" in capsys.readouterr().err


def test_images_of_a_data_set_are_measured(folder: Path, monkeypatch, capsys) -> None:
    """Against themselves: no distance; as a codec gives them back: some."""
    network = Toy()
    network.classes = None
    monkeypatch.setattr(command, "load_inception", lambda weights, device: network)
    save_codec(small(), folder / "codec")
    source, records = str(folder / "some.png"), str(folder / "real.jsonl")
    words = ["eval", "image", "--images", source, "--data", source, "--side", "8", "--device", "cpu",
             "--records", records]  # fmt: skip
    main(words)
    main([*words, "--codec", str(folder / "codec")])
    found = read_records(Path(records))
    assert [r.metric for r in found[::4]] == ["real_fid", "real_fid"] and found[0].n == 12
    assert abs(found[0].value) < 1e-3 < found[4].value and "codec" in found[4].model
    calls = network.calls
    main(words)
    assert network.calls == calls + 1 and len(read_records(Path(records))) == 8
    shutil.rmtree(folder / "codec")
    other = small()
    other.quantize.embedding.weight.data.neg_()
    save_codec(other, folder / "codec")  # another one in its place is measured anew
    main([*words, "--codec", str(folder / "codec")])
    assert len(read_records(Path(records))) == 12
    for flags, message in (
        (["--images", source], "--images needs --data"),
        (["--model", str(folder / "run"), "--codec", "x"], "--codec is for --images"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["eval", "image", *flags, "--device", "cpu"])
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_what_is_to_be_measured_is_found_before_features_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    network = Toy()
    network.classes = None
    monkeypatch.setattr(command, "load_inception", lambda weights, device: network)
    source, codec = str(folder / "some.png"), str(folder / "own-codec")
    save_codec(small(), Path(codec))
    real = ("--data", source, "--side", "8", "--images")
    cases = {
        (*real, "absent.png"): "no images at absent.png",
        (*real, source, "--codec", "absent"): "no codec at absent",
        (*real, source, "--codec", codec, "--side", "1"): "a side that is a multiple of 2, not 1",
        (*real, source, "--limit", "3"): "3 images are too few, 4 are needed",
        ("--model", str(folder / "run"), "--limit", "3"): "3 images are too few",
    }
    for flags, message in cases.items():
        with pytest.raises(SystemExit) as stop:
            main(["eval", "image", *flags, "--device", "cpu"])
        told = capsys.readouterr().err
        assert stop.value.code == 2 and message in told and told.count("\n") == 1
    assert network.calls == 0


def test_a_model_is_compared_with_what_it_was_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Toy()
    network.classes = None
    monkeypatch.setattr(command, "load_inception", lambda weights, device: network)
    config = recipe(tmp_path, UNET)
    config = replace(config, data=replace(config.data, limit=6))
    make_trainer(config, tokenizer_of(config.data)).run()
    words = ["eval", "image", "--model", str(tmp_path / "run"), "--n", "4", "--steps", "1", "--device",
             "cpu", "--records"]  # fmt: skip
    for i, (flags, n) in enumerate(
        {(): 6, ("--limit", "5"): 5, ("--data", config.data.train): 12}.items()
    ):
        main([*words, str(tmp_path / f"{i}.jsonl"), *flags])
        assert read_records(tmp_path / f"{i}.jsonl")[1].details["reference_n"] == n


def test_bad_measures_get_one_line(folder: Path, capsys: pytest.CaptureFixture) -> None:
    cases = {
        ("--n", "1"): "--n must lie in 4",
        ("--guidance", "-1"): "guidance must lie in",
        ("--schedule", "risin"): "did you mean 'rising'",
        ("--model", "pocket"): "is a text model",
        ("--inception", str(folder / "absent.pt")): "no Inception weights at",
    }
    for flags, message in cases.items():
        with pytest.raises(SystemExit) as stop:
            main(["eval", "image", "--model", str(folder / "run"), "--device", "cpu", *flags])
        complaint = capsys.readouterr().err
        assert stop.value.code == 2 and message in complaint and complaint.count("\n") == 1


def test_strips_show_states_and_changes() -> None:
    pixels = Pixels(2)
    start = torch.full((1, 12), 256)
    middle, end = start.clone(), torch.zeros_like(start)
    middle[0, :3] = 9  # the first pixel appears, and then changes; the second is masked again
    last = end.clone()
    last[0, 3:6] = 256
    path = Trajectory(torch.stack([start, middle, end, last]), (1.0, 0.6, 0.3, 0.0), (256,))
    shown = states(path, pixels)
    assert shown.shape == (4, 2, 2, 3) and shown[0, 0, 0].tolist() == [BLANK] * 3
    assert shown[1, 0, 0].tolist() == [9] * 3 and shown[3, 0, 1].tolist() == [BLANK] * 3
    maps = change_maps(path, pixels)
    green, blue, red = (list(bytes.fromhex(LOOKS[c].colour[1:])) for c in
                        (Change.UNMASK, Change.REFINE, Change.REMASK))  # fmt: skip
    assert maps[1, 0, 0].tolist() == green and maps[1, 1, 1].tolist() == [255] * 3
    assert maps[2, 0, 0].tolist() == blue and maps[2, 1, 1].tolist() == green
    assert maps[3, 0, 1].tolist() == red and (maps[0] == 255).all()
    assert picked_frames(path, 3).steps == 2 and picked_frames(path, 3).times[::2] == (1.0, 0.0)
    assert [s.shape for s in strips([(path, pixels)] * 2, frames=9)] == [(5, 4 * 3 - 1, 3)] * 2


def test_captions_leave_the_pictures_as_they_are() -> None:
    """Names to the left, heads above, what colours mean below; and the pixels of the blocks between."""
    blocks = [
        zoomed(image_grid(some_images(2, 8)), 4),
        zoomed(image_grid(some_images(4, 8)[2:]), 4),
    ]
    (height, width, _), plain = blocks[0].shape, captioned(blocks, ["one", "two"])
    margin = plain.shape[1] - width
    assert plain.shape[0] == 2 * height + 6 and margin > 20
    for block, top in zip(blocks, (0, height + 6), strict=True):
        np.testing.assert_array_equal(plain[top : top + height, margin:], block)
        assert (plain[top : top + height, :margin] < 100).any()  # ink
    whole = captioned(
        blocks, ["one", "two"], title="step", heads=["0", "9"], legend={"new": "#228B22"}
    )
    assert whole.shape[0] == plain.shape[0] + 2 * 25
    assert (whole[-25:] == [0x22, 0x8B, 0x22]).all(-1).any() and (whole[:25] < 100).any()
    np.testing.assert_array_equal(whole[25 : 25 + height, -width:], blocks[0])


def test_paint_makes_pictures(folder: Path, capsys: pytest.CaptureFixture) -> None:
    run, out = str(folder / "run"), folder / "painted"
    files = {name: str(out / name) for name in ("all.png", "strip.png", "film.gif", "run.json")}
    main(["paint", "--model", run, run, "--n", "4", "--steps", "3", "--guidance", "2", "--label", "1",
          "--device", "cpu", "--columns", "2", "--zoom", "1", "--out", files["all.png"],
          "--strip", files["strip.png"], "--trajectory", files["film.gif"]])  # fmt: skip
    with Image.open(files["all.png"]) as picture:
        page = np.asarray(picture)
        assert page.shape[0] == 2 * 17 + 6 and page.shape[1] > 17
        np.testing.assert_array_equal(page[:17, -17:], page[-17:, -17:])
    with Image.open(files["strip.png"]) as picture:
        assert picture.width > 5 * 9 - 1 and picture.height == 2 * 17 + 6 + 2 * 25
    with Image.open(files["film.gif"]) as picture:
        assert 2 < picture.n_frames <= 5  # equal ones in a row are one
    assert "8 forward passes" in " ".join(capsys.readouterr().err.split())
    main(["paint", "--model", run, "--n", "2", "--steps", "3", "--device", "cpu", "--zoom", "1", "--out",
          files["all.png"], "--trajectory", files["run.json"]])  # fmt: skip
    recording = read_recording(Path(files["run.json"]))
    last = np.stack([states(recording.trajectory, recording.decoder, i)[-1] for i in range(2)])
    with Image.open(files["all.png"]) as picture:
        np.testing.assert_array_equal(np.asarray(picture)[:, :17], image_grid(last, columns=2))
    assert recording.details["classes"] == "0, 1" and recording.details["steps"] == "3"


def test_bad_painting_gets_one_line(folder: Path, capsys: pytest.CaptureFixture) -> None:
    for flags, message in {
        ("--n", "0"): "n must lie in",
        ("--label", "7"): "labels must lie in 0..2, got 7",
        ("--label", "0", "-2"): "labels must lie in 0..2, got -2; -1 stands for none",
        ("--strip", "strip.gif"): "does not end in .png",
        ("--frames", "1"): "--frames 2",
        ("--steps", "0"): "at least 1 step",
        ("--trajectory", "film.mp4"): "does not end like a trajectory format",
        ("--out", "."): "it is a folder",
    }.items():
        with pytest.raises(SystemExit) as stop:
            main(["paint", "--model", str(folder / "run"), "--device", "cpu", *flags])
        complaint = capsys.readouterr().err
        assert stop.value.code == 2 and message in complaint and complaint.count("\n") == 1


def test_recipes_of_cifar10_differ_in_noise_alone() -> None:
    found = {path.stem: load_config(path) for path in (RECIPES / "cifar10").glob("*.yaml")}
    assert sorted(found) == ["gidd", "mdlm", "udlm", "xdlm-k0.001", "xdlm-k0.1", "xdlm-k0.5"]
    one = found["mdlm"]
    for method, config in found.items():
        out = replace(config.train, out=one.train.out)
        assert config.loss.weighting == ("dynamic" if method == "gidd" else "elbo")
        assert replace(config, process=one.process, loss=one.loss, train=out) == one
        assert config.process.k == (float(method.partition("-k")[2]) if "-k" in method else None)
    assert (one.optim.lr, one.optim.warmup, one.optim.ema, one.optim.weight_decay) == (
        2e-4, 5000, 0.9999, 0.0,
    )  # fmt: skip
    assert (one.train.steps, one.train.batch) == (300_000, 512)
    assert one.model == UNetConfig(n_classes=10) and SMALL.kind == one.model.kind


def test_recipes_of_imagenet_are_the_papers() -> None:
    """As for text, with classes, for half as long; noise as on CIFAR-10."""
    found = {path.stem: load_config(path) for path in (RECIPES / "imagenet").glob("*.yaml")}
    assert sorted(found) == ["gidd", "mdlm", "udlm", "xdlm-k0.001", "xdlm-k0.1", "xdlm-k0.5"]
    one = found["mdlm"]
    for method, config in found.items():
        out = replace(config.train, out=one.train.out)
        assert config.loss.weighting == ("dynamic" if method == "gidd" else "elbo")
        assert replace(config, process=one.process, loss=one.loss, train=out) == one
        assert config.process == load_config(RECIPES / "cifar10" / f"{method}.yaml").process
    text = load_config(RECIPES / "owt" / "mdlm.yaml")
    assert one.model == replace(text.model, n_classes=1000) and one.optim == text.optim
    assert (one.train.steps, one.train.batch, one.data.length) == (500_000, 512, 256)
    assert len({config.train.out for config in found.values()}) == len(found)


def test_the_small_recipe_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_grids(tmp_path)
    (tmp_path / "cifar10_test.webp").write_bytes((tmp_path / "cifar10_train_2.webp").read_bytes())
    monkeypatch.setenv("XDLM_DATA", str(tmp_path))
    config = load_config(RECIPES / "cpu-pixels.yaml")
    train = replace(
        config.train, out=str(tmp_path / "run"), steps=1, batch=2, eval_every=1, eval_rows=1
    )
    trainer = make_trainer(replace(config, train=train), tokenizer_of(config.data))
    assert sum(p.numel() for p in trainer.model.parameters()) < 1e6
    assert trainer.run() and torch.isfinite(trainer.model.out.weight).all()


def test_kernels_by_name_are_refused_before_anything_is_written(tmp_path: Path, capsys) -> None:
    """Of a linear head, and of one over the levels of pixels."""
    out = ["--train.out", str(tmp_path / "run"), "--train.device", "cpu", "--loss.impl", "fused"]
    save_image(grid(some_images(4, 8), 2), tmp_path / "some.png")
    pixels = ["--data.train", str(tmp_path / "some.png"), "--data.val", "None", "--data.length", "192",
              "--model.side", "8", "--model.multipliers", "1-2", "--model.attention", "4",
              "--model.n-classes", "0"]  # fmt: skip
    for name, more in (("cpu-tiny", ["--data.limit", "1"]), ("cpu-pixels", pixels)):
        file = str(ROOT / "recipes" / f"{name}.yaml")
        assert "'fused'" in complaint(capsys, "train", file, *more, *out)
        assert not (tmp_path / "run").exists()
