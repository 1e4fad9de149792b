"""Images as tokens: read in every form to the same bytes, refused in one line, trained on with labels."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from xdlm.api import load, tokenizer_of
from xdlm.cli.train import make_trainer
from xdlm.config import DataConfig, RunConfig, dump_config, parse_config
from xdlm.data import load_images
from xdlm.errors import UserError
from xdlm.evaluation.likelihood import likelihood
from xdlm.tokens import Pixels, read_tokenizer
from xdlm.training.checkpoint import open_checkpoint
from xdlm.training.trained import read_trained

Image = pytest.importorskip("PIL.Image")
PIXELS = Pixels(32)


def some_images(n: int = 6, side: int = 32) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (n, side, side, 3), dtype=np.uint8)


LABELS = [3, 9, 0, 1, 1, 5]


def grid(images: NDArray[np.uint8], columns: int) -> NDArray[np.uint8]:
    n, side = images.shape[:2]
    cells = images.reshape(n // columns, columns, side, side, 3).swapaxes(1, 2)
    return cells.reshape(n // columns * side, columns * side, 3)


def save_image(array: NDArray[np.uint8], file: Path) -> None:
    Image.fromarray(array).save(file, lossless=True)


def planes(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1)


def as_grids(folder: Path) -> None:
    images = some_images()
    save_image(grid(images[:4], 2), folder / "cifar10_train_1.webp")
    save_image(grid(images[4:], 2), folder / "cifar10_train_2.webp")
    (folder / "cifar10_train_labels.json").write_text(json.dumps(LABELS))


def as_binary(folder: Path) -> None:
    records = np.concatenate([np.array(LABELS, np.uint8)[:, None], planes(some_images())], 1)
    (folder / "data_batch_1.bin").write_bytes(records[:2].tobytes())
    (folder / "data_batch_2.bin").write_bytes(records[2:].tobytes())


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def as_binary_archive(folder: Path) -> None:
    as_binary(folder)
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz") as archive:
        for file in sorted(folder.glob("*.bin")):
            add_member(archive, f"cifar-10-batches-bin/{file.name}", file.read_bytes())
            file.unlink()


def as_python_2(content: bytes) -> bytes:
    """The same pickle with Python 2's strings in place of bytes, as CIFAR-10 has them."""
    string = {"SHORT_BINBYTES": ord("U"), "BINBYTES": ord("T")}
    changed = bytearray(content)
    for op, _, place in pickletools.genops(content):
        if op.name in string and place is not None:
            changed[place] = string[op.name]
    changed[1] = 2
    return bytes(changed)


def as_pickles(folder: Path, labels: list[int] = LABELS) -> None:
    with tarfile.open(folder / "cifar-10-python.tar.gz", "w:gz") as archive:
        for i, part in enumerate((slice(0, 2), slice(2, 6)), start=1):
            batch = {b"data": planes(some_images())[part], b"labels": labels[part]}
            content = as_python_2(pickle.dumps(batch, protocol=3))
            add_member(archive, f"cifar-10-batches-py/data_batch_{i}", content)


def as_unpacked_pickles(folder: Path) -> None:
    as_pickles(folder)
    archive = folder / "cifar-10-python.tar.gz"
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    archive.unlink()


def as_parquet(folder: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    cells = []
    for image in some_images():
        encoded = io.BytesIO()
        Image.fromarray(image).save(encoded, format="png")
        cells.append({"bytes": encoded.getvalue(), "path": None})
    table = pyarrow.table({"img": cells, "label": LABELS})
    parquet.write_table(table, folder / "train-00000-of-00001.parquet")


@pytest.mark.parametrize(
    "write",
    [as_grids, as_binary, as_binary_archive, as_pickles, as_unpacked_pickles, as_parquet],
    ids=lambda f: f.__name__,
)
def test_every_form_reads_to_the_same_images(write, tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    write(tmp_path / "cifar10")
    rows = load_images("cifar10:train", PIXELS, root=tmp_path)
    assert (len(rows), rows.length, rows.n_classes) == (6, 3072, 10)
    np.testing.assert_array_equal(PIXELS.decode(rows.take(range(6))), some_images())
    assert rows.labels([5, 0, 1]).tolist() == [5, 3, 9]
    assert len(load_images("cifar10:train", PIXELS, root=tmp_path, limit=4)) == 4


def test_mirror_images_follow_the_images(tmp_path: Path) -> None:
    as_grids(tmp_path)
    rows = load_images("cifar10:train", PIXELS, root=tmp_path, mirrored=True)
    assert len(rows) == 12 and rows.tail.size == 0
    np.testing.assert_array_equal(
        PIXELS.decode(rows.take([7, 1])), [some_images()[1][:, ::-1], some_images()[1]]
    )
    assert rows.labels([7, 1]).tolist() == [9, 9]
    assert rows.digest != load_images("cifar10:train", PIXELS, root=tmp_path).digest


def test_pixels_there_and_back() -> None:
    images = some_images()
    tokens = PIXELS.encode(images)
    assert tokens.shape == (6, 3072) and tokens[0, :3].tolist() == images[0, 0, 0].tolist()
    np.testing.assert_array_equal(PIXELS.decode(tokens), images)
    masked = tokens.astype(np.int64)
    masked[0, 0] = 256
    assert PIXELS.decode(masked, blank=7)[0, 0, 0, 0] == 7
    assert Pixels.from_json(PIXELS.to_json()) == PIXELS


class Danger:
    def __reduce__(self):
        return print, ("a pickle ran",)


def bad_cases(folder: Path) -> dict[str, str]:
    """Sources that cannot be read, each with what the error must say."""
    images = some_images()
    save_image(grid(images, 3)[:-1], folder / "uneven.png")
    Image.fromarray(grid(images, 3)[..., 0]).save(folder / "grey.png")
    save_image(grid(images, 3), folder / "whole.webp")
    (folder / "cut.webp").write_bytes((folder / "whole.webp").read_bytes()[:3000])
    (folder / "text.png").write_text("not an image")
    (folder / "cut.bin").write_bytes(b"\1" * 3000)
    (folder / "label.bin").write_bytes(b"\12" * 3073)
    (folder / "no.parquet").write_bytes(b"PAR1")
    save_image(grid(images, 3), folder / "few.png")
    (folder / "few_labels.json").write_text("[1, 2]")
    save_image(grid(images, 3), folder / "odd.png")
    (folder / "odd_labels.json").write_text("[1, 2, 3, 4, -1, 0]")
    return {
        "uneven.png": "96 x 63 pixels", "grey.png": "grey-scale", "cut.webp": "damaged",
        "text.png": "not an image", "cut.bin": "truncated", "label.bin": "label 0 is 10, outside 0..9",
        "no.parquet": "damaged or not parquet", "few.png": "2 labels for 6 images",
        "odd.png": "label 4 is -1", "absent.png": "no images at", "more.jpg": "no images at",
    }  # fmt: skip


def test_bad_images_get_one_line(tmp_path: Path) -> None:
    for name, message in bad_cases(tmp_path).items():
        with pytest.raises(UserError, match=message) as caught:
            load_images(str(tmp_path / name), PIXELS)
        assert "\n" not in str(caught.value) and "BytesIO" not in str(caught.value)
    for limit in (0, -1):
        with pytest.raises(UserError, match=f"a limit must be at least 1 image, got {limit}"):
            load_images(str(tmp_path / "whole.webp"), PIXELS, limit=limit)


def test_cifar_labels_and_splits_are_checked(tmp_path: Path) -> None:
    as_grids(tmp_path)
    (tmp_path / "cifar10_train_labels.json").write_text("[1, 2, 3, 4, 11, 0]")
    with pytest.raises(UserError, match=r"label 4 is 11, outside 0\.\.9"):
        load_images("cifar10:train", PIXELS, root=tmp_path)
    (tmp_path / "archive").mkdir()
    as_pickles(tmp_path / "archive", [1, 2, 3, -3, 4, 0])
    with pytest.raises(UserError, match=r"label 3 is -3, outside 0\.\.9"):
        load_images("cifar10:train", PIXELS, root=tmp_path / "archive")
    with pytest.raises(UserError, match="no CIFAR-10 under"):
        load_images("cifar10:test", PIXELS, root=tmp_path)
    with pytest.raises(UserError, match="did you mean 'train'"):
        load_images("cifar10:trian", PIXELS, root=tmp_path)


def test_a_pickle_is_read_and_never_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz") as archive:
        content = pickle.dumps({b"data": Danger(), b"labels": []}, protocol=3)
        add_member(archive, "cifar-10-batches-py/data_batch_1", content)
    with pytest.raises(UserError, match="print: refused"):
        load_images("cifar10:train", PIXELS, root=tmp_path)
    assert "a pickle ran" not in capsys.readouterr().out


def test_settings_of_the_other_kind_are_refused() -> None:
    with pytest.raises(UserError, match="flips has no meaning for text"):
        DataConfig(flips=True)
    with pytest.raises(UserError, match="frame has no meaning for images"):
        DataConfig(tokenizer="pixels", length=3072, frame=True)
    with pytest.raises(UserError, match="not that of a square colour image"):
        tokenizer_of(DataConfig(tokenizer="pixels", length=3000))
    with pytest.raises(UserError, match=r"process\.mask_id has no meaning for images"):
        parse_config("{data: {tokenizer: pixels, length: 3072}, process: {mask_id: 3}}")


def recipe(folder: Path, model: str, **data: object) -> RunConfig:
    """A small run on images of 8 x 8."""
    save_image(grid(some_images(12, 8) // 4, 4), folder / "some.png")
    (folder / "some_labels.json").write_text(json.dumps([0, 1, 2] * 4))
    source = json.dumps(str(folder / "some.png"))
    return parse_config(f"""
    process: {{kind: mixed, k: 0.5}}
    model: {model}
    data: {{train: {source}, val: {source}, tokenizer: pixels, length: 192, flips: true}}
    optim: {{lr: 1.0e-2, warmup: 2, ema: 0.5}}
    train: {{out: {json.dumps(str(folder / "run"))}, steps: 4, batch: 6, micro_batch: 3,
             eval_every: 4, save_every: 4, log_every: 2, device: cpu}}
    """)


DIT = "{depth: 1, width: 16, heads: 2, cond_width: 8, n_classes: 3, time_conditioning: true}"


def test_training_on_labelled_images(tmp_path: Path) -> None:
    config = recipe(tmp_path, DIT)
    assert parse_config(dump_config(config)) == config
    trainer = make_trainer(config, tokenizer_of(config.data))
    batch = next(iter(trainer.loader.batches(0)))[0]
    assert batch.tokens.shape == (3, 192) and batch.label is not None
    trainer.run()
    (folder,) = (tmp_path / "run").glob("step-*")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tokenizer() == read_tokenizer(folder / "tokenizer.json") == Pixels(8)
    trained = read_trained(checkpoint)
    assert trained.process is not None and trained.process.vocab.size == 257
    with pytest.raises(UserError, match="makes images: see xdlm paint"):
        load(tmp_path / "run")


def test_classes_must_be_those_of_the_data(tmp_path: Path) -> None:
    config = recipe(tmp_path, DIT.replace("n_classes: 3", "n_classes: 2"))
    with pytest.raises(UserError, match=r"labels go up to 2, but the model knows classes 0\.\.1"):
        make_trainer(config, tokenizer_of(config.data))
    known = parse_config(dump_config(config).replace("n_classes: 2", "n_classes: 3"))
    trainer = make_trainer(known, tokenizer_of(known.data))
    save_image(grid(some_images(4, 8), 2), tmp_path / "other.png")
    (tmp_path / "other_labels.json").write_text("[0, 1, 3, 2]")
    held_out = replace(known, data=replace(known.data, val=str(tmp_path / "other.png")))
    with pytest.raises(UserError, match=r"labels go up to 3, but the model knows classes 0\.\.2"):
        make_trainer(held_out, tokenizer_of(known.data))
    with pytest.raises(UserError, match="labels go up to 3"):
        likelihood(trainer.model, trainer.process, load_images(held_out.data.val, Pixels(8)))
    (tmp_path / "some_labels.json").unlink()
    with pytest.raises(UserError, match="needs data with labels"):
        make_trainer(config, tokenizer_of(config.data))


def test_a_model_without_classes_is_not_told_any(tmp_path: Path) -> None:
    config = recipe(tmp_path, DIT.replace("n_classes: 3, ", ""))
    trainer = make_trainer(config, tokenizer_of(config.data))
    assert next(iter(trainer.loader.batches(0)))[0].label is None
