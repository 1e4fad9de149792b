"""LoRA: what is trained and what is not, checkpoints, merging."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cli import complaint
from test_pretrained import make as make_pretrained

from xdlm import UserError, load
from xdlm.api import load_tokenizer
from xdlm.cli.main import main
from xdlm.config import LoraConfig, OptimConfig, RunConfig, load_config, parse_config
from xdlm.data import Rows, load_rows
from xdlm.files import sha256_of
from xdlm.models import (
    PRESETS,
    DiTConfig,
    LladaConfig,
    ModelConfig,
    PretrainedConfig,
    build_denoiser,
)
from xdlm.training.adapters import add_adapters, frozen_parameters, trained_parameters
from xdlm.training.checkpoint import (
    BASE,
    META,
    MODEL,
    Content,
    latest_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from xdlm.training.trained import find_model
from xdlm.training.trainer import Trainer

pytest.importorskip("peft")
RECIPE = Path(__file__).parents[2] / "recipes" / "cpu-tiny.yaml"
TOKENIZER = load_tokenizer("pocket")
LLADA = LladaConfig(
    depth=2, width=32, heads=2, mlp_width=48, vocab_size=TOKENIZER.size + 3,
    mask_id=TOKENIZER.size + 1,
)  # fmt: skip
BACKBONES = {"dit": PRESETS["nano"], "llada": LLADA}


@pytest.fixture(scope="module")
def rows() -> Rows:
    return load_rows("corpus:train", TOKENIZER, 16, limit=1)


def config_of(tmp_path: Path, model: ModelConfig, **lora) -> RunConfig:
    """A run beside the frozen weights of a random model, which is put where it says."""
    config = load_config(RECIPE)
    start = tmp_path / "start"
    train = replace(
        config.train, out=str(tmp_path / "run"), start=str(start), steps=3, batch=4, micro_batch=2,
        eval_every=0, save_every=0, device="cpu", seed=1,
    )  # fmt: skip
    plain = replace(
        config, model=model, data=replace(config.data, length=16),
        optim=OptimConfig(lr=0.02, warmup=0, ema=0.0),
        train=train,
    )  # fmt: skip
    torch.manual_seed(0)
    base = build_denoiser(model, plain.vocab(TOKENIZER.size).size)
    with torch.no_grad():
        for parameter in base.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    tensors = {MODEL: dict(base.named_parameters())}
    save_checkpoint(start, Content(plain, TOKENIZER.files(), 0, tensors))
    return replace(plain, lora=LoraConfig(**{"rank": 2, **lora}))


@pytest.mark.parametrize("kind", BACKBONES)
def test_only_adapters_are_trained_saved_and_read_back(
    tmp_path: Path, rows: Rows, kind: str
) -> None:
    config = config_of(tmp_path, BACKBONES[kind])
    trainer = Trainer(config, TOKENIZER, rows)
    trainer.start_from(find_model(config.train.start))
    before = {name: p.clone() for name, p in frozen_parameters(trainer.model).items()}
    base = open_checkpoint(tmp_path / "start").tensors(MODEL)
    assert before.keys() == base.keys()
    assert all(torch.equal(before[name], base[name]) for name in base)
    assert trainer.run()
    assert all(torch.equal(p, before[n]) for n, p in frozen_parameters(trainer.model).items())
    assert all("lora" in name for name in trained_parameters(trainer.model))

    saved = open_checkpoint(latest_checkpoint(tmp_path / "run"))
    assert saved.tensors(MODEL).keys() == trained_parameters(trainer.model).keys()
    model, start = load(tmp_path / "run", device="cpu"), load(tmp_path / "start", device="cpu")
    z, t = torch.from_numpy(rows.take([0, 1])), torch.full((2,), 0.5)
    with torch.no_grad():
        adapted, plain, merged = (m.denoiser(z, t) for m in (model, start, model.merged()))
    assert not torch.allclose(adapted, plain, atol=1e-3)
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)

    model.save(tmp_path / "merged")
    whole = load(tmp_path / "merged", device="cpu")
    assert whole.config.lora == LoraConfig()
    with torch.no_grad():
        torch.testing.assert_close(whole.denoiser(z, t), merged)


@pytest.mark.parametrize("kind", ["dit", "llada", "qwen2"])
def test_peft_puts_exported_adapters_beside_their_weights(
    tmp_path: Path, rows: Rows, kind: str
) -> None:
    """Unmerged: transformers' base model, peft's adapters, our logits."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    import xdlm.auto  # noqa: F401

    run, hub, out = tmp_path / "run", tmp_path / "hub", tmp_path / "adapters"
    if kind == "qwen2":
        hub = make_pretrained(hub, kind, vocab=TOKENIZER.size)
        (hub / "tokenizer.json").write_text(TOKENIZER.to_json())
        config = config_of(tmp_path, PretrainedConfig(str(hub)))
        config = replace(config, train=replace(config.train, start=str(hub)))
    else:
        config = config_of(tmp_path, BACKBONES[kind])
        load(tmp_path / "start", device="cpu").publish(hub)
    trainer = Trainer(config, TOKENIZER, rows)
    trainer.start_from(find_model(config.train.start))
    assert trainer.run()
    main(["export", "--model", str(run), "--format", "peft", "--out", str(out)])
    model = load(run, device="cpu")
    z = torch.from_numpy(rows.take([0, 1]))
    auto = "AutoModelForCausalLM" if kind == "qwen2" else "AutoModel"
    base = getattr(transformers, auto).from_pretrained(hub).eval()
    if kind == "qwen2":
        base.resize_token_embeddings(TOKENIZER.size + 1, mean_resizing=False)
        z = z[:, :1]  # alone, since its own class looks back only
    theirs = peft.PeftModel.from_pretrained(base, out).eval()
    with torch.no_grad():
        expected = model.denoiser(z, torch.zeros(len(z)))
        found = theirs(input_ids=z).logits
        without = model.merged().denoiser(z, torch.zeros(len(z)))
    size = TOKENIZER.size
    torch.testing.assert_close(found[..., :size], expected[..., :size], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(without, expected, rtol=1e-4, atol=1e-4)
    with theirs.disable_adapter(), torch.no_grad():
        assert not torch.allclose(theirs(input_ids=z).logits[..., :size], found[..., :size])
    said = json.loads((out / "adapter_config.json").read_text())
    assert (said["r"], said["base_model_name_or_path"]) == (2, config.train.start)
    assert f"base_model: {config.train.start}" in (out / "README.md").read_text()


def test_a_model_without_adapters_has_none_to_give(tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    line = complaint(capsys, "export", "--model", "pocket", "--format", "peft", "--out", str(out))
    assert "has no adapters" in line and not out.exists()


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path, rows: Rows) -> None:
    config = config_of(tmp_path, LLADA, dropout=0.1)
    straight = Trainer(config, TOKENIZER, rows)
    straight.start_from(find_model(config.train.start))
    straight.run()
    half = replace(config, train=replace(config.train, steps=2, out=str(tmp_path / "half")))
    first = Trainer(half, TOKENIZER, rows)
    first.start_from(find_model(config.train.start))
    first.run()
    second = Trainer(replace(half, train=replace(half.train, steps=3)), TOKENIZER, rows)
    second.restore(open_checkpoint(latest_checkpoint(tmp_path / "half")))
    second.run()
    for a, b in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def trained_beside(tmp_path: Path, rows: Rows, kind: str) -> tuple[RunConfig, Path]:
    """A run with adapters, and a file of the weights that they were trained beside: those of a checkpoint,
    or of a folder with several files."""
    config, base = config_of(tmp_path, LLADA), tmp_path / "start"
    file = base / MODEL
    if kind == "published":
        load(base, device="cpu").publish(tmp_path / "hub", shard_bytes=50_000)
        file = sorted((tmp_path / "hub").glob("*.safetensors"))[1]
        config = replace(config, train=replace(config.train, start=str(tmp_path / "hub")))
    trainer = Trainer(config, TOKENIZER, rows)
    trainer.start_from(find_model(config.train.start))
    assert trainer.run()
    return config, file


def shift(file: Path) -> None:
    """Other numbers in one tensor of a file; in a checkpoint, so that nothing is wrong with it."""
    tensors = load_file(file)
    tensors[min(tensors)] += 0.25
    save_file(tensors, file, metadata={"format": "pt"})
    note = file.parent / META
    if note.is_file():
        meta = json.loads(note.read_text())
        meta["files"][MODEL] = {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
        note.write_text(json.dumps(meta))


@pytest.mark.parametrize("kind", ["checkpoint", "published"])
def test_adapters_are_not_put_beside_other_weights(
    tmp_path: Path, rows: Rows, capsys, kind: str
) -> None:
    config, file = trained_beside(tmp_path, rows, kind)
    run, there = tmp_path / "run", f"{file.parent} does not hold the weights"
    first = latest_checkpoint(run)
    longer = replace(config, train=replace(config.train, steps=4))
    shutil.copytree(file.parent, tmp_path / "kept")
    shift(file)
    with pytest.raises(UserError, match=there):
        load(run, device="cpu")
    with pytest.raises(UserError, match=there):
        Trainer(longer, TOKENIZER, rows).restore(open_checkpoint(first))
    capsys.readouterr()
    for verb in ("export --format hub --out {}", "sample --steps 2", "eval ppl --data corpus:test"):
        arguments = verb.format(tmp_path / "out").split()
        said = complaint(capsys, *arguments, "--model", str(run))
        assert there in said and said.endswith("or train the adapters anew")
    assert not (tmp_path / "out").exists()

    shutil.rmtree(file.parent)
    shutil.move(tmp_path / "kept", file.parent)
    trainer = Trainer(longer, TOKENIZER, rows)
    trainer.restore(open_checkpoint(first))
    assert trainer.run()
    assert load(run, device="cpu").step == 4
    shift(file)
    with pytest.raises(UserError, match=there):
        load(run, device="cpu")
    note = latest_checkpoint(run) / META
    meta = json.loads(note.read_text())
    assert meta.pop(BASE) == open_checkpoint(first).meta[BASE]
    note.write_text(json.dumps(meta))  # as it was before there were any
    assert load(run, device="cpu").step == 4


def test_frozen_weights_take_the_trunks_precision(tmp_path: Path, rows: Rows) -> None:
    config = config_of(tmp_path, LLADA)
    train = replace(config.train, precision="bfloat16", activation_checkpointing=True)
    trainer = Trainer(replace(config, train=train), TOKENIZER, rows)
    trainer.start_from(find_model(config.train.start))
    assert trainer.engine.running is trainer.model
    assert {p.dtype for p in frozen_parameters(trainer.model).values()} == {torch.bfloat16}
    assert {p.dtype for p in trained_parameters(trainer.model).values()} == {torch.float32}
    assert trainer.run()


def test_targets_by_name_never_the_head() -> None:
    model = build_denoiser(LLADA, LLADA.vocab_size)
    add_adapters(model, LoraConfig(rank=2, targets="q_proj, ff_out"))
    names = {name.partition(".lora_")[0] for name in trained_parameters(model)}
    blocks = [f"model.transformer.blocks.{i}" for i in range(2)]
    assert names == {f"{block}.{name}" for block in blocks for name in ("q_proj", "ff_out")}


def test_bad_settings_are_named() -> None:
    with pytest.raises(UserError, match="no 'q_prj'; did you mean 'q_proj'"):
        add_adapters(build_denoiser(LLADA, LLADA.vocab_size), LoraConfig(rank=2, targets="q_prj"))
    for text, says in (
        ("lora: {rank: 4}", "lora adapts trained weights"),
        ("lora: {alpha: 4}", "lora needs a rank"),
        ("lora: {rank: -1}", "must be >= 0"),
        ("{lora: {rank: 4, rnk: 3}}", "unknown key 'rnk'"),
    ):
        with pytest.raises(UserError, match=says):
            parse_config(text)
    assert isinstance(parse_config("train: {start: x}\nlora: {rank: 4}").model, DiTConfig)


def test_a_run_that_nobody_gave_its_start_does_not_train(tmp_path: Path, rows: Rows) -> None:
    """Weights that were to be read are never random ones in silence."""
    with pytest.raises(UserError, match=r"not finite|is nan"):
        Trainer(config_of(tmp_path, LLADA), TOKENIZER, rows).run()
