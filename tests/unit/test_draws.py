"""Texts of a known law: exact draws keep to it, float32 noise does not, and the page says so."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from studies import config, of, page_of_study, verdicts, whole
from test_generation import judge_folder

from xdlm import UserError, Vocab, load
from xdlm.cli.main import main
from xdlm.data import read_documents
from xdlm.evaluation.known_law import IndependentDenoiser, IndependentLaw, draw_texts, zipf
from xdlm.evaluation.records import EvalRecord, append_records, read_records
from xdlm.evaluation.starvation import classes_of, starved_nats
from xdlm.models import drawing_head
from xdlm.noise import Gidd, Masked, Mixed, NoiseProcess, Uniform
from xdlm.report.study import read_study
from xdlm.report.study.collection import collect
from xdlm.report.study.commands import draw_known_again
from xdlm.sampling import Guidance, SamplerConfig, time_grid
from xdlm.sampling.reverse import Run
from xdlm.sampling.starved import step_starved
from xdlm.sampling.step import StepUniforms

CPU = torch.device("cpu")


def drawn(
    law: IndependentLaw, process: NoiseProcess, steps: int, impl: str, n: int = 4
) -> torch.Tensor:
    config = SamplerConfig(steps, impl=impl)
    return draw_texts(law, process, config, n=n, length=len(law.states), seed=0, device=CPU)


@pytest.mark.parametrize(
    "process",
    [Masked(Vocab(501, 500)), Mixed(Vocab(501, 500), k=0.1), Uniform(Vocab(500)), Gidd(Vocab(501, 500))],
    ids=["masked", "mixed", "uniform", "gidd"],
)  # fmt: skip
@pytest.mark.parametrize("steps", [2, 64])
def test_exact_draws_keep_to_the_law(process: NoiseProcess, steps: int) -> None:
    """Laws that differ from position to position, in few steps as in many."""
    generator = torch.Generator().manual_seed(0)
    law = IndependentLaw("any", *(torch.randn(n, 6, generator=generator) for n in (128, 500)))
    found = law.faithfulness(drawn(law, process, steps, "thinned", n=16))
    assert abs(found.perplexity.value - found.expected.value) < 4 * found.perplexity.stderr
    assert found.perplexity.stderr < 0.05 * found.expected.value


def test_what_is_found_is_what_the_definitions_say() -> None:
    law = IndependentLaw(
        "two", torch.tensor([[1.0], [2.0]]), torch.tensor([[0.0], [math.log(3.0)]])
    )
    p = torch.tensor([[1 / 4, 3 / 4], [1 / 10, 9 / 10]], dtype=torch.float64)
    found = law.faithfulness(torch.tensor([[0, 1], [1, 1]]))
    nats = -torch.stack([p[0, 0], p[1, 1], p[0, 1], p[1, 1]]).log()
    entropy = -(p * p.log()).sum(1)
    assert found.perplexity.value == pytest.approx(math.exp(nats.mean()))
    assert found.expected.value == pytest.approx(math.exp(entropy.mean()))
    error = (nats - entropy.repeat(2)).std() / 2
    assert found.perplexity.stderr == pytest.approx(found.perplexity.value * float(error))
    assert found.entropy.value == pytest.approx(math.log(2) / 2)


def noise_of(bits: int):
    """Exponential noise from uniform numbers of so many bits, on their grid."""

    def noise(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        u = torch.randint(1, 1 << bits, like.shape, generator=generator).double() / (1 << bits)
        return -u.log().float()

    return noise


def test_coarse_noise_starves_rare_tokens_of_masks_most(monkeypatch) -> None:
    """As noise of 24 bits does where tokens and steps are many, noise of 13 bits does where they are few:
    in 2 steps next to nothing is lost; in 128, more under masks than under mixed noise."""

    monkeypatch.setattr("xdlm.sampling.dense.exponential_noise", noise_of(13))
    law, lost = zipf(300, 128), {}
    for process in (Masked(Vocab(301, 300)), Mixed(Vocab(301, 300), k=0.5)):
        for steps in (2, 128):
            found = law.faithfulness(drawn(law, process, steps, "gumbel", n=16))
            lost[type(process), steps] = math.log(found.expected.value / found.perplexity.value)
    assert abs(lost[Masked, 2]) < 0.15
    assert lost[Masked, 128] > 0.4 and lost[Masked, 128] > lost[Mixed, 128] + 0.1


@pytest.mark.parametrize("process", [Masked(Vocab(301, 300)), Mixed(Vocab(301, 300), k=0.5)])
def test_draws_that_are_taken_back_have_the_law_of_coarse_noise(monkeypatch, process) -> None:
    """In nats against what is calculated, and in the frequency of each tenth of the tokens against coarse
    noise itself."""
    least, steps, law = 2.0**-13, 64, zipf(300, 128)
    monkeypatch.setattr("xdlm.sampling.dense.exponential_noise", noise_of(13))
    monkeypatch.setattr("xdlm.sampling.starved.LEAST", least)
    texts = {impl: drawn(law, process, steps, impl, n=32) for impl in ("gumbel", "starved")}
    found = law.faithfulness(texts["starved"]).perplexity
    lost = math.log(law.faithfulness(texts["starved"]).expected.value / found.value)
    calculated = starved_nats(classes_of(law, 1000), process, steps, least=least)
    assert lost > 0.1
    assert abs(math.log(found.value) - calculated) < 4 * found.stderr / found.value
    seen = torch.stack(
        [torch.bincount(each.flatten() // 30, minlength=10) for each in texts.values()]
    )
    error = (seen.double().sum(0)).sqrt()
    assert ((seen[0] - seen[1]).abs() < 4.5 * error).all()


@pytest.mark.parametrize(
    "process",
    [Masked(Vocab(21, 20)), Mixed(Vocab(21, 20), k=0.5), Uniform(Vocab(20)), Gidd(Vocab(21, 20))],
    ids=["masked", "mixed", "uniform", "gidd"],
)  # fmt: skip
def test_one_step_that_takes_draws_back_moves_as_coarse_noise_does(
    process: NoiseProcess, monkeypatch
) -> None:
    """Every state's own chances in one step of 48, against the largest weight / E by noise of 10 bits."""
    bits, batch, length, size = 10, 400, 500, process.vocab.size
    monkeypatch.setattr("xdlm.sampling.starved.LEAST", 2.0**-bits)
    law = zipf(20, length)
    model = IndependentDenoiser(law, size)
    head = drawing_head(model, process.special_ids)
    run = Run(model, process, head, None, length, None, Guidance(), None, record=False)
    leg = list(time_grid(process, 48, torch.zeros(batch)))[24]
    bridge, p = process.bridge(leg.at_s, leg.at_t), torch.zeros(size, dtype=torch.float64)
    p[:20] = law.weight[:, 0].double().softmax(0)
    at_s, redrawn = leg.at_s.b.dense(size)[0], bridge.b.dense(size)[0]
    after = leg.at_s.alpha[0] * p + at_s
    generator = torch.Generator().manual_seed(0)
    starved = 0
    for state in [z for z in (0, 7, 19, 20) if z < size and redrawn[z] > 0]:
        weight = after * redrawn[state]
        weight[state] += after[state] * bridge.alpha[0]
        exact, wanted = weight / weight.sum(), winners(weight[None], bits)[0]
        assert exact[state] > 0.5
        z = torch.full((batch, length), state)
        uniforms = torch.rand(4, batch, length, generator=generator, dtype=torch.float64)
        moved = step_starved(run, leg, z, StepUniforms(*uniforms), None).z.flatten()
        found = torch.bincount(moved, minlength=size) / len(moved)
        error = ((wanted * (1 - wanted) + 1 / len(moved)) / len(moved)).sqrt()
        assert ((found - wanted).abs() < 4.5 * error).all()
        starved += int(((exact - wanted) > 9 * error).sum())
    assert starved > 3  # tokens whose exact chance this is not


def winners(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """How likely each of weights [..., N] is to have the largest weight / E, for E on the grid of so many
    bits: the sum over its own E of the chance that all others are behind."""
    noise = -(torch.arange(1, 1 << bits, dtype=torch.float64) / (1 << bits)).log()
    rising = noise.flip(0)
    found = torch.zeros_like(weight)
    for own in noise:
        reached = own * weight[..., None, :] / weight[..., :, None].clamp_min(1e-300)  # E of others
        behind = 1 - torch.searchsorted(rising, reached.contiguous()) / len(noise)
        behind.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        found += behind.prod(-1) / len(noise)
    return found / found.sum(-1, keepdim=True)


@pytest.mark.parametrize("steps", [1, 4, 24])
@pytest.mark.parametrize(
    "process",
    [Masked(Vocab(21, 20)), Mixed(Vocab(21, 20), k=0.5), Uniform(Vocab(20)), Gidd(Vocab(21, 20))],
    ids=["masked", "mixed", "uniform", "gidd"],
)  # fmt: skip
def test_what_is_calculated_is_the_law_of_coarse_draws(process: NoiseProcess, steps: int) -> None:
    """Against every state's own chance of the largest weight / E, by noise of 8 bits."""
    law, bits, size = zipf(20, 3), 8, process.vocab.size
    p = torch.zeros(size, dtype=torch.float64)
    p[:20] = (law.weight[:, 0].double()).softmax(0)
    state = process.terminal(torch.zeros(1).double()).b.dense(size)[0]
    for leg in time_grid(process, steps, torch.zeros(1)):
        bridge = process.bridge(leg.at_s, leg.at_t)
        after = (leg.at_s.alpha * p + leg.at_s.b.dense(size)[0]).expand(size, -1)
        redrawn = bridge.b.dense(size)[0][:, None]
        weight = after * redrawn + torch.diag(after[0] * bridge.alpha)
        state = state @ winners(weight, bits)
    nats = float((state[:20] * -p[:20].log()).sum())
    own = float((p[:20] * -p[:20].log()).sum())
    assert abs(nats - own) > 0.03  # there is something to be found
    calculated = starved_nats(classes_of(law, 1000), process, steps, least=2.0**-bits)
    assert abs(calculated - nats) < 0.15 * abs(nats - own)
    assert starved_nats(classes_of(law), process, steps, least=2.0**-40) == pytest.approx(
        own, abs=1e-6
    )


def test_positions_of_one_law_are_followed_once() -> None:
    classes = classes_of(zipf(300, 256))
    assert classes.p.shape[0] == 1 and float(classes.positions) == 256
    assert float((classes.size * classes.p).sum()) == pytest.approx(1)


def test_an_ideal_denoiser_says_the_same_whatever_it_is_shown() -> None:
    model = IndependentDenoiser(zipf(5, 3, 2.0), 6)
    logits = model(torch.randint(0, 6, (2, 3)), torch.rand(2))
    expected = torch.tensor([1.0, 1 / 4, 1 / 9, 1 / 16, 1 / 25])
    torch.testing.assert_close(
        logits[..., :5].softmax(-1), (expected / expected.sum()).expand(2, 3, 5)
    )
    with pytest.raises(UserError, match="without classes"):
        model.trunk(torch.zeros(2, 3), torch.rand(2), torch.zeros(2))


def test_the_command_keeps_records(tmp_path: Path, capsys) -> None:
    file = tmp_path / "draws.jsonl"
    main(["eval", "draws", "--tokens", "50", "--length", "16", "--steps", "2", "4", "--n", "3", "--impl",
          "gumbel", "--process.kind", "masked", "--records", str(file)])  # fmt: skip
    shown = capsys.readouterr().out
    assert "drawn by gumbel" in shown and "The law's own perplexity is" in shown
    records = read_records(file)
    assert [(r.metric, r.steps) for r in records] == [
        ("law_ppl", 2), ("law_entropy", 2), ("law_ppl", 4), ("law_entropy", 4),
    ]  # fmt: skip
    again = draw_known_again(records)
    assert again == (
        "xdlm eval draws --exponent 1 --tokens 50 --process.kind masked --impl gumbel --n 3 --length 16 "
        "--seed 0 --steps 2 4 --records results.jsonl"
    )
    main([*again.split()[1:-1], str(tmp_path / "again.jsonl")])
    assert [r.value for r in read_records(tmp_path / "again.jsonl")] == [r.value for r in records]


def test_what_is_calculated_is_recorded(tmp_path: Path, capsys) -> None:
    file = tmp_path / "draws.jsonl"
    what = ["--tokens", "50", "--length", "16", "--steps", "2", "--process.kind", "masked"]
    main(["eval", "draws", *what, "--impl", "gumbel", "--calculate", "--records", str(file)])
    (found,) = read_records(file)
    assert (found.metric, found.sampler, found.n, found.stderr) == (
        "law_ppl",
        "gumbel, calculated",
        0,
        0.0,
    )
    assert found.value == pytest.approx(
        found.details["law_ppl"], rel=1e-3
    )  # two steps starve nobody
    assert "calculated for float32 noise" in capsys.readouterr().out
    main([*draw_known_again([found]).split()[1:-1], str(tmp_path / "again.jsonl")])
    assert read_records(tmp_path / "again.jsonl") == [found]


def test_a_language_model_says_what_comes_next(tmp_path: Path, capsys) -> None:
    """Its laws are those of its own logits behind each token."""
    tokenizer = load("pocket").tokenizer
    model = judge_folder(tmp_path / "model", tokenizer)
    main(["eval", "draws", "--law", str(tmp_path / "model"), "--length", "8", "--steps", "2", "--n", "2",
          "--records", str(tmp_path / "draws.jsonl")])  # fmt: skip
    (first, _) = read_records(tmp_path / "draws.jsonl")
    assert first.model == "model" and first.data == "corpus:heldout"
    ids = torch.tensor([tokenizer.encode(next(read_documents("corpus:heldout")))[:8]])
    with torch.no_grad():
        log_p = model(ids).logits[0].log_softmax(-1)
    own = math.exp(-(log_p.exp() * log_p).sum(-1).mean())
    assert first.details == {"law_ppl": pytest.approx(own, rel=1e-4), "vocabulary": tokenizer.size}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tokens", "1"], "at least 2 tokens"),
        (["--steps", "0"], "at least 1 step"),
        (["--length", "0"], "--length must lie in"),
        (["--n", "0"], "--n must lie in"),
        (["--impl", "gumble"], "gumbel"),
        (["--process.kind", "autoregressive"], "noise to undo"),
        (["--process.mask-id", "3"], "leave out --process.mask-id"),
        (["--calculate"], "add --impl gumbel"),
        (["--law", "nowhere"], "no law nowhere: give zipf, markov"),
    ],
)
def test_bad_input_is_one_line(words: list[str], said: str, tmp_path: Path, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["eval", "draws", *words, "--records", str(tmp_path / "draws.jsonl")])
    message = capsys.readouterr().err
    assert stop.value.code == 2 and said in message and message.count("\n") == 1
    assert not (tmp_path / "draws.jsonl").exists()


def texts(levels: dict[tuple[str, str, int], float], law: str = "zipf-1") -> list[EvalRecord]:
    """Perplexity, and an entropy with it, by method, sampler and steps."""
    found = []
    for (method, sampler, steps), level in levels.items():
        about = {"steps": steps, "sampler": sampler, "n": 2, "model": law, "length": 1024,
                 "temperature": 1.0, "top_p": 1.0, "stderr": 0.02 * level,
                 "config": {"process": config(method)["process"]},
                 "details": {"law_ppl": 1000.0, "vocabulary": 50257}}  # fmt: skip
        found += [of(method, "law_ppl", level, 0, **about),
                  of(method, "law_entropy", 5.0, 0, **{**about, "stderr": 0.01})]  # fmt: skip
    return found


LEVELS = {
    ("MDLM", "gumbel", 8): 990.0, ("MDLM", "gumbel", 1024): 500.0, ("XDLM k=0.1", "gumbel", 8): 995.0,
    ("XDLM k=0.1", "gumbel", 1024): 700.0, ("MDLM", "thinned", 1024): 1001.0,
}  # fmt: skip
CLAIM = "Drawn from a known law by float32 noise, 1,024 steps: MDLM's texts have a lower perplexity than"


def test_the_page_holds_texts_against_their_law(tmp_path: Path) -> None:
    page = page_of_study(replace(collect(whole()), law=texts(LEVELS)))
    found = verdicts(page)
    assert found[f"{CLAIM} the law says"] == found[f"{CLAIM} XDLM k=0.1's"] == "holds"
    assert "| MDLM, float32 noise | 990.0 ± 19.8 | 500.0 ± 10.0 |" in page
    assert "| MDLM, exact draws |  | 1001.0 ± 20.0 |" in page
    assert "(50,257 tokens; the law's own: 1000.00)" in page
    same = dict.fromkeys(LEVELS, 1000.0)
    found = verdicts(page_of_study(replace(collect(whole()), law=texts(same))))
    assert found[f"{CLAIM} XDLM k=0.1's"] == "not separated by the noise"
    with pytest.raises(UserError, match="texts of the law zipf-1: records differ in n"):
        page_of_study(
            replace(collect(whole()), law=[*texts(LEVELS), replace(texts(LEVELS)[0], n=9)])
        )


def test_what_is_calculated_stands_beside_the_papers_falls() -> None:
    """And beside those of texts that were drawn exactly, whose entropy is 5 everywhere."""
    falls = {"MDLM": 0.8, "XDLM k=0.1": 0.5, "XDLM k=0.9": 0.1, "UDLM": 0.0}
    levels = {
        (method, "gumbel, calculated", steps): 1000.0 * math.exp(-fall * (steps == 1024))
        for method, fall in falls.items()
        for steps in (8, 1024)
    }
    made = [replace(r, stderr=0.0, n=0) for r in texts(levels) if r.metric == "law_ppl"]
    page = page_of_study(replace(collect(whole()), law=[*made, *texts(LEVELS)]))
    assert "| MDLM, float32 noise, calculated | 1000.00 | 449.33 |" in page
    assert (
        "| MDLM | 0.800 | 0.585 | 0.000 |" in page
        and "| XDLM k=0.9 | 0.100 | 0.004 | 0.000 |" in page
    )
    assert "| UDLM | 0.000" not in page  # which published code draws by other noise
    assert "--impl gumbel --calculate --length 1024 --steps 8 1024" in page
    alone = page_of_study(replace(collect(whole()), law=made))
    assert "What is lost from 8 to 1,024 steps" in alone
    calculated = CLAIM.replace("noise, ", "noise, calculated, ")
    for one in (page, alone):  # what has no error goes before what has one
        assert verdicts(one)[f"{calculated} XDLM k=0.1's"] == "holds" and CLAIM not in one


@pytest.mark.parametrize("other", [{"seed": 1}, {"sampler": "dense"}])
def test_two_records_in_one_place_are_refused(other: dict[str, object]) -> None:
    (first, *_), exact = texts(LEVELS), texts(LEVELS)[-2]
    with pytest.raises(UserError, match="several records of law_ppl for MDLM"):
        page_of_study(replace(collect(whole()), law=[first, exact, replace(exact, **other)]))


def test_a_folder_of_laws_is_apart(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    (folder / "law").mkdir(parents=True)
    append_records(folder / "a.jsonl", whole())
    append_records(folder / "law" / "draws.jsonl", texts(LEVELS))
    study = read_study(folder)
    assert len(study.law) == 2 * len(LEVELS) and len(study.records) == len(whole())
    main(["report", "--results", str(folder), "--out", str(tmp_path / "RESULTS.md")])
    assert "(results/figures/law.png)" in (tmp_path / "RESULTS.md").read_text()
    assert 3_000 < (folder / "figures" / "law.png").stat().st_size < 100_000
