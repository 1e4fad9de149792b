"""Checkpoints of other repositories: the same logits under our names, safely read."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_cli import complaint
from tokenizers import Tokenizer, models

from xdlm import UserError, Vocab, load
from xdlm.api import Model
from xdlm.cli.main import main
from xdlm.training.foreign import Said, read_foreign

PARITY = Path(__file__).parents[1] / "parity" / "dits"
N_STATES = 37


def write_tokenizer(folder: Path, *last: str) -> Path:
    n = N_STATES if last else N_STATES - 1  # a mask that is no token is a state of its own
    words = [f"w{i}" for i in range(n - 1 - len(last))] + ["<|endoftext|>", *last]
    vocab = {word: i for i, word in enumerate(words)}
    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(models.WordLevel(vocab, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


class Node:
    """Stands for a configuration's class, which whoever reads the file need not have."""

    def __init__(self, **content) -> None:
        self.__dict__.update(content)


def lightning(file: Path, tensors: dict[str, torch.Tensor], *, told: bool = False) -> None:
    """As Lightning saves it: prefixed names, averages without names, a configuration of some class."""
    state = OrderedDict((f"backbone.{key}", value) for key, value in tensors.items())
    state["noise.step"] = torch.zeros(1)
    averages = [value + 1 for key, value in tensors.items() if not key.startswith("rotary_emb")]
    torch.save(
        {"state_dict": state, "global_step": 7, "ema": {"decay": 0.9, "shadow_params": averages},
         "hyper_parameters": {"config": Node(_content={"time_conditioning": Node(_val=told)})}},
        file,
    )  # fmt: skip


@pytest.mark.parametrize("repository", ["mdlm", "udlm", "xdlm", "gidd"])
def test_logits_are_those_of_the_repository(tmp_path: Path, repository: str) -> None:
    special = ("[PAD]", "[MASK]") if repository in ("gidd", "udlm") else ()
    tokenizer = write_tokenizer(tmp_path / "tokenizer", *special)
    flags = {"xdlm": ["--process.k", "0.1"], "gidd": ["--process.p-uniform", "0.2"]}
    main([
        "import", str(PARITY / f"{repository}.safetensors"), "--from", repository,
        "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--length", "11",
        *flags.get(repository, []),
    ])  # fmt: skip
    model = load(tmp_path / "out", device="cpu")
    mask_id = None if repository == "udlm" else N_STATES - 1
    assert model.process.vocab == Vocab(N_STATES, mask_id)
    expected = load_file(PARITY / f"{repository}-outputs.safetensors")
    with torch.no_grad():
        logits = model.denoiser(expected["z"].long(), expected["t"])
    torch.testing.assert_close(logits, expected["logits"][..., :N_STATES], rtol=1e-5, atol=1e-5)
    again = load(model_saved(model, tmp_path / "again"), device="cpu")
    with torch.no_grad():
        assert torch.equal(again.denoiser(expected["z"].long(), expected["t"]), logits)


def model_saved(model: Model, folder: Path) -> Path:
    model.publish(folder)
    return folder


@pytest.mark.parametrize(
    ("repository", "config", "kind", "time_conditioning"),
    [
        ("udlm", None, "level-dit", True),
        ("udlm", {"time_conditioning": True}, "level-dit", True),
        ("udlm", {"time_conditioning": False}, "dit", False),
        ("mdlm", {"time_conditioning": False}, "dit", False),
        ("mdlm", {"time_conditioning": True}, "level-dit", True),
    ],
)
def test_what_a_model_is_told_stands_beside_its_weights(
    tmp_path: Path, repository: str, config: dict | None, kind: str, time_conditioning: bool
) -> None:
    write_tokenizer(tmp_path, *(("[MASK]",) if repository == "udlm" else ()))
    shutil.copy(PARITY / "mdlm.safetensors", tmp_path / "model.safetensors")
    if config is not None:
        said = {**config, "model_length": 21, "n_heads": 4}
        (tmp_path / "config.json").write_text(json.dumps(said))
    main(["import", str(tmp_path), "--from", repository, "--out", str(tmp_path / "out")])
    found = load(tmp_path / "out", device="cpu").config
    assert (found.model.kind, found.model.time_conditioning) == (kind, time_conditioning)
    assert (found.data.length, found.model.heads) == ((1024, 2) if config is None else (21, 4))


def test_gidd_says_its_own_noise(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "[PAD]", "[MASK]")
    shutil.copy(PARITY / "gidd.safetensors", tmp_path / "model.safetensors")
    said = {"p_uniform": 0.1, "max_seq_len": 16, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(said))
    main(["import", str(tmp_path), "--from", "gidd", "--out", str(tmp_path / "out")])
    found = load(tmp_path / "out", device="cpu").config
    assert (found.process.p_uniform, found.data.length) == (0.1, 16)


def test_lightning_checkpoints(tmp_path: Path) -> None:
    tensors = load_file(PARITY / "mdlm.safetensors")
    lightning(tmp_path / "a.ckpt", tensors)
    raw, averaged = (read_foreign(tmp_path / "a.ckpt", averaged=flag) for flag in (False, True))
    assert (raw.step, raw.weights, averaged.weights) == (7, "raw", "ema")
    assert raw.said == Said(time_conditioning=False)
    for name, tensor in tensors.items():
        assert torch.equal(raw.tensors[name], tensor)
        plus = 0 if name.startswith("rotary_emb") else 1
        assert torch.equal(averaged.tensors[name], tensor + plus)
    lightning(tmp_path / "b.ckpt", tensors, told=True)
    write_tokenizer(tmp_path, "[MASK]")
    main(["import", str(tmp_path / "b.ckpt"), "--from", "udlm", "--out", str(tmp_path / "o")])
    assert load(tmp_path / "o", device="cpu").config.model.kind == "level-dit"


class Harm:
    def __reduce__(self):
        return os.mkdir, (os.environ["XDLM_HARM"],)


def test_nothing_that_a_file_holds_is_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDLM_HARM", str(tmp_path / "harm"))
    torch.save({"state_dict": {}, "callbacks": Harm()}, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match="cannot be read safely"):
        read_foreign(tmp_path / "a.ckpt")
    assert not (tmp_path / "harm").exists()
    (tmp_path / "b.ckpt").write_bytes(b"junk")
    with pytest.raises(UserError, match="cannot be read safely"):
        read_foreign(tmp_path / "b.ckpt")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--from", "xdlm"], "needs --process.k"),
        (["--from", "gidd"], "needs --process.p-uniform"),
        (["--from", "udlm"], "37 states, the tokenizer and the noise make 36"),
        (["--from", "mdlm", "--shift"], "--shift has no meaning for --from mdlm"),
        (["--from", "llada"], "--tokenizer has no meaning for --from llada"),
    ],
)
def test_bad_imports_say_why(tmp_path: Path, capsys, flags: list[str], says: str) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    with pytest.raises(SystemExit) as stop:
        main(["import", str(PARITY / "mdlm.safetensors"), *flags, "--tokenizer", str(tokenizer),
              "--out", str(tmp_path / "out")])  # fmt: skip
    assert stop.value.code == 2 and says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_import_needs_a_folder_where_one_is_meant(tmp_path: Path, capsys) -> None:
    command = ("import", str(PARITY / "mdlm.safetensors"), "--out", str(tmp_path / "out"), "--from")
    assert "no folder at" in complaint(capsys, *command, "llada")
    assert "--heads has no meaning" in complaint(capsys, *command, "transformers", "--heads", "2")


def test_surplus_and_missing_weights_are_named(tmp_path: Path) -> None:
    from xdlm.training.foreign import Foreign, dit_shape, dit_tensors

    tensors = load_file(PARITY / "mdlm.safetensors")
    shape = dit_shape(Foreign(tensors, "ema", 0), heads=None, told="nothing")
    with pytest.raises(UserError, match="unknown y_embedder"):
        dit_tensors(Foreign({**tensors, "y_embedder.w": torch.zeros(1)}, "ema", 0), shape, 37)
    del tensors["blocks.1.mlp.2.bias"]
    with pytest.raises(UserError, match=r"they lack blocks.1.mlp.2.bias"):
        dit_tensors(Foreign(tensors, "ema", 0), shape, 37)


class Code:
    def __reduce__(self):
        return exec, (f"import os; os.mkdir({os.environ['XDLM_HARM']!r})",)


def test_functions_in_a_file_become_inert(tmp_path: Path, monkeypatch) -> None:
    """What is not refused outright is put aside unrun, and the weights beside it are read."""
    monkeypatch.setenv("XDLM_HARM", str(tmp_path / "harm"))
    tensors = load_file(PARITY / "mdlm.safetensors")
    state = {f"backbone.{key}": value for key, value in tensors.items()}
    torch.save({"state_dict": state, "callbacks": Code()}, tmp_path / "a.ckpt")
    found = read_foreign(tmp_path / "a.ckpt", averaged=False)
    assert found.tensors.keys() == tensors.keys()
    assert not (tmp_path / "harm").exists()
