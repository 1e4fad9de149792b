"""The autoregressive model: it sees no later token, its loss is cross-entropy, it trains and measures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import small_run, trainer_for
from test_cli import complaint
from torch.nn import functional as F

from xdlm import UserError, load
from xdlm.api import load_tokenizer
from xdlm.cli.main import main
from xdlm.cli.train import make_trainer
from xdlm.config import ProcessConfig, RunConfig, dump_config, load_config, parse_config
from xdlm.evaluation.records import read_records
from xdlm.models import DiT, DiTConfig
from xdlm.structs import Batch
from xdlm.training.blocks import checkpoint_blocks
from xdlm.training.checkpoint import MODEL, OPTIMIZER, RAW, latest_checkpoint, open_checkpoint
from xdlm.training.loss import NextTokenLoss, next_token_nats
from xdlm.training.resuming import find_resume
from xdlm.training.runlog import read_log

SMALL = DiTConfig(depth=2, width=32, heads=2, cond_width=8, dropout=0.0)


def awake(config: DiTConfig = SMALL, vocab: int = 20, *, causal: bool = True) -> DiT:
    """Weights that are not zero anywhere, so that everything matters."""
    torch.manual_seed(0)
    model = DiT(config, vocab, causal=causal)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def autoregressive_run(out: Path, **train) -> RunConfig:
    return replace(small_run(out, **train), process=ProcessConfig(kind="autoregressive"))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("again", [False, True], ids=["plain", "computed twice"])
def test_later_tokens_do_not_matter(training: bool, again: bool) -> None:
    """Neither to states nor, through them, to gradients: the state at i depends on tokens up to i, and on
    each of them."""
    model = awake().train(training)
    if again:
        checkpoint_blocks(model)
    z, t = torch.randint(0, 20, (3, 9)), torch.zeros(3)
    states = model.trunk(z, t)
    for i in range(9):
        other = z.clone()
        other[:, i] = (z[:, i] + 1) % 20
        changed = (model.trunk(other, t) - states).abs().amax((0, 2))
        assert (changed[:i] == 0).all() and (changed[i:] > 1e-4).all()
    embedded: list[torch.Tensor] = []
    model.embed.register_forward_hook(lambda _, __, out: embedded.append(out.requires_grad_()))
    (seen,) = torch.autograd.grad(model.trunk(z, t)[:, 4].square().sum(), embedded[-1:])
    assert (seen[:, 5:] == 0).all() and (seen[:, :5].abs().amax(-1) > 0).all()


def test_a_model_under_noise_sees_all() -> None:
    model = awake(causal=False).eval()
    z = torch.randint(0, 20, (1, 9))
    other = z.clone()
    other[0, -1] = (z[0, -1] + 1) % 20
    assert not torch.allclose(model(z, torch.zeros(1))[0, 0], model(other, torch.zeros(1))[0, 0])


@pytest.mark.parametrize(("impl", "dtype"), [
    ("eager", torch.float64), ("chunked", torch.float64), ("chunked", torch.float32),
])  # fmt: skip
def test_the_loss_is_cross_entropy(impl: str, dtype: torch.dtype) -> None:
    """With all its gradients, against torch's own in float64."""
    x = torch.randint(0, 20, (4, 7))
    model, truth = awake().to(dtype), awake().double()
    logits = _logits(truth, x)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten(), reduction="mean")
    expected.backward()
    sums = NextTokenLoss(impl)(model, Batch(x, torch.arange(4)), seed=0, step=0, global_batch=4)
    (sums.loss / x.numel()).backward()
    tolerance = (
        {"rtol": 1e-9, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-6}
    )
    torch.testing.assert_close(sums.loss.detach() / x.numel(), expected.detach(), **tolerance)
    assert sums.rows == 4 * 6 and sums.elbo == sums.loss
    for (name, ours), theirs in zip(model.named_parameters(), truth.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None, name
            continue
        torch.testing.assert_close(ours.grad.double(), theirs.grad, **tolerance, msg=name)


def _logits(model: DiT, x: torch.Tensor) -> torch.Tensor:
    hidden = model.trunk(x, torch.zeros(len(x)))
    return F.linear(hidden, model.head_weight, model.head_bias)


def test_probabilities_of_all_texts_sum_to_one() -> None:
    """Over the tokens that follow a first one: what a model that looked ahead would not do."""
    model = awake(vocab=4).double().eval()
    rest = torch.cartesian_prod(*[torch.arange(4)] * 3)
    texts = torch.cat([torch.full((len(rest), 1), 2), rest], dim=1)
    with torch.no_grad():
        nats = next_token_nats(model, texts).sum(1)
    assert float((-nats).exp().sum()) == pytest.approx(1.0, abs=1e-12)


def test_training_lowers_it_and_validates(tmp_path: Path) -> None:
    """From the logarithm of the number of tokens; the validation is of the exact likelihood."""
    config = autoregressive_run(tmp_path, steps=30, eval_every=30, save_every=0)
    trainer = make_trainer(
        replace(config, optim=replace(config.optim, lr=1e-2)), load_tokenizer("pocket")
    )
    assert trainer.run()
    log = read_log(tmp_path / "log.jsonl")
    losses = [r["loss"] for r in log if "loss" in r]
    size = load_tokenizer("pocket").size
    assert losses[0] == pytest.approx(math.log(size), rel=1e-5)
    assert losses[-1] < losses[0] - 1 and log[0]["elbo"] == log[0]["loss"]
    (checked,) = [r for r in log if "val_nats" in r]
    assert 0 < checked["val_nats"] < math.log(size) and checked["val_stderr"] > 0
    model = load(tmp_path, device="cpu")
    assert (
        model.denoiser.causal and model.process is None and len(model.denoiser.head_weight) == size
    )


def test_a_resumed_run_is_the_same_run(tmp_path: Path) -> None:
    runs = tmp_path / "straight", tmp_path / "broken"
    assert trainer_for(autoregressive_run(runs[0], steps=6)).run()
    assert trainer_for(autoregressive_run(runs[1], steps=4)).run()
    again = trainer_for(autoregressive_run(runs[1], steps=6))
    again.restore(find_resume(runs[1], resume=True))
    assert again.run()
    a, b = (open_checkpoint(latest_checkpoint(run)) for run in runs)
    for file in (MODEL, RAW, OPTIMIZER):
        ours, theirs = a.tensors(file), b.tensors(file)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(UserError, match=r"process.kind was autoregressive and is now mixed"):
        trainer_for(small_run(runs[0], steps=8)).restore(find_resume(runs[0], resume=True))


@pytest.fixture(scope="module")
def judge(tmp_path_factory) -> Path:
    """A run folder of a model that has learnt a little."""
    folder = tmp_path_factory.mktemp("runs") / "judge"
    config = autoregressive_run(folder, steps=20, save_every=10)
    trainer_for(replace(config, optim=replace(config.optim, lr=1e-2))).run()
    return folder


def test_perplexity_is_exact(judge: Path, tmp_path: Path, capsys) -> None:
    """All rows and the tail, each token after the first of its row once, whatever the draws."""
    model = load(judge, device="cpu")
    rows = model.pack(["It was a dark and stormy night. " * 12, "The end"])
    nats, count = 0.0, 0
    with torch.no_grad():
        for ids in (*rows.take(range(len(rows))), rows.tail):
            x = torch.tensor(ids.astype("int64"))[None]
            log_p = model.denoiser(x, torch.zeros(1))[0, :-1].double().log_softmax(-1)
            nats -= float(log_p.gather(1, x[0, 1:, None]).sum())
            count += x.numel() - 1
    found = model.perplexity_of(rows, draws=7)
    assert found.n_tokens == count and found.draws == 1
    assert found.nats_per_token == pytest.approx(nats / count, rel=1e-6)
    assert found.stderr > 0
    (tmp_path / "a.txt").write_text("It was a dark and stormy night. " * 40)
    main(["eval", "ppl", "--model", str(judge), "--data", str(tmp_path / "a.txt"), "--device", "cpu",
          "--records", str(tmp_path / "r.jsonl")])  # fmt: skip
    (record,) = read_records(tmp_path / "r.jsonl")
    assert record.draws == 1 and record.value > 1
    assert "exact" in capsys.readouterr().out


@pytest.mark.parametrize("command", [
    ["sample"], ["sample", "--template", "The <mask:3> sat."], ["eval", "gen"], ["eval", "dynamics"],
], ids=" ".join)  # fmt: skip
def test_it_writes_no_text(judge: Path, tmp_path: Path, monkeypatch, capsys, command) -> None:
    monkeypatch.chdir(tmp_path)
    model = [str(judge)] if "dynamics" in command else ["--model", str(judge)]
    assert "is autoregressive: it judges texts" in complaint(
        capsys, *command, *model, "--device", "cpu"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "says"), [
    ("process: {kind: autoregresive}", "did you mean 'autoregressive'"),
    ("process: {kind: autoregressive, k: 0.1}", "process.k has no meaning for kind 'autoregressive'"),
    ("process: {kind: autoregressive, eps: 0.1}", "process.eps has no meaning"),
    ("process: {kind: autoregressive}\nloss: {weighting: clipped}", "loss.weighting has no meaning"),
    ("process: {kind: autoregressive}\nloss: {kept_rows: 0.5}", "loss.kept_rows has no meaning"),
    ("process: {kind: autoregressive}\nmodel: {time_conditioning: true}",
     "model.time_conditioning has no meaning"),
])  # fmt: skip
def test_settings_of_diffusion_are_refused(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UserError, match=says):
        load_config(tmp_path / "recipe.yaml")


def test_the_configuration_comes_back() -> None:
    config = parse_config("process: {kind: autoregressive}")
    assert parse_config(dump_config(config)) == config
    assert config.process.vocab(100).mask_id is None and config.process.vocab(100).size == 100
