"""Fine-tuning on prompts with responses: prompts stay clean and do not count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from xdlm import UserError
from xdlm.api import load_tokenizer
from xdlm.cli.train import make_trainer
from xdlm.config import load_config, parse_config
from xdlm.data import load_pairs
from xdlm.training.loss import DiffusionLoss

TOKENIZER = load_tokenizer("pocket")
RECIPE = Path(__file__).parents[2] / "recipes" / "cpu-tiny.yaml"
PAIRS = [("What is it? ", "A small dog."), ("Who? ", "He."), ("Say a lot: ", "One two three four.")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": prompt, "response": response}) for prompt, response in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return tmp_path / "pairs.jsonl"


def test_a_row_is_prompt_response_and_ends(file: Path) -> None:
    rows = load_pairs(str(file), TOKENIZER, 24, bos=True)
    tokens, given = rows.take(range(3)), rows.given(range(3))
    for row, fixed, (prompt, response) in zip(tokens, given, PAIRS, strict=True):
        first = [TOKENIZER.bos_id, *TOKENIZER.encode(prompt)]
        whole = [*first, *TOKENIZER.encode(response)]
        assert row.tolist() == whole + [TOKENIZER.eos_id] * (24 - len(whole))
        assert fixed.tolist() == [True] * len(first) + [False] * (24 - len(first))
    assert rows.n_learned([0, 2]) == int((~given[[0, 2]]).sum())


@pytest.mark.parametrize("kind", ["masked", "mixed", "uniform", "gidd"])
def test_prompts_are_never_noised_and_never_count(file: Path, tmp_path: Path, kind: str) -> None:
    config = load_config(RECIPE)
    process = parse_config(f"process: {{kind: {kind}}}").process
    config = replace(
        config, process=process,
        data=replace(config.data, train=str(file), pairs=True, length=24, val=None),
        train=replace(config.train, out=str(tmp_path / "run"), steps=2, batch=8, micro_batch=8,
                      eval_every=0, save_every=0, device="cpu"),
    )  # fmt: skip
    trainer = make_trainer(config, TOKENIZER)
    ((batch, _),) = trainer.loader.batches(0)
    assert trainer.loader.n_learned(0) == int((~batch.given).sum()) < batch.tokens.numel()
    seen = []
    trunk = trainer.model.trunk

    def look(z, t, label=None):
        seen.append(z)
        return trunk(z, t, label)

    trainer.model.trunk = look
    sums = trainer.loss(trainer.model, batch, seed=0, step=0, global_batch=8)
    del trainer.model.trunk
    (z,) = seen
    assert torch.equal(z[batch.given], batch.tokens[batch.given])
    assert not torch.equal(z, batch.tokens)
    # Other prompts' tokens would change the trunk's input; the loss's own sum has no term of theirs.
    loss = DiffusionLoss(trainer.process, kept_rows=1.0, impl="eager")
    everything = loss(trainer.model, batch, seed=0, step=0, global_batch=8)
    assert everything.rows <= int((~batch.given).sum()) and sums.rows <= everything.rows
    assert trainer.run()


def test_bad_pairs_are_named(file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pair 1: prompt, response and end have"):
        load_pairs(str(file), TOKENIZER, 6)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(UserError, match="record 1: expected a string field 'response'"):
        load_pairs(str(tmp_path / "bad.jsonl"), TOKENIZER, 6)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(UserError, match="pairs are records"):
        load_pairs(str(tmp_path / "a.txt"), TOKENIZER, 6)
    for text, says in (
        ("data: {pairs: true, frame: true}", "has no frame"),
        ("{data: {pairs: true}, process: {kind: autoregressive}}", "data.pairs has no meaning"),
    ):
        with pytest.raises(UserError, match=says):
            parse_config(text)


def test_a_model_learns_responses(file: Path, tmp_path: Path) -> None:
    """Trained on three pairs, it answers with theirs; the prompts it was never taught."""
    config = load_config(RECIPE)
    config = replace(
        config, data=replace(config.data, train=str(file), pairs=True, length=24, val=None),
        optim=replace(config.optim, warmup=0),
        train=replace(config.train, out=str(tmp_path / "run"), steps=60, batch=12, micro_batch=12,
                      eval_every=0, save_every=0, device="cpu"),
    )  # fmt: skip
    trainer = make_trainer(config, TOKENIZER)

    def bound() -> float:
        ((batch, _),) = trainer.loader.batches(0)
        with torch.no_grad():
            sums = trainer.loss(trainer.model.eval(), batch, seed=0, step=0, global_batch=12)
        return float(sums.elbo) / trainer.loader.n_learned(0)

    before = bound()
    trainer.run()
    assert bound() < 0.3 * before
