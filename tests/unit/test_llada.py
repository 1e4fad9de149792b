"""LLaDA: parity with the published code, names and shapes of the published weights."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_cli import RECIPE, complaint
from tokenizers import Tokenizer, models

from xdlm import UserError, Vocab, load
from xdlm.cli.main import main
from xdlm.config import ProcessConfig
from xdlm.models import LladaConfig, build_denoiser
from xdlm.models.llada import Llada

PARITY = Path(__file__).parents[1] / "parity" / "llada"
CPT = str(Path(__file__).parents[2] / "recipes" / "llada" / "cpt-xdlm.yaml")
SMALL = LladaConfig(
    depth=3, width=32, heads=4, mlp_width=80, vocab_size=96, mask_id=92, context=4096
)


def published() -> tuple[Llada, dict[str, torch.Tensor]]:
    model = Llada(SMALL, SMALL.vocab_size).eval()
    model.load_state_dict(load_file(PARITY / "model.safetensors"), strict=True)
    return model, load_file(PARITY / "outputs.safetensors")


def test_logits_are_those_of_the_published_code() -> None:
    model, outputs = published()
    with torch.no_grad():
        logits = model(outputs["tokens"].long(), torch.zeros(2))
        far = model(outputs["far"].long(), torch.zeros(1))[:, -3:]
    torch.testing.assert_close(logits, outputs["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(far, outputs["far_logits"], rtol=0, atol=1e-5)


def test_names_and_shapes_of_the_8b_weights() -> None:
    with torch.device("meta"):
        model = build_denoiser(LladaConfig(), 126464)
    square, wide = (4096, 4096), (12288, 4096)
    block = dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), square)
    block |= {"ff_proj": wide, "up_proj": wide, "ff_out": wide[::-1]}
    block |= {"attn_norm": (4096,), "ff_norm": (4096,)}
    expected = {f"blocks.{i}.{name}": shape for i in range(32) for name, shape in block.items()}
    expected |= {"wte": (126464, 4096), "ff_out": (126464, 4096), "ln_f": (4096,)}
    found = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert found == {f"model.transformer.{n}.weight": s for n, s in expected.items()}
    assert sum(p.numel() for p in model.parameters()) == 8_015_581_184


def test_padding_changes_nothing() -> None:
    """On either side: positions are relative."""
    model, outputs = published()
    row = outputs["tokens"][:1, :20].long()
    junk = torch.full((1, 5), 7)
    with torch.no_grad():
        alone = model.head(model.trunk(row, torch.zeros(1)))
        for pieces, where in (([row, junk], slice(0, 20)), ([junk, row], slice(5, 25))):
            z = torch.cat(pieces, dim=1)
            padding = torch.ones_like(z, dtype=torch.bool)
            padding[:, where] = False
            padded = model.head(model.trunk(z, torch.zeros(1), padding=padding))[:, where]
            torch.testing.assert_close(padded, alone, rtol=0, atol=1e-4)


def make_folder(folder: Path, **changes) -> Path:
    """A published folder: the parity model with a tokenizer of its size."""
    folder.mkdir()
    shutil.copy(PARITY / "model.safetensors", folder)
    tree = json.loads((PARITY / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**tree, **changes}))
    words = [f"w{i}" for i in range(91)] + ["<|endoftext|>", "<|mdm_mask|>"]
    vocab = {word: i for i, word in enumerate(words)}
    Tokenizer(models.WordLevel(vocab, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def test_a_published_folder_is_a_model_of_masked_noise(tmp_path: Path) -> None:
    model = load(make_folder(tmp_path / "hub"), device="cpu")
    assert model.config.model == SMALL and model.config.process.kind == "masked"
    assert model.process.vocab == Vocab(96, 92)
    _, outputs = published()
    with torch.no_grad():
        logits = model.denoiser(outputs["tokens"].long(), torch.zeros(2))
    torch.testing.assert_close(logits, outputs["logits"], rtol=0, atol=1e-5)
    sample = model.sample(2, steps=4, length=8)
    assert (sample.tokens != 92).all()
    assert load(
        tmp_path / "hub", device="cpu", precision="bfloat16"
    ).denoiser.head_weight.dtype == (torch.bfloat16)
    with pytest.raises(UserError, match="no raw ones"):
        load(tmp_path / "hub", weights="raw")


@pytest.mark.parametrize("shard_bytes", [10**9, 40_000])
def test_written_back_as_it_was_published(tmp_path: Path, shard_bytes: int) -> None:
    model = load(make_folder(tmp_path / "hub"), device="cpu")
    model.publish(tmp_path / "again", shard_bytes=shard_bytes)
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 10**9)
    tensors = {key: value for file in files for key, value in load_file(file).items()}
    before = load_file(PARITY / "model.safetensors")
    assert tensors.keys() == before.keys()
    assert all(torch.equal(tensors[key], before[key]) for key in before)
    theirs = json.loads((PARITY / "config.json").read_text())
    ours = json.loads((tmp_path / "again" / "config.json").read_text())
    free = {"init_device", "mlp_ratio", "eos_token_id", "pad_token_id", "xdlm"}
    assert {k: v for k, v in ours.items() if k not in free} == {
        k: v for k, v in theirs.items() if k not in free
    }
    again = load(tmp_path / "again", device="cpu")
    assert again.config.model == model.config.model


def test_what_is_written_in_half_is_so_alone(tmp_path: Path) -> None:
    """Weights are cast on their way out, as many to a file as fit in it then; the model stays as it is."""
    model = load(make_folder(tmp_path / "hub"), device="cpu")
    model.publish(tmp_path / "half", dtype=torch.bfloat16, shard_bytes=20_000)
    model.publish(tmp_path / "whole", shard_bytes=40_000)
    half, whole = (sorted((tmp_path / name).glob("*.safetensors")) for name in ("half", "whole"))
    assert [file.name for file in half] == [file.name for file in whole]
    before = load_file(PARITY / "model.safetensors")
    found = {key: value for file in half for key, value in load_file(file).items()}
    assert all(torch.equal(found[key], before[key].bfloat16()) for key in before)
    index = json.loads((tmp_path / "half" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    assert model.denoiser.head_weight.dtype == torch.float32


def test_import_and_export(tmp_path: Path) -> None:
    hub, run, back = make_folder(tmp_path / "hub"), tmp_path / "run", tmp_path / "back"
    main(["import", str(hub), "--from", "llada", "--out", str(run)])
    assert load(run, device="cpu").config.model == SMALL
    main(["export", "--model", str(run), "--format", "llada", "--out", str(back)])
    tensors, before = load_file(back / "model.safetensors"), load_file(PARITY / "model.safetensors")
    assert all(torch.equal(tensors[key], before[key]) for key in before)
    assert "masked noise" in (back / "README.md").read_text()


def test_a_llada_of_mixed_noise_is_imported_as_such(tmp_path: Path, capsys) -> None:
    """Published weights do not say that they were trained on as XDLM; those that we write do."""
    hub, run, back = make_folder(tmp_path / "hub"), tmp_path / "run", tmp_path / "back"
    command = ("import", "--from", "llada")
    main([*command, str(hub), "--process.k", "0.1", "--out", str(run)])
    assert load(run, device="cpu").config.process == ProcessConfig("mixed", k=0.1)
    main(["export", "--model", str(run), "--format", "llada", "--out", str(back)])
    capsys.readouterr()
    nowhere = ("--out", str(tmp_path / "x"))
    line = complaint(capsys, *command, str(back), "--process.k", "0.5", *nowhere)
    assert "says that its noise is mixed" in line
    line = complaint(capsys, *command, str(hub), "--process.p-uniform", "0.5", *nowhere)
    assert "about checkpoints of gidd" in line
    assert "k must lie in" in complaint(capsys, *command, str(hub), "--process.k", "2", *nowhere)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weight_tying": True}, "weight_tying is True, and only False can be run"),
        ({"n_kv_heads": 2}, "n_kv_heads differs"),
        ({"n_layers": 2}, "holds an unknown model.transformer.blocks.2"),
        ({"n_layers": 4}, "lacks model.transformer.blocks.3"),
        ({"mlp_hidden_size": 64}, "has shape"),
        ({"d_model": "wide"}, "config.json: d_model: expected a whole number, got 'wide'"),
        ({"d_model": None}, "config.json lacks d_model: it does not describe a LLaDA"),
        (
            {"embedding_size": None, "vocab_size": None},
            "config.json lacks embedding_size: it does not describe a LLaDA",
        ),
        ({"model_type": 7}, "config.json has no model_type: not a text model"),
    ],
)
def test_folders_that_do_not_fit_are_named(tmp_path: Path, change: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(make_folder(tmp_path / "hub", **change), device="cpu")


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        ((), "lacks model_type: it does not say what the model is"),
        (("model_type",), "lacks n_layers, d_model, n_heads, mlp_hidden_size, embedding_size, "
         "mask_token_id, max_sequence_length, rope_theta, rms_norm_eps: it does not describe a LLaDA"),
        (("model_type", "n_kv_heads", "n_layers"), "lacks d_model, n_heads, "),
    ],
)  # fmt: skip
def test_what_a_configuration_lacks_is_named(tmp_path: Path, capsys, kept, says: str) -> None:
    hub = make_folder(tmp_path / "hub")
    file = hub / "config.json"
    tree = json.loads(file.read_text())
    file.write_text(json.dumps({name: tree[name] for name in kept}))
    for command in (
        ["import", str(hub), "--from", "llada", "--out", str(tmp_path / "run")],
        ["sample", "--model", str(hub)],
        ["train", RECIPE, "--train.start", str(hub), "--train.out", str(tmp_path / "run"),
         "--data.limit", "1", "--train.eval-every", "0"],
    ):  # fmt: skip
        assert f"{file} {says}" in complaint(capsys, *command)
    assert [path.name for path in tmp_path.iterdir()] == ["hub"], "nothing half-written"


@pytest.mark.parametrize(
    ("there", "here", "says"),
    [
        ({}, {}, "its depth is 3, and model.depth is 32"),
        ({}, {"heads": 2}, "its heads is 4, and model.heads is 2"),
        ({"rope_theta": 1e4}, {}, "its rope_theta is 10000.0, and model.rope_theta is 500000.0"),
    ],
)
def test_a_run_that_starts_with_another_llada_ends_before_it_is_made(
    tmp_path: Path, capsys, there: dict, here: dict, says: str
) -> None:
    """The recipe's own shape has 32 GB of weights; another number of heads has the same tensors."""
    hub = make_folder(tmp_path / "hub", **there)
    shape = {**asdict(SMALL), **here} if there or here else {}
    flags = [f"--model.{name.replace('_', '-')}={value}" for name, value in shape.items()]
    line = complaint(capsys, "train", CPT, *flags, "--train.start", str(hub),
                     "--train.out", str(tmp_path / "run"), "--train.device", "cpu")  # fmt: skip
    assert f"{hub} does not fit this recipe's model: {says}" in line
    assert [path.name for path in tmp_path.iterdir()] == ["hub"], "nothing half-written"


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "hub")
    load(folder, device="cpu").publish(tmp_path / "shards", shard_bytes=40_000)
    next((tmp_path / "shards").glob("model-00002-*")).unlink()
    with pytest.raises(UserError, match="incomplete: model-00002"):
        load(tmp_path / "shards", device="cpu")
    (folder / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(UserError, match="damaged safetensors"):
        load(folder, device="cpu")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"neither model.safetensors"):
        load(folder, device="cpu")
