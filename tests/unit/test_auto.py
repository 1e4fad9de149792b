"""Folders that hubs hold: read by transformers' own classes, and back, with the noise still known."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_llada import make_folder
from test_pretrained import make
from torch import Tensor

from xdlm import UserError, load
from xdlm.api import Model, load_tokenizer
from xdlm.cli.main import main
from xdlm.config import ProcessConfig
from xdlm.models import build_denoiser

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 90, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def auto():  # type: ignore[no-untyped-def]
    import xdlm.auto

    return xdlm.auto


@torch.no_grad()
def logits_of(model: Model) -> Tensor:
    return model.denoiser(TOKENS, torch.zeros(2))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """A LLaDA as it is published, one of ours of mixed noise, and a DiT."""
    llada = load(make_folder(tmp_path / "llada"), device="cpu")
    mixed = replace(llada, config=replace(llada.config, process=ProcessConfig("mixed", k=0.2)))
    mixed.publish(tmp_path / "mixed", shard_bytes=40_000)
    load("pocket", device="cpu").publish(tmp_path / "dit")
    return {name: tmp_path / name for name in ("llada", "mixed", "dit")}


@pytest.mark.parametrize("name", ["llada", "mixed", "dit"])
def test_transformers_reads_and_writes_our_folders(auto, folders, tmp_path, name: str) -> None:
    folder, again = folders[name], tmp_path / "again"
    before = load(folder, device="cpu")
    for kind in (transformers.AutoModel, transformers.AutoModelForMaskedLM):
        theirs = kind.from_pretrained(folder).eval()
        with torch.no_grad():
            torch.testing.assert_close(theirs(TOKENS).logits, logits_of(before), rtol=0, atol=1e-4)
    names = {key for key, _ in before.denoiser.named_parameters()}
    assert {key for key, _ in theirs.named_parameters()} == names
    theirs.save_pretrained(again)
    shutil.copy(folder / "tokenizer.json", again)
    after = load(again, device="cpu")
    assert torch.equal(logits_of(after), logits_of(before))
    assert after.config.process == before.config.process
    assert (after.step, after.weights, after.length) == (before.step, before.weights, before.length)


def test_noise_steps_and_rows_travel_with_the_folder(folders) -> None:
    mixed, dit, pocket = (
        load(x, device="cpu") for x in (folders["mixed"], folders["dit"], "pocket")
    )
    assert mixed.config.process == ProcessConfig("mixed", k=0.2)
    assert dit.config.process == pocket.config.process and dit.config.model == pocket.config.model
    assert (dit.length, dit.step, dit.weights) == (pocket.length, pocket.step, pocket.weights)
    assert torch.equal(
        dit.sample(1, steps=2, length=8).tokens, pocket.sample(1, steps=2, length=8).tokens
    )
    said = json.loads((folders["dit"] / "config.json").read_text())["xdlm"]
    assert set(said["data"]) == {"length", "bos", "eos", "frame"}, "no paths of whoever trained it"
    card = (folders["mixed"] / "README.md").read_text()
    assert "mixed noise (k = 0.2)" in card and "the mask is 92" in card
    assert "AutoModel.from_pretrained" in card


def test_padding_and_devices(auto, folders) -> None:
    model = transformers.AutoModel.from_pretrained(folders["llada"]).eval()
    seen = torch.ones_like(TOKENS)
    seen[:, 8:] = 0
    with torch.no_grad():
        alone, padded = model(TOKENS[:, :8]).logits, model(TOKENS, attention_mask=seen).logits
        torch.testing.assert_close(padded[:, :8], alone, rtol=0, atol=1e-5)
        assert model.to(torch.bfloat16).denoiser.head_weight.dtype == torch.bfloat16
        assert model(TOKENS).logits.dtype == torch.float32
    with pytest.raises(UserError, match="a loss needs the noise"):
        model(TOKENS, labels=TOKENS)
    dit = transformers.AutoModel.from_pretrained(folders["dit"])
    with pytest.raises(UserError, match="takes no padding"):
        dit(TOKENS, attention_mask=seen)
    assert dit.train().denoiser.training and not dit.eval().denoiser.training


def test_fresh_weights_are_those_that_the_backbone_begins_with(auto, folders) -> None:
    config = transformers.AutoConfig.from_pretrained(folders["llada"])
    torch.manual_seed(3)
    theirs = transformers.AutoModel.from_config(config)
    torch.manual_seed(3)
    ours = build_denoiser(load(folders["llada"], device="cpu").config.model, 96)
    for (name, parameter), (_, other) in zip(
        theirs.named_parameters(), ours.named_parameters(), strict=True
    ):
        assert torch.equal(parameter, other), name


def test_nothing_of_a_folder_is_run(tmp_path: Path) -> None:
    """In a process of its own, on the published layout with its remote code beside it."""
    folder = make_folder(tmp_path / "hub", auto_map={"AutoConfig": "evil.C", "AutoModel": "evil.M"})
    (folder / "evil.py").write_text("raise SystemExit('was run')")
    code = (
        "import xdlm.auto\nfrom transformers import AutoModel\n"
        f"print(type(AutoModel.from_pretrained({str(folder)!r})).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "LladaForMaskedLM"


def test_an_adapted_model_comes_back_with_its_shift_and_noise(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("pocket")
    lm, run, hub = (tmp_path / name for name in ("lm", "run", "hub"))
    make(lm, "llama", vocab=tokenizer.size)
    (lm / "tokenizer.json").write_text(tokenizer.to_json())
    main(["import", str(lm), "--from", "transformers", "--shift", "--out", str(run)])
    before = load(run, device="cpu")
    mixed = replace(before, config=replace(before.config, process=ProcessConfig("mixed", k=0.1)))
    mixed.publish(hub)
    shutil.rmtree(lm)
    after = load(hub, device="cpu")
    assert after.config.model.shift and after.config.process == ProcessConfig("mixed", k=0.1)
    assert torch.equal(logits_of(after), logits_of(before))
    card = (hub / "README.md").read_text()
    assert "look both ways" in card and "(llama of transformers)" in card
    after.publish(tmp_path / "twice")
    assert torch.equal(logits_of(load(tmp_path / "twice", device="cpu")), logits_of(before))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"process": {}}, "is damaged: it lacks"),
        ("noise", "is damaged: it lacks"),
        ({"step": "x"}, "is damaged: step and weights"),
        ({"process": {"kind": "mixd"}}, "did you mean 'mixed'"),
        ({"model": {"kind": "dit", "wdth": 4}}, "unknown key 'wdth'; did you mean 'width'"),
    ],
)
def test_entries_that_cannot_be_read_are_named(folders, entry, says: str) -> None:
    file = folders["dit"] / "config.json"
    tree = json.loads(file.read_text())
    whole = len(entry) == 1 and says.startswith("is damaged: it lacks")
    tree["xdlm"] = entry if whole or isinstance(entry, str) else {**tree["xdlm"], **entry}
    file.write_text(json.dumps(tree))
    with pytest.raises(UserError, match=says):
        load(folders["dit"], device="cpu")
