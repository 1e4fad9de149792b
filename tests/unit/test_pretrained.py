"""Transformers models as denoisers: both directions, mask, shift, padding, saving, training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_cli import complaint

from xdlm import UserError, Vocab, load
from xdlm.api import load_tokenizer
from xdlm.cli.main import main
from xdlm.config import (
    DataConfig,
    OptimConfig,
    ProcessConfig,
    RunConfig,
    TrainConfig,
    dump_config,
    parse_config,
)
from xdlm.data import data_root, load_rows
from xdlm.models import PretrainedConfig, build_denoiser
from xdlm.models.pretrained import Pretrained
from xdlm.training.trained import find_model
from xdlm.training.trainer import Trainer

transformers = pytest.importorskip("transformers")

SHAPE = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
CAUSAL = {
    "llama": lambda: transformers.LlamaConfig(**SHAPE, num_key_value_heads=2),
    "qwen2": lambda: transformers.Qwen2Config(
        **SHAPE, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
}
MASKED = {
    "bert": lambda: transformers.BertConfig(**SHAPE),
    "roberta": lambda: transformers.RobertaConfig(**SHAPE),
    "deberta": lambda: transformers.DebertaV2Config(**SHAPE),  # knows no sdpa
}
TOKENS = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(0))


def make(folder: Path, name: str, *, mask: int | None = None, vocab: int = 60) -> Path:
    """A random model, saved as transformers saves it, beside a tokenizer."""
    torch.manual_seed(0)
    config = {**CAUSAL, **MASKED}[name]()
    config.vocab_size = vocab
    auto = "AutoModelForMaskedLM" if name in MASKED else "AutoModelForCausalLM"
    model = getattr(transformers, auto).from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tokens = [{"content": "[MASK]", "id": mask}] if mask is not None else []
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    return folder


def read(folder: Path, **options) -> Pretrained:
    return Pretrained.read(PretrainedConfig(str(folder), **options), folder).eval()


@pytest.mark.parametrize("name", [*CAUSAL, *MASKED])
def test_looks_both_ways_and_splits_off_its_head(tmp_path: Path, name: str) -> None:
    model = read(make(tmp_path, name))
    assert model.config.own_vocab().size == 61 and model.config.own_vocab().mask_id == 60
    changed = TOKENS.clone()
    changed[:, -1] = 60
    with torch.no_grad():
        hidden, other = (model.trunk(z, torch.zeros(2)) for z in (TOKENS, changed))
    assert hidden.shape == (2, 9, 32) and model.head_weight.shape == (61, 32)
    assert ((hidden - other).abs().amax(-1) > 0).all()


@pytest.mark.parametrize("name", MASKED)
def test_a_masked_model_keeps_its_logits(tmp_path: Path, name: str) -> None:
    folder = make(tmp_path, name, mask=4)
    model = read(folder)
    assert model.config.own_vocab().size == 60 and model.config.own_vocab().mask_id == 4
    whole = transformers.AutoModelForMaskedLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected, found = whole(TOKENS).logits, model(TOKENS, torch.zeros(2))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
def test_one_token_alone_is_what_the_causal_model_says(tmp_path: Path, name: str) -> None:
    """With nobody else to look at, both directions are one; then the mask's row changes nothing."""
    folder = make(tmp_path, name)
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    model = read(folder)
    with torch.no_grad():
        expected = whole(TOKENS[:, :1]).logits
        torch.testing.assert_close(model(TOKENS[:, :1], torch.zeros(2))[..., :60], expected)
    weight = model.lm.get_input_embeddings().weight
    torch.testing.assert_close(weight[60], weight[:60].mean(0))


def test_shift_hands_each_state_to_the_next_position(tmp_path: Path) -> None:
    folder = make(tmp_path, "llama")
    plain, shifted = read(folder), read(folder, shift=True)
    with torch.no_grad():
        a, b = (model.trunk(TOKENS, torch.zeros(2)) for model in (plain, shifted))
    assert torch.equal(a[:, :-1], b[:, 1:]) and torch.equal(a[:, 0], b[:, 0])


@pytest.mark.parametrize(("name", "longest"), [
    ("llama", None), ("gpt2", 64), ("bert", 64), ("roberta", 62), ("deberta", 64),
])  # fmt: skip
def test_rows_may_be_as_long_as_there_are_places(
    tmp_path: Path, name: str, longest: int | None
) -> None:
    model = read(make(tmp_path, name))
    z = torch.zeros(1, 65 if longest is None else longest, dtype=torch.int64)
    with torch.no_grad():
        assert model.trunk(z, torch.zeros(1)).isfinite().all()
    if longest is not None:
        with pytest.raises(UserError, match=f"has {longest} places, and a row has {longest + 1}"):
            model.trunk(torch.zeros(1, longest + 1, dtype=torch.int64), torch.zeros(1))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "deberta"])
def test_padding_is_not_looked_at(tmp_path: Path, name: str) -> None:
    model = read(make(tmp_path, name))
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[:, 6:] = True
    with torch.no_grad():
        padded = model.trunk(TOKENS, torch.zeros(2), padding=padding)[:, :6]
        alone = model.trunk(TOKENS[:, :6], torch.zeros(2))
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-5)


def test_configuration_needs_the_folder_only_once(tmp_path: Path) -> None:
    folder = make(tmp_path / "lm", "llama")
    config = parse_config(f"model: {{kind: pretrained, path: {folder}, shift: true}}")
    assert isinstance(config.model, PretrainedConfig) and config.model.shift
    (folder / "config.json").unlink()
    again = parse_config(dump_config(config))
    assert again == config
    assert build_denoiser(again.model, 61).head_weight.shape == (61, 32)


def test_what_cannot_be_a_denoiser_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no"):
        PretrainedConfig(str(tmp_path))
    folder = make(tmp_path, "llama")
    tree = json.loads((folder / "config.json").read_text())
    for change in ({"model_type": "no-such"}, {"model_type": "mamba"}):
        given = PretrainedConfig(architecture=json.dumps({**tree, **change}))
        with pytest.raises(UserError, match=r"transformers cannot|both ways"):
            build_denoiser(given, given.own_vocab().size)
    gemma = transformers.Gemma2Config(**SHAPE, num_key_value_heads=2, head_dim=8).to_json_string()
    with pytest.raises(UserError, match="does more to its logits than a linear layer"):
        build_denoiser(PretrainedConfig(architecture=gemma), 61)
    with pytest.raises(UserError, match="not autoregressively"):
        build_denoiser(PretrainedConfig(str(folder)), 61, causal=True)
    with pytest.raises(UserError, match="unknown key 'shft'; did you mean 'shift'"):
        parse_config(f"model: {{kind: pretrained, path: {folder}, shft: true}}")
    with pytest.raises(UserError, match="unknown kind 'pretrain'; did you mean 'pretrained'"):
        parse_config("model: {kind: pretrain}")


def test_damaged_folders_are_one_line(tmp_path: Path, capsys) -> None:
    tokenizer = load_tokenizer("pocket")
    folder = make(tmp_path / "lm", "llama", vocab=tokenizer.size)
    weights, shape = folder / "model.safetensors", folder / "config.json"
    whole, known = weights.read_bytes(), shape.read_text()
    capsys.readouterr()  # what the library says in making it

    def line() -> str:
        return complaint(
            capsys, "import", str(folder), "--from", "transformers", "--out", str(tmp_path / "out")
        )

    for tokens in ([{"id": 3}], "none"):
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
        assert "tokenizer.json is damaged: its added_tokens" in line()
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    weights.write_bytes(whole[:100])
    assert "transformers cannot make this model: Error while deserializing" in line()
    weights.write_bytes(whole)
    shape.write_text(json.dumps({**json.loads(known), "intermediate_size": 40}))
    assert "transformers cannot make this model: " in line()
    assert [path.name for path in tmp_path.iterdir()] == ["lm"], "nothing half-written"


def test_adaptation_starts_from_the_folder_and_comes_back(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("pocket")
    folder = make(tmp_path / "lm", "qwen2", vocab=tokenizer.size)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    config = RunConfig(
        process=ProcessConfig("mixed", k=0.1),
        model=PretrainedConfig(str(folder), shift=True),
        data=DataConfig(val=None, tokenizer=str(folder), length=32),
        optim=OptimConfig(lr=1e-3, warmup=0, ema=0.0),
        train=TrainConfig(
            str(tmp_path / "run"), steps=2, batch=4, micro_batch=4, eval_every=0, device="cpu",
            activation_checkpointing=True,
        ),
    )  # fmt: skip
    rows = load_rows("corpus:train", tokenizer, 32, limit=1)
    trainer = Trainer(config, tokenizer, rows)
    trainer.start_from(find_model(folder))
    start = read(folder, shift=True)
    for name, parameter in start.named_parameters():
        assert torch.equal(parameter, dict(trainer.model.named_parameters())[name])
    with pytest.raises(UserError, match="not trained under noise"):
        load(folder)
    assert trainer.run()
    (folder / "config.json").unlink()
    model = load(tmp_path / "run", device="cpu")
    assert model.process.vocab.mask_id == tokenizer.size
    assert model.sample(2, steps=2, length=8, seed=0).tokens.shape == (2, 8)
    smaller = replace(config, model=replace(config.model, mask_id=5))
    with pytest.raises(UserError, match="does not fit"):
        Trainer(smaller, tokenizer, rows).start_from(find_model(tmp_path / "run"))


def test_import_and_export(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("pocket")
    folder, run, back = (tmp_path / name for name in ("lm", "run", "back"))
    make(folder, "llama", vocab=tokenizer.size)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    main(["import", str(folder), "--from", "transformers", "--shift", "--out", str(run)])
    model = load(run, device="cpu")
    assert model.config.model.shift and model.process.vocab.mask_id == tokenizer.size
    main(["export", "--model", str(run), "--format", "hub", "--out", str(back)])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(back)
    ours = model.denoiser.lm.state_dict()
    assert all(torch.equal(value, ours[name]) for name, value in theirs.state_dict().items())
    assert theirs.get_input_embeddings().weight.shape[0] == tokenizer.size + 1


def test_a_real_model(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct, where its folder is among the local data: taken as it is, sampled from, given
    back with a row for the mask, and otherwise the model that it was."""
    folder = Path(data_root()) / "smollm2"
    if not folder.is_dir():
        pytest.skip("SmolLM2 is not in the folder of local data")
    run, back = tmp_path / "run", tmp_path / "back"
    main(["import", str(folder), "--from", "transformers", "--shift", "--out", str(run)])
    model = load(run, device="cpu")
    assert model.process.vocab == Vocab(49153, 49152)
    (text,) = model.complete(["The capital of France is"], new_tokens=4, steps=2, temperature=0.0)
    assert len(text.tokens) <= 4 and max(text.tokens) < 49152
    model.publish(back)
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval()
        for each in (folder, back)
    )
    tokens = torch.tensor([model.tokenizer.encode("The capital of France is Paris")])
    with torch.no_grad():
        for one in (after, model.denoiser.lm):
            assert torch.equal(one.get_input_embeddings().weight[:-1], before.lm_head.weight)
        alone, whole = (model.denoiser(z, torch.zeros(1)) for z in (tokens[:, :1], tokens))
        torch.testing.assert_close(alone[..., :-1], before(tokens[:, :1]).logits)
        # The folder says that it looks both ways; the shift is ours.
        torch.testing.assert_close(after(tokens).logits[:, :-1], whole[:, 1:], rtol=0, atol=1e-3)
