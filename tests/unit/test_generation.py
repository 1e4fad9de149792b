"""Quality of texts: the judges, the averages, the records."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from xdlm import UserError
from xdlm.api import load_tokenizer
from xdlm.cli.main import main
from xdlm.data import pack, read_documents
from xdlm.evaluation.generation import quality, token_entropy
from xdlm.evaluation.judges import Score, open_judge
from xdlm.evaluation.ngram import NgramJudge
from xdlm.evaluation.records import EvalRecord, append_records, read_records
from xdlm.tokens import TextTokenizer


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return load_tokenizer("pocket")


@pytest.fixture(scope="module")
def trigrams(tokenizer: TextTokenizer) -> NgramJudge:
    return NgramJudge(tokenizer)


class Fixed:
    """A judge that gives each text the scores it is told."""

    name, sha256 = "fixed", "0"

    def __init__(self, *scores: tuple[float, int]) -> None:
        self.scores = iter(scores)

    def score(self, text: str) -> Score:
        return Score(*next(self.scores))


def test_perplexity_counts_every_token_once() -> None:
    """All nats over all tokens: neither a mean of perplexities, nor one text as much as another."""
    tokens = [np.array([1, 2]), np.array([3, 4])]
    found = quality(["a", "b"], tokens, Fixed((10.0, 10), (200.0, 40)))
    assert found.perplexity.value == pytest.approx(math.exp(210 / 50))
    assert found.n == 2 and found.judge_tokens == 50


def test_the_stated_error_is_that_of_repeated_sets() -> None:
    generator = np.random.default_rng(0)
    values, stated = [], []
    for _ in range(200):
        counts = generator.integers(20, 200, size=40)
        nats = [float(generator.gamma(3 * n, 1.1)) for n in counts]
        scores = [(total, int(n)) for total, n in zip(nats, counts, strict=True)]
        found = quality(["x"] * 40, [np.array([0, 1])] * 40, Fixed(*scores)).perplexity
        values.append(math.log(found.value))
        stated.append(found.stderr / found.value)
    assert np.std(values) == pytest.approx(float(np.mean(stated)), rel=0.2)


def test_entropy_of_tokens() -> None:
    assert token_entropy(np.array([5, 5, 5, 5])) == 0
    assert token_entropy(np.arange(16)) == pytest.approx(math.log(16))
    shares = [0.5, 0.25, 0.25]
    expected = -sum(p * math.log(p) for p in shares)
    assert token_entropy(np.array([1, 1, 2, 3])) == pytest.approx(expected)


def test_distinct_grams() -> None:
    found = quality(["a"], [np.array([1, 2, 1, 2])], Fixed((1.0, 1))).distinct
    assert found == pytest.approx({1: 2 / 4, 2: 2 / 3, 3: 2 / 2})


def test_trigrams_are_a_law(trigrams: NgramJudge, tokenizer: TextTokenizer) -> None:
    """Over the last token of a text, probabilities sum to 1."""
    start = tokenizer.encode("It was the best of")
    total = 0.0
    before = _nats(trigrams, start)
    for token in range(tokenizer.size):
        total += math.exp(before - _nats(trigrams, [*start, token]))
    assert total == pytest.approx(1.0, abs=1e-9)


def _nats(judge: NgramJudge, ids: list[int]) -> float:
    class AsIs:
        size, eos_id = judge._tokenizer.size, judge._tokenizer.eos_id

        def encode(self, text: object) -> object:
            return text

    own, judge._tokenizer = judge._tokenizer, AsIs()  # type: ignore[assignment]
    try:
        return judge.score(ids).nats  # type: ignore[arg-type]
    finally:
        judge._tokenizer = own


def test_real_text_beats_shuffled_text(trigrams: NgramJudge, tokenizer: TextTokenizer) -> None:
    rows = pack(read_documents("corpus:heldout"), tokenizer, 64)
    real = list(rows.take(range(0, len(rows), len(rows) // 20)))
    generator = np.random.default_rng(0)
    mixed = [generator.permutation(ids) for ids in real]
    found = [
        quality([tokenizer.decode(ids) for ids in texts], texts, trigrams).perplexity
        for texts in (real, mixed)
    ]
    assert found[1].value > 5 * found[0].value
    assert found[0].value + 5 * found[0].stderr < found[1].value - 5 * found[1].stderr


def test_what_is_wrong_with_a_judge_is_said(tmp_path: Path, tokenizer, trigrams) -> None:
    with pytest.raises(UserError, match="no judge at nowhere"):
        open_judge("nowhere", tokenizer, torch.device("cpu"))
    with pytest.raises(UserError, match=r"transformers|not a causal language model"):
        open_judge(str(tmp_path), tokenizer, torch.device("cpu"))
    with pytest.raises(UserError, match="no text to judge"):
        quality([], [], trigrams)
    with pytest.raises(UserError, match="too short to judge"):
        quality(["a"], [np.array([1])], Fixed((0.0, 0)))


def test_a_causal_model_as_judge(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """A small GPT-2 of random weights: nats are those of its own loss, also beyond its context."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "tokenizer.json").write_text(tokenizer.to_json())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=tokenizer.size, n_positions=16, n_embd=32, n_layer=2, n_head=2
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    judge = open_judge(str(tmp_path), tokenizer, torch.device("cpu"))
    text = "It was the best of times."
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        expected = float(model(ids, labels=ids).loss) * (ids.numel() - 1)
    assert judge.score(text) == Score(pytest.approx(expected, rel=1e-5), ids.numel() - 1)
    long = judge.score(text * 9)
    assert long.tokens == len(tokenizer.encode(text * 9)) - 1


def record(**changes: object) -> EvalRecord:
    fields: dict[str, object] = {
        "metric": "ppl", "value": 3.5, "stderr": 0.1, "n": 8, "seed": 0, "model": "m", "step": 5,
        "weights": "ema", "dtype": "float32", "config": {"a": 1}, "tokenizer_sha256": "t",
        "xdlm": "0", "commit": "c", "torch": "2", "device": "cpu",
    }  # fmt: skip
    return EvalRecord(**{**fields, **changes})


def test_records_come_back(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    append_records(file, [record()])
    append_records(file, [record(metric="entropy", details={"x": 1.0}), record(stderr=math.nan)])
    found = read_records(file)
    assert found[0] == record() and found[1].details == {"x": 1.0}
    assert found[2].stderr is None
    file.write_text(file.read_text() + '{"metric": "ppl"}\n')
    with pytest.raises(UserError, match="line 4: not a record"):
        read_records(file)
    file.write_text('{"metrik": 1}\n')
    with pytest.raises(UserError, match="unknown field metrik"):
        read_records(file)


def test_command(tmp_path: Path, capsys) -> None:
    records, samples = tmp_path / "r.jsonl", tmp_path / "texts"
    main(["eval", "gen", "--steps", "1", "3", "--n", "4", "--length", "24",
          "--records", str(records), "--samples", str(samples)])  # fmt: skip
    shown = capsys.readouterr().out
    found = read_records(records)
    assert [r.steps for r in found if r.metric == "gen_ppl"] == [1, 3]
    assert {r.metric for r in found} == {
        "gen_ppl",
        "entropy",
        "distinct_1",
        "distinct_2",
        "distinct_3",
    }
    for r in found:
        assert r.n == 4 and r.length == 24 and r.dtype == "float32" and r.nfe == r.steps + 1
        assert (r.judge is not None) == (r.metric == "gen_ppl")
    assert "real, shuffled" in shown and f"{found[0].value:.2f}" in shown
    for steps in (1, 3):
        lines = (samples / f"steps-{steps:05d}.jsonl").read_text().splitlines()
        assert len(lines) == 4 and all("text" in json.loads(line) for line in lines)
