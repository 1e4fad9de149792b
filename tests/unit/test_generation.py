"""Quality of texts: the judges, the averages, the records."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from results import record
from test_cli import complaint

from xdlm import UserError, load
from xdlm.api import load_tokenizer
from xdlm.cli.main import main
from xdlm.data import pack, read_documents
from xdlm.evaluation.frontier import check_mauve, mauve
from xdlm.evaluation.generation import quality, token_entropy
from xdlm.evaluation.judges import FeatureJudge, Score, open_judge
from xdlm.evaluation.ngram import NgramJudge
from xdlm.evaluation.records import append_records, read_records
from xdlm.tokens import TextTokenizer

#: One worker: the trigrams of all novels take a while to count.
pytestmark = pytest.mark.xdist_group("trigrams")


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


def judge_folder(folder: Path, tokenizer: TextTokenizer, kind: str = "GPT2LMHeadModel", **changes):
    """A small model of random weights with our tokenizer; gives the model."""
    transformers = pytest.importorskip("transformers")
    if kind.startswith("GPT2"):
        settings = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
    else:
        settings = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
                    "intermediate_size": 32}  # fmt: skip
    cls = getattr(transformers, kind)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = cls.config_class(**({"vocab_size": tokenizer.size} | ends | settings | changes))
    torch.manual_seed(0)
    model = cls(config).eval()
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(tokenizer.to_json())
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"})
    )
    return model


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_custom_code(folder: Path) -> None:
    change_config(folder, model_type="own", auto_map={"AutoConfig": "own.C"})
    (folder / "own.py").write_text("raise SystemExit('ran')")


#: What is wrong -> kind of model, its settings, what is done to its folder, what is said.
BROKEN = {
    "larger tokenizer": ("GPT2LMHeadModel", {"vocab_size": 4000}, None, "do not belong together"),
    "smaller tokenizer": ("GPT2LMHeadModel", {"vocab_size": 8000}, None, "do not belong together"),
    "encoder": ("BertForMaskedLM", {}, None, "looks at later tokens"),
    "cut weights": (
        "GPT2LMHeadModel", {}, lambda f: cut(f / "model.safetensors", 999), "is damaged or not",
    ),
    "a layer too few": (
        "GPT2LMHeadModel", {}, lambda f: change_config(f, n_layer=3), "do not hold transformer.h.2",
    ),
    "other width": (
        "GPT2LMHeadModel", {}, lambda f: change_config(f, n_embd=64), "does not fit its weights",
    ),
    "no JSON": ("GPT2LMHeadModel", {}, lambda f: cut(f / "config.json", 20), "not a valid JSON"),
    "no config": (
        "GPT2LMHeadModel", {}, lambda f: (f / "config.json").unlink(), "has no config.json",
    ),
    "pickle": (
        "GPT2LMHeadModel", {}, lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        "no .safetensors",
    ),
    "own code": ("GPT2LMHeadModel", {}, with_custom_code, "is damaged or not"),
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_judge_that_is_none_is_one_line(
    tmp_path: Path, tokenizer: TextTokenizer, capsys, what: str
) -> None:
    kind, settings, harm, says = BROKEN[what]
    judge_folder(tmp_path / "judge", tokenizer, kind, **settings)
    if harm is not None:
        harm(tmp_path / "judge")
    capsys.readouterr()  # what saving it printed
    line = complaint(capsys, "eval", "gen", "--judge", str(tmp_path / "judge"), "--records",
                     str(tmp_path / "r.jsonl"))  # fmt: skip
    assert says in line
    assert [p.name for p in tmp_path.iterdir()] == ["judge"]


def test_a_damaged_gguf_file_is_one_line(tmp_path: Path, capsys) -> None:
    file = tmp_path / "judge.gguf"
    file.write_bytes(b"not one")
    assert "is not a .gguf file" in complaint(capsys, "eval", "gen", "--judge", str(file))
    pytest.importorskip("transformers")
    file.write_bytes(b"GGUF" + bytes(20))
    line = complaint(capsys, "eval", "gen", "--judge", str(file))
    assert "is damaged or not a causal language model" in line or "install xdlm[text]" in line


def test_a_judge_that_cannot_tell_is_named(
    tmp_path: Path, tokenizer: TextTokenizer, capsys
) -> None:
    """Random weights do not know real text from shuffled text, and the user is told."""
    judge_folder(tmp_path, tokenizer)
    ranks = []
    for seed in range(8):
        main(["eval", "gen", "--judge", str(tmp_path), "--n", "2", "--length", "12", "--steps", "1",
              "--seed", str(seed)])  # fmt: skip
        captured = capsys.readouterr()
        ranks.append("means nothing" in captured.err)
    assert True in ranks and False in ranks


def test_no_text_is_dropped() -> None:
    """More texts than go through the model at a time, one of them empty: all are in the figures."""

    class Counting:
        name, sha256 = "counting", "0"

        def __init__(self) -> None:
            self.seen: list[str] = []

        def score(self, text: str) -> Score:
            self.seen.append(text)
            return Score(2.0 * (len(self.seen) > 1), len(self.seen) - 1)

    model, judge = load("pocket"), Counting()
    out = model.sample(67, steps=1, length=3, trajectory=False)
    found = quality(out.text, [np.asarray(row) for row in out.tokens], judge)
    assert judge.seen == out.text and len(judge.seen) == 67
    assert (found.n, found.judge_tokens) == (67, sum(range(67)))
    assert found.perplexity.value == pytest.approx(math.exp(2.0 * 66 / sum(range(67))))


def test_mauve_tells_sets_of_vectors_apart() -> None:
    pytest.importorskip("mauve")
    generator = np.random.default_rng(0)
    one, same, other = (generator.normal(at, 1, (200, 8)).astype(np.float32) for at in (0, 0, 2))
    assert mauve(one, same, seed=0) > 0.9
    assert mauve(one, other, seed=0) < 0.1
    assert mauve(one, same, seed=0) == mauve(one, same, seed=0)


def test_mauve_needs_features_texts_and_its_package(
    tmp_path: Path, tokenizer: TextTokenizer, trigrams: NgramJudge, monkeypatch
) -> None:
    with pytest.raises(UserError, match="judge with hidden states"):
        check_mauve(trigrams, 100)
    judge_folder(tmp_path, tokenizer)
    judge = open_judge(str(tmp_path), tokenizer, torch.device("cpu"))
    with pytest.raises(UserError, match="at least 20 texts"):
        check_mauve(judge, 19)
    monkeypatch.setitem(sys.modules, "mauve", None)
    with pytest.raises(UserError, match=r"install xdlm\[eval\]"):
        check_mauve(judge, 20)


def test_features_are_the_last_hidden_state(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    model = judge_folder(tmp_path, tokenizer)
    judge = open_judge(str(tmp_path), tokenizer, torch.device("cpu"))
    assert isinstance(judge, FeatureJudge)
    text = "It was the best of times."
    with torch.no_grad():
        states = model.transformer(torch.tensor([tokenizer.encode(text)])).last_hidden_state
        end = model.transformer(torch.tensor([[tokenizer.eos_id]])).last_hidden_state
    np.testing.assert_allclose(judge.features(text), states[0, -1].numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(judge.features(""), end[0, -1].numpy(), rtol=1e-5, atol=1e-6)
    assert judge.features(text * 9).shape == (32,)  # beyond its context


def test_mauve_command(tmp_path: Path, tokenizer: TextTokenizer, capsys) -> None:
    pytest.importorskip("mauve")
    judge_folder(tmp_path / "judge", tokenizer)
    main(["eval", "gen", "--judge", str(tmp_path / "judge"), "--n", "20", "--length", "12",
          "--steps", "1", "--mauve", "--records", str(tmp_path / "r.jsonl")])  # fmt: skip
    found = {r.metric: r for r in read_records(tmp_path / "r.jsonl") if r.metric.endswith("mauve")}
    assert set(found) == {"mauve", "real_shuffled_mauve"}
    assert found["mauve"].data == "corpus:heldout" and found["mauve"].judge == "judge"
    assert all(0 <= r.value <= 1 for r in found.values())
    assert "MAUVE" in capsys.readouterr().out


def test_a_causal_model_as_judge(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """A small GPT-2 of random weights: nats are those of its own loss, also beyond its context."""
    model = judge_folder(tmp_path, tokenizer)
    judge = open_judge(str(tmp_path), tokenizer, torch.device("cpu"))
    text = "It was the best of times."
    ids = torch.tensor([tokenizer.encode(text)])
    with torch.no_grad():
        expected = float(model(ids, labels=ids).loss) * (ids.numel() - 1)
    assert judge.score(text) == Score(pytest.approx(expected, rel=1e-5), ids.numel() - 1)
    long = judge.score(text * 9)
    assert long.tokens == len(tokenizer.encode(text * 9)) - 1


def test_loading_a_judge_draws_no_bars(tmp_path: Path, tokenizer, capfd, monkeypatch) -> None:
    """Neither the library's own, nor those that it draws whatever its settings say."""
    transformers = pytest.importorskip("transformers")
    judge_folder(tmp_path, tokenizer)
    whole = transformers.AutoModelForCausalLM.from_pretrained

    def with_bar(*arguments: object, **settings: object) -> object:
        for _ in pytest.importorskip("tqdm").tqdm(range(3), desc="Converting and de-quantizing"):
            pass
        return whole(*arguments, **settings)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", with_bar)
    capfd.readouterr()  # what saving it printed
    open_judge(str(tmp_path), tokenizer, torch.device("cpu"))
    assert capfd.readouterr() == ("", "")


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
    generated = [r for r in found if r.steps is not None]
    beside = {r.metric: r for r in found if r.steps is None}
    assert [r.steps for r in generated if r.metric == "gen_ppl"] == [1, 3]
    plain = {"entropy", "distinct_1", "distinct_2", "distinct_3"}
    assert {r.metric for r in generated} == {"gen_ppl", *plain}
    assert set(beside) == {f"real{how}_{m}" for how in ("", "_shuffled") for m in ("ppl", *plain)}
    for r in found:
        assert r.n == 4 and r.length == 24 and r.dtype == "float32"
        assert (r.judge is not None) == r.metric.endswith("ppl")
    assert all(r.nfe == r.steps + 1 for r in generated)
    assert beside["real_ppl"].data == "corpus:heldout" and beside["real_ppl"].data_sha256
    assert beside["real_ppl"].value < beside["real_shuffled_ppl"].value
    assert "real, shuffled" in shown and f"{beside['real_ppl'].value:.2f}" in shown
    for steps in (1, 3):
        lines = (samples / f"steps-{steps:05d}.jsonl").read_text().splitlines()
        assert len(lines) == 4 and all("text" in json.loads(line) for line in lines)
