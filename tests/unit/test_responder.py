"""A model as a harness asks it: where answers end, and likelihoods by several routes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_runs import trainer_for
from test_next_token import autoregressive_run
from told import told

from xdlm import UserError, load
from xdlm.api import Model
from xdlm.cli.main import main
from xdlm.evaluation.harness import Prompt, Responder, WriterSettings
from xdlm.evaluation.records import read_records

QUICK = WriterSettings(steps=2, length=12)


@pytest.mark.parametrize("sampler", ["ancestral", "confidence"])
def test_answers_depend_on_their_prompts_alone(pocket: Model, sampler: Any) -> None:
    """Each answer is a function of its prompt and of which repeat of it this is."""
    prompts = [Prompt("It was a dark"), Prompt("She said that"), Prompt("It was a dark", repeat=1)]
    settings = replace(QUICK, sampler=sampler, temperature=1.0)
    together = Responder(pocket, settings).write(prompts)
    alone = [Responder(pocket, replace(settings, batch_tokens=1)).write([p])[0] for p in prompts]
    assert [reply.text for reply in together] == [reply.text for reply in alone]
    assert len({reply.text for reply in together}) == 3
    assert all(0 < reply.nfe <= settings.steps + 1 for reply in together)


@pytest.mark.parametrize(("stops", "tokens", "text", "stopped"), [
    ((), None, "one two. three", "end of text"), ((" three", ". "), None, "one two", ". "),
    (("never",), None, "one two. three", "end of text"), ((), 1, "one", ""),
])  # fmt: skip
def test_an_answer_ends_where_it_should(
    pocket: Model, stops: tuple[str, ...], tokens: int | None, text: str, stopped: str
) -> None:
    responder = Responder(told(pocket, lambda _: "one two. three<|endoftext|> after"), QUICK)
    (reply,) = responder.write([Prompt("x", stops, tokens)])
    assert text.startswith(reply.text) if tokens else reply.text == text
    assert reply.stopped == stopped


def test_a_prompt_that_does_not_fit_loses_its_beginning(pocket: Model) -> None:
    seen: list[list[int]] = []
    ids = pocket.tokenizer.encode("It was a dark and stormy night, and nobody slept.")
    listening = told(pocket, lambda prompt: str(seen.append(prompt)))
    responder = Responder(listening, QUICK, context=QUICK.length + 5)
    responder.write([Prompt(pocket.tokenizer.decode(ids)), Prompt("It")])
    assert seen[0] == ids[-5:] and responder.n_cut == 1
    with pytest.raises(UserError, match="no room for a prompt"):
        Responder(pocket, QUICK, context=QUICK.length)


def test_rolling_is_the_perplexity_of_the_text(pocket: Model, tmp_path: Path) -> None:
    """The same figure as `xdlm eval ppl` on a file of that text, and within error bars of it under other
    noise. The text is longer than a row."""
    text = "It was a dark night, and the wind was high; nobody in the house could sleep. " * 16
    file, records = tmp_path / "text.txt", tmp_path / "records.jsonl"
    file.write_text(text)
    main(["eval", "ppl", "--data", str(file), "--draws", "4", "--records", str(records)])
    (ppl,) = read_records(records)
    nats, error = (
        ppl.details[key] * ppl.details["tokens"] for key in ("nats_per_token", "nats_stderr")
    )
    assert ppl.n > 1
    (same,) = Responder(pocket, QUICK, draws=4).rolling([text])
    assert same.log_p == pytest.approx(-nats) and same.stderr == pytest.approx(error)
    (other,) = Responder(pocket, replace(QUICK, seed=1), draws=8).rolling([text])
    assert abs(other.log_p + nats) < 4 * math.hypot(other.stderr, error)


def test_a_short_text_costs_the_same_as_a_continuation_of_nothing(pocket: Model) -> None:
    """Two routes to one figure: rows of perplexity, and a continuation without context."""
    text = "It was a dark night, and the wind was high."
    responder = Responder(pocket, QUICK, draws=48)
    (whole,) = responder.rolling([text])
    (part,) = responder.log_likelihood([("", text + "<|endoftext|>")])
    assert abs(whole.log_p - part.log_p) < 4 * math.hypot(whole.stderr, part.stderr)


def test_nothing_has_no_likelihood(pocket: Model) -> None:
    with pytest.raises(UserError, match="nothing to judge behind 'He sat'"):
        Responder(pocket, QUICK).log_likelihood([("He sat", "")])


def test_likelier_words_are_found_likelier(pocket: Model) -> None:
    pairs = [("He took off his hat and sat", " down"), ("He took off his hat and sat", " zebra")]
    likely, unlikely = Responder(pocket, QUICK, draws=32).log_likelihood(pairs)
    assert likely.log_p - unlikely.log_p > 3 * math.hypot(likely.stderr, unlikely.stderr)


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Model:
    run = tmp_path_factory.mktemp("causal") / "run"
    assert trainer_for(autoregressive_run(run, steps=2)).run()
    return load(run)


def test_an_autoregressive_model_is_exact(causal: Model) -> None:
    responder = Responder(causal, QUICK)
    whole, first, second = responder.log_likelihood(
        [("", "the sea was calm"), ("", "the sea"), ("the sea", " was calm")]
    )
    assert whole.stderr == 0
    assert whole.log_p == pytest.approx(first.log_p + second.log_p, abs=1e-3)
    text = "the sea was calm and blue " * 30
    (rolling,) = responder.rolling([text])
    found = causal.perplexity([text])
    assert rolling.log_p == pytest.approx(-found.nats_per_token * found.n_tokens)
    with pytest.raises(UserError, match="autoregressive"):
        responder.write([Prompt("the sea")])


@pytest.mark.parametrize(("bad", "message"), [
    ({"sampler": "ancestrl"}, "did you mean 'ancestral'"), ({"steps": 0}, "at least 1 step"),
    ({"length": 0}, "length"), ({"temperature": -1.0}, "temperature"),
    ({"options": {"block_length": 4}}, "no meaning for the ancestral sampler"),
])  # fmt: skip
def test_bad_settings(bad: dict[str, Any], message: str, pocket: Model) -> None:
    with pytest.raises(UserError, match=message):
        Responder(pocket, WriterSettings(**bad))
