"""Judges: one that the library trained, and many texts at once."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from small_runs import small_run, trainer_for
from test_cli import complaint
from test_generation import judge_folder
from test_next_token import autoregressive_run

from xdlm import UserError, load
from xdlm.api import Model, load_tokenizer
from xdlm.cli.main import main
from xdlm.evaluation import judges, own_judge
from xdlm.evaluation.generation import quality
from xdlm.evaluation.judges import BatchJudge, FeatureJudge, open_judge
from xdlm.evaluation.own_judge import OwnJudge
from xdlm.evaluation.records import EvalRecord, measurement, read_records
from xdlm.evaluation.scoring import Score, score_tokens

CPU = torch.device("cpu")
#: Empty, of one token, short, and longer than any context here.
TEXTS = ["It was the best of times. " * 12, "", "a", "It was a dark and stormy night.", "One more",
         "the " * 40, "It was a dark"]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run folder of a model that has learnt a little, in rows of 32 tokens."""
    folder = tmp_path_factory.mktemp("runs") / "judge"
    config = autoregressive_run(folder, steps=20, save_every=10)
    trainer_for(replace(config, optim=replace(config.optim, lr=1e-2))).run()
    return folder


def nats_by_hand(model, ids: list[int]) -> float:
    """From the logits of windows of 32 tokens, each beginning with the last token of the one before."""
    nats = 0.0
    with torch.no_grad():
        for start in range(0, len(ids) - 1, 31):
            x = torch.tensor([ids[start : start + 32]])
            log_p = model.denoiser(x, torch.zeros(1))[0, :-1].double().log_softmax(-1)
            nats -= float(log_p.gather(1, x[0, 1:, None]).sum())
    return nats


def test_scores_are_the_models_own_nats(trained: Path) -> None:
    judge, model = (
        open_judge(str(trained), load_tokenizer("pocket"), CPU),
        load(trained, device="cpu"),
    )
    assert isinstance(judge, OwnJudge) and judge.name == "judge"
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    assert [len(each) for each in ids[1:3]] == [0, 1] and max(map(len, ids)) > 2 * 32
    expected = [nats_by_hand(model, each) for each in ids]
    counts = [max(len(each) - 1, 0) for each in ids]
    for found, nats, count in zip(judge.score_many(TEXTS), expected, counts, strict=True):
        assert found == Score(pytest.approx(nats, rel=1e-5), count)
    tokens = [np.array(each or [0]) for each in ids]
    perplexity = quality(TEXTS, tokens, judge).perplexity.value
    assert perplexity == pytest.approx(math.exp(sum(expected) / sum(counts)), rel=1e-5)


@pytest.mark.parametrize("kind", ["own", "gpt2"])
def test_many_at_once_are_as_one_by_one(
    trained: Path, tmp_path: Path, monkeypatch, kind: str
) -> None:
    """Whatever the size of a batch; and progress ends at its end."""
    tokenizer = load_tokenizer("pocket")
    if kind == "gpt2":
        judge_folder(tmp_path, tokenizer)
    judge = open_judge(str(trained if kind == "own" else tmp_path), tokenizer, CPU)
    assert isinstance(judge, BatchJudge)
    alone = [judge.score(text) for text in TEXTS]
    assert sum(score.tokens for score in alone) > 100
    for at_once in (1, 50, 4096):
        monkeypatch.setitem(own_judge._AT_ONCE, "cpu", at_once)
        monkeypatch.setitem(judges._LOGITS, "cpu", at_once * tokenizer.size)
        shown: list[tuple[int, int]] = []
        together = judge.score_many(TEXTS, lambda *at, shown=shown: shown.append(at))
        for one, many in zip(alone, together, strict=True):
            assert many == Score(pytest.approx(one.nats, rel=1e-4), one.tokens)
        assert shown[-1][0] == shown[-1][1] >= len(shown)
    assert judge.score_many([]) == []


def test_batches_hold_no_more_than_they_may() -> None:
    seen: list[tuple[int, int]] = []

    def nats(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(tokens.shape))
        return tokens[:, 1:].double()

    texts = [list(range(n)) for n in (3, 100, 1, 7, 0, 8, 2)]
    found = score_tokens(texts, nats, context=16, at_once=40, device=CPU)
    assert all(rows * length <= 40 or rows == 1 for rows, length in seen)
    assert [score.tokens for score in found] == [2, 99, 0, 6, 0, 7, 1]
    assert [score.nats for score in found] == [sum(range(n)) for n in (3, 100, 1, 7, 0, 8, 2)]


def test_a_judge_is_known_by_what_decides_its_scores(trained: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("pocket")
    copied = tmp_path / "copy"
    shutil.copytree(trained, copied)
    early, late = (str(copied / f"step-000000{step}") for step in (10, 20))
    one, same, other, third = (
        open_judge(name, tokenizer, CPU) for name in (str(trained), late, early, str(copied))
    )
    assert one.sha256 == same.sha256 == third.sha256 != other.sha256
    assert (same.name, third.name) == ("step-00000020", "copy")


def test_its_features_are_those_of_the_last_token(trained: Path) -> None:
    judge, model = (
        open_judge(str(trained), load_tokenizer("pocket"), CPU),
        load(trained, device="cpu"),
    )
    assert isinstance(judge, FeatureJudge)
    ids = model.tokenizer.encode("It was a dark night")
    state = model.denoiser.trunk(torch.tensor([ids]), torch.zeros(1))[0, -1]
    np.testing.assert_allclose(judge.features("It was a dark night"), state.numpy(), rtol=1e-5)
    assert judge.features("").shape == judge.features("the " * 99).shape == (32,)


def test_what_is_no_judge_is_one_line(trained: Path, tmp_path: Path, capsys) -> None:
    """A model under noise, by folder or by its bundled name, and a damaged one."""
    trainer_for(small_run(tmp_path / "noisy", steps=1, save_every=0)).run()
    capsys.readouterr()  # what training printed
    broken = tmp_path / "broken"
    shutil.copytree(trained / "step-00000020", broken)
    (broken / "model.safetensors").write_bytes(b"0")
    for name, says in (
        ("pocket", "pocket cannot judge: it was trained under noise (mixed)"),
        (str(tmp_path / "noisy"), "noisy cannot judge: it was trained under noise (mixed)"),
        (str(broken), "is truncated or altered"),
    ):
        assert says in complaint(capsys, "eval", "gen", "--judge", name, "--device", "cpu")
    with pytest.raises(UserError, match="no judge at nowhere"):
        open_judge("nowhere", load_tokenizer("pocket"), CPU)


@pytest.mark.parametrize("measure", ["gen", "dynamics"])
def test_several_judges_see_the_same_texts(
    trained: Path, tmp_path: Path, monkeypatch, capsys, measure: str
) -> None:
    """Which are made once; each judge says what it says alone, and what needs no judge is there once."""
    noisy, early = tmp_path / "noisy", str(trained / "step-00000010")
    trainer_for(small_run(noisy, steps=1, save_every=0)).run()
    model = ["--model", str(noisy)]
    if measure == "dynamics":
        model = [str(noisy), "--max-rows", "3", "--draws", "1"]
    made, sample = [], Model.sample
    monkeypatch.setattr(Model, "sample", lambda *a, **k: made.append(k["steps"]) or sample(*a, **k))

    def records(name: str, *judges: str) -> list[EvalRecord]:
        file = tmp_path / f"{name}.jsonl"
        main(["eval", measure, *model, "--judge", *judges, "--n", "3", "--steps", "1", "2", "--length",
              "16", "--device", "cpu", "--records", str(file)])  # fmt: skip
        return read_records(file)

    both = records("both", str(trained), early)
    assert made == [1, 2]
    assert "step-00000010" in capsys.readouterr().out
    alone = [records("late", str(trained)), records("early", early)]
    kinds = ("gen_ppl", "real_ppl", "real_shuffled_ppl")
    for found in alone:
        for record in (r for r in found if r.metric in kinds):
            assert record in both
    assert len({r.judge_sha256 for r in both if r.metric == "gen_ppl"}) == 2
    assert len({measurement(r) for r in both}) == len(both) == len(alone[0]) + 4
    if measure == "dynamics":
        made.clear()
        assert records("both", str(trained), early) == both and not made
        (tmp_path / "late.jsonl").rename(tmp_path / "more.jsonl")
        more = records("more", str(trained), early)  # a judge that comes later
        assert made == [1, 2] and sorted(map(measurement, more)) == sorted(map(measurement, both))


def test_judges_must_be_named_once(capsys) -> None:
    for names in ((), ("ngram", "ngram")):
        line = complaint(capsys, "eval", "gen", "--judge", *names)
        assert "--judge needs at least one name, and each only once" in line
