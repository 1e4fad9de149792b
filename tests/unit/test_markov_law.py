"""A hidden Markov model as a law of texts, against sums over all texts and all hidden paths."""

from __future__ import annotations

import math
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from xdlm import UserError, Vocab
from xdlm.cli.main import main
from xdlm.evaluation.known_law import draw_texts
from xdlm.evaluation.markov_fit import expected_counts, fit_markov
from xdlm.evaluation.markov_law import MarkovLaw, bound_of
from xdlm.evaluation.records import read_records
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform
from xdlm.report.study.commands import draw_known_again
from xdlm.sampling import SamplerConfig

CPU = torch.device("cpu")
LENGTH, SIZE, HIDDEN = 3, 3, 2
LAW = MarkovLaw(
    "small",
    torch.tensor([0.7, 0.3]),
    torch.tensor([[0.9, 0.1], [0.2, 0.8]]),
    torch.tensor([[0.8, 0.18, 0.02], [0.02, 0.08, 0.9]]),
)
NOISES = {
    "masked": Masked(Vocab(SIZE + 1, SIZE)),
    "uniform": Uniform(Vocab(SIZE)),
    "mixed": Mixed(Vocab(SIZE + 1, SIZE), k=0.3),
    "gidd": Gidd(Vocab(SIZE + 1, SIZE)),
}
every_noise = pytest.mark.parametrize("process", NOISES.values(), ids=NOISES.keys())


def paths(law: MarkovLaw, length: int) -> tuple[Tensor, Tensor]:
    """All hidden paths [P, L] and their chances [P]."""
    states = torch.tensor(list(product(range(law.n_hidden), repeat=length)))
    first, following = law.first.double(), law.next.double()
    return states, first[states[:, 0]] * following[states[:, :-1], states[:, 1:]].prod(1)


def chances(law: MarkovLaw, texts: Tensor) -> Tensor:
    """p of each of `texts` [n, L], by the definition: float64 [n]."""
    states, weight = paths(law, texts.shape[1])
    said = law.says.double()[states[None], texts[:, None]].prod(-1)  # [n, P]
    return said @ weight


def all_texts(length: int = LENGTH) -> Tensor:
    return torch.tensor(list(product(range(SIZE), repeat=length)))


def test_chances_are_sums_over_hidden_paths() -> None:
    texts = all_texts()
    expected = chances(LAW, texts)
    assert float(expected.sum()) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(LAW.nats(texts), -expected.log(), rtol=1e-7, atol=1e-7)
    assert LAW.nats(texts[:0]).shape == (0,)


def test_texts_of_the_law_have_it() -> None:
    """20,000 texts: each of the 27 is found as often as it should be, within five standard errors."""
    n = 20_000
    drawn, texts = LAW.texts(n, LENGTH, seed=0), all_texts()
    p = chances(LAW, texts)
    found = (drawn[:, None] == texts).all(-1).double().mean(0)
    assert bool(((found - p).abs() < 5 * (p * (1 - p) / n).sqrt()).all())
    assert torch.equal(drawn, LAW.texts(n, LENGTH, seed=0))
    assert not torch.equal(drawn, LAW.texts(n, LENGTH, seed=1))


@every_noise
@pytest.mark.parametrize("t", [0.02, 0.5, 0.97])
def test_ideal_predictions_are_bayes_rule_over_all_texts(process: NoiseProcess, t: float) -> None:
    """p(x_i | z_j, j != i), from the chance of every text and of what noise makes of it."""
    noisy = torch.tensor(list(product(range(process.vocab.size), repeat=LENGTH)))
    times = torch.full((len(noisy),), t)
    found = LAW.ideal(process)(noisy, times)[..., :SIZE].double().softmax(-1)
    texts, coefs = all_texts(), process.coefs(times.double())
    shown = torch.stack(
        [coefs.of((noisy == text).double(), noisy) for text in texts], 1
    )  # q_t(z_i | x_i), [Z, X, L]
    for i in range(LENGTH):
        others = [j for j in range(LENGTH) if j != i]
        joint = chances(LAW, texts) * shown[:, :, others].prod(-1)
        expected = torch.stack([joint[:, texts[:, i] == e].sum(1) for e in range(SIZE)], 1)
        possible = expected.sum(1) > 1e-12
        expected = expected / expected.sum(1, keepdim=True)
        torch.testing.assert_close(found[possible, i], expected[possible], rtol=1e-4, atol=1e-5)


def test_what_noise_cannot_make_is_text_from_the_start() -> None:
    """A prompt under masked noise: what is seen of it does not depend on the time."""
    process = NOISES["masked"]
    noisy = torch.tensor([[2, SIZE, SIZE], [SIZE, 0, 1], [SIZE, SIZE, SIZE]])
    late, early = (LAW.ideal(process)(noisy, torch.full((3,), t)) for t in (1.0, 0.5))
    torch.testing.assert_close(late[..., :SIZE], early[..., :SIZE])


def test_a_vocabulary_in_which_a_law_does_not_fit_is_refused() -> None:
    for process in (Masked(Vocab(SIZE + 1, 0)), Uniform(Vocab(SIZE - 1))):
        with pytest.raises(UserError, match="the law has 3 tokens, and special ones come behind"):
            LAW.ideal(process)


@every_noise
def test_the_bound_of_ideal_predictions_is_tight(process: NoiseProcess) -> None:
    """For the same texts the law itself says as much, within four standard errors of their differences;
    predictions that know nothing of other positions are further off."""
    texts = LAW.texts(4096, 6, seed=0)
    found = bound_of(LAW, process, texts, seed=0, device=CPU)
    assert math.log(found.own) == pytest.approx(float(LAW.nats(texts).mean()) / 6)
    assert math.log(found.perplexity.value / found.own) == pytest.approx(
        found.excess.value, abs=1e-5
    )
    assert abs(found.excess.value) < 4 * found.excess.stderr and found.excess.stderr < 0.015
    of_tokens = torch.bincount(texts.flatten()).float() / texts.numel()
    alone = MarkovLaw("alone", torch.ones(1), torch.ones(1, 1), of_tokens[None])
    assert bound_of(alone, process, texts, seed=0, device=CPU).perplexity.value > 1.15 * found.own


def test_texts_are_compared_with_themselves() -> None:
    """Texts that differ far more than chance: in another order the differences would be as large."""
    says = torch.tensor([[0.999, 0.0005, 0.0005], [1 / 3, 1 / 3, 1 / 3]])
    following = torch.tensor([[0.999, 0.001], [0.001, 0.999]])
    law = MarkovLaw("apart", torch.tensor([0.5, 0.5]), following, says)
    texts = law.texts(512, 8, seed=0)
    apart = float((law.nats(texts) / 8).std()) / math.sqrt(512)
    found = bound_of(law, NOISES["masked"], texts, seed=0, device=CPU)
    assert found.excess.stderr < 0.75 * apart and abs(found.excess.value) < 4 * found.excess.stderr


def test_errors_are_over_texts() -> None:
    texts = LAW.texts(64, 6, seed=0)
    nats = LAW.nats(texts) / 6
    found = LAW.faithfulness(texts).perplexity
    assert found.value == pytest.approx(math.exp(nats.mean()))
    assert found.stderr == pytest.approx(found.value * float(nats.std()) / 8)


@every_noise
def test_predictions_of_pure_noise_are_those_of_no_text(process: NoiseProcess) -> None:
    """At time 1 and nowhere else, whatever the times of other rows in the batch."""
    ideal, t = LAW.ideal(process), torch.tensor([1.0, 0.5])
    z = torch.full((2, LENGTH), SIZE if process.vocab.mask_id is not None else 0)
    both = ideal(z, t)[..., :SIZE].softmax(-1)
    one, other = (ideal(z[:1], at[None])[..., :SIZE].softmax(-1)[0] for at in t)
    torch.testing.assert_close(both, torch.stack([one, other]))
    of_first = LAW.first @ LAW.says
    torch.testing.assert_close(one[0], of_first)
    if process.vocab.mask_id is None:
        assert float((other[0] - of_first).abs().max()) > 0.01


@every_noise
def test_many_steps_have_the_law_and_one_has_only_its_frequencies(process: NoiseProcess) -> None:
    """In one step tokens are drawn independently of each other: their perplexity is what frequencies cost
    under the law, which all texts tell."""
    n, texts = 4096, all_texts()
    p = chances(LAW, texts)
    alone = torch.ones(len(texts)).double()
    for i in range(LENGTH):
        of_token = torch.stack([p[texts[:, i] == e].sum() for e in range(SIZE)])
        alone *= of_token[texts[:, i]]
    expected = {1: float(alone @ -p.log()) / LENGTH, 64: float(p @ -p.log()) / LENGTH}
    assert expected[1] > expected[64] + 0.1
    for steps, nats in expected.items():
        drawn = draw_texts(
            LAW, process, SamplerConfig(steps), n=n, length=LENGTH, seed=0, device=CPU
        )
        found = LAW.faithfulness(drawn)
        assert math.log(found.perplexity.value) == pytest.approx(nats, abs=0.03), steps
    assert math.log(found.expected.value) == pytest.approx(expected[64], abs=0.02)
    assert found.own_entropy.value == pytest.approx(found.entropy.value, abs=0.02)


def test_expected_counts_are_those_of_all_hidden_paths() -> None:
    rows = torch.tensor([[0, 1, 2], [2, 2, 0]])
    states, weight = paths(LAW, LENGTH)
    first = torch.zeros(HIDDEN).double()
    pairs, says = torch.zeros(HIDDEN, HIDDEN).double(), torch.zeros(SIZE, HIDDEN).double()
    for row in rows:
        joint = weight * LAW.says.double()[states, row].prod(-1)
        for path, chance in zip(states.tolist(), (joint / joint.sum()).tolist(), strict=True):
            first[path[0]] += chance
            for here, there in pairwise(path):
                pairs[here, there] += chance
            for token, state in zip(row.tolist(), path, strict=True):
                says[token, state] += chance
    found = expected_counts(LAW, rows)
    for name, expected in {"first": first, "next": pairs, "says": says}.items():
        part = getattr(found, name).double()
        torch.testing.assert_close(part, expected / expected.sum(), rtol=1e-5, atol=1e-6)


def test_a_law_is_learned_from_its_texts() -> None:
    """Up to the names of hidden states: what was learned explains new texts within 0.005 nats of the law
    itself, where frequencies alone are 0.14 nats off."""
    told: list[tuple[int, int]] = []
    learned = fit_markov(
        "learned", LAW.texts(20_000, 12, seed=0), n_hidden=HIDDEN, n_tokens=SIZE, seed=1,
        origin={"data": "itself"}, on_batch=lambda done, of: told.append((done, of)),
    )  # fmt: skip
    new = LAW.texts(4096, 12, seed=1)
    excess = float((learned.nats(new) - LAW.nats(new)).mean()) / 12
    frequencies = torch.bincount(new.flatten()).double()
    frequencies /= frequencies.sum()
    alone = -float(frequencies.log()[new].mean()) - float(LAW.nats(new).mean()) / 12
    assert 0 < excess < 0.005 and alone > 0.1
    assert told[-1] == (20_000, 20_000) and learned.origin == {"data": "itself"}
    assert bool((learned.says > 0).all() and (learned.next > 0).all())


def test_too_little_text_or_too_many_states_are_refused() -> None:
    with pytest.raises(UserError, match="too little text"):
        fit_markov("few", LAW.texts(10, 4, seed=0), n_hidden=2, n_tokens=SIZE)
    with pytest.raises(UserError, match=r"2\.\.4,096 hidden states, got 1"):
        fit_markov("one", LAW.texts(300, 4, seed=0), n_hidden=1, n_tokens=SIZE)


def test_a_kept_law_is_the_same(tmp_path: Path) -> None:
    law = MarkovLaw(LAW.name, LAW.first, LAW.next, LAW.says, {"data": "some"})
    law.save(tmp_path / "law.safetensors")
    kept = MarkovLaw.load(tmp_path / "law.safetensors")
    assert (kept.name, kept.origin, kept.digest) == (law.name, law.origin, law.digest)


@pytest.mark.parametrize("damage", ["cut", "other", "shape", "dtype", "sums", "zeros", "origin"])
def test_damaged_laws_are_refused_in_one_line(damage: str, tmp_path: Path, capsys) -> None:
    from safetensors.torch import save_file

    file = tmp_path / "law.safetensors"
    LAW.save(file)
    tensors = {"first": LAW.first, "next": LAW.next, "says": LAW.says}
    about = {"law": "small", "origin": "{}"}
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-5])
    elif damage == "other":
        save_file({"weight": LAW.says}, file)
    elif damage == "shape":
        save_file({**tensors, "first": torch.ones(3) / 3}, file, about)
    elif damage == "dtype":
        save_file({**tensors, "says": LAW.says.long()}, file, about)
    elif damage == "zeros":
        save_file({**tensors, "next": torch.eye(HIDDEN)}, file, about)
    elif damage == "sums":
        save_file({**tensors, "says": 2 * LAW.says}, file, about)
    else:
        save_file(tensors, file, {**about, "origin": "[]"})
    with pytest.raises(SystemExit) as stop:
        main(["eval", "draws", "--law", str(file), "--length", "4", "--steps", "2"])
    message = capsys.readouterr().err
    assert stop.value.code == 2 and str(file) in message and message.count("\n") == 1


def test_the_command_learns_keeps_and_draws_again(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    kept, records = tmp_path / "novels.safetensors", tmp_path / "draws.jsonl"
    main(["eval", "draws", "--law", "markov", "--states", "4", "--read", "20000", "--length", "16",
          "--steps", "2", "--n", "8", "--bound", "4", "--keep-law", str(kept), "--records",
          str(records)])  # fmt: skip
    shown = " ".join(capsys.readouterr().out.split())
    assert "The law's own perplexity is" in shown and "The bound of ideal predictions on 4" in shown
    first, entropy, bound = read_records(records)
    assert (first.metric, entropy.metric, bound.metric) == ("law_ppl", "law_entropy", "law_bound")
    assert (
        first.model == "markov-4"
        and first.data == "corpus:train"
        and bound.n == len(bound.row_nats) == 4
    )
    assert first.details.keys() >= {"law_ppl", "law_ppl_stderr", "law_entropy", "vocabulary"}
    again = tmp_path / "again.jsonl"
    main(["eval", "draws", "--law", str(kept), "--length", "16", "--steps", "2", "--n", "8",
          "--bound", "4", "--records", str(again)])  # fmt: skip
    assert read_records(again) == [first, entropy, bound]
    command = draw_known_again([first, entropy, bound]).split()
    main([*command[1:-1], str(tmp_path / "anew.jsonl")])
    assert [(r.metric, r.value) for r in read_records(tmp_path / "anew.jsonl")] == [
        (r.metric, r.value) for r in (first, entropy, bound)
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bound", "4"], "--bound is for --law markov"),
        (["--law", "markov", "--bound", "1"], "--bound must be 0 or lie in 2"),
        (["--law", "markov", "--impl", "gumbel", "--calculate"], "independent tokens"),
        (["--law", "markov", "--read", "1000"], "--read must be at least 4,096 tokens"),
        (["--law", "Markov"], "did you mean 'markov'"),
        (["--states", "8"], "--states works with --law markov only, not with zipf"),
        (["--law", "markov", "--tokens", "8"], "--tokens works with --law zipf"),
        (["--law", "kept.safetensors", "--data", "corpus:train"], "--data does not work with kept"),
        (["--law", "markov", "--keep-law", "/dev/null/a.safetensors"], "cannot write /dev/null"),
        (["--law", "markov", "--states", "1", "--length", "8"], "hidden states, got 1"),
        (["--law", "markov", "--keep-law", "law.json"], "--keep-law must end in .safetensors"),
        (["--keep-law", "law.safetensors"], "--keep-law works with --law markov"),
        (["--law", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["eval", "draws", *words, "--records", "draws.jsonl"])
    message = capsys.readouterr().err
    assert stop.value.code == 2 and said in message and message.count("\n") == 1
    assert not any(tmp_path.iterdir())
