"""Constraints: patterns as Python understands them, exact draws, honoured under every noise."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch

from xdlm import UserError
from xdlm.api import Model, load
from xdlm.blanks import BlankRule, make_rules, read_template
from xdlm.sampling import Filter, configure
from xdlm.sampling.constraints import Automaton, Blank, Rules, check_fits, compile_pattern
from xdlm.sampling.patterns import Pattern
from xdlm.serve.engine import Engine
from xdlm.serve.requests import Request

KINDS = ("pocket-mdlm", "pocket-xdlm", "pocket-udlm")


@pytest.mark.parametrize(
    "expression",
    ["a", "", "ab|c", "a*", "(ab)*c?", "a{2}", "a{1,3}b", "[ab]+c", "[^a]", "(a|b)*abb", r"\w\d?",
     "a.c", "(a*)*b", "^ab$", "(^a|b)c$", "^a|(b$|^c)$", "a+?b", "(?:a|(b|c){2})+", "x{0}a",
     r"[\da-b]{2,}"],
)  # fmt: skip
def test_patterns_are_pythons(expression: str) -> None:
    pattern = Pattern(expression)
    for length in range(5):
        for text in map("".join, itertools.product("abc1", repeat=length)):
            state = pattern.start
            for character in text:
                state = pattern.step(state, character)
            assert pattern.accepts(state) == bool(re.fullmatch(expression, text)), text


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("(a", "no regular expression"),
        (r"(a)\1", "groupref is not supported"),
        ("(?=a)b", "assert is not supported"),
        ("a$b", "anchors inside"),
        ("a(^b)c", "anchors inside"),
        ("(a$)b{2}", "anchors inside"),
        ("(^a)+", "anchors inside"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        ("a{99999}", "too large"),
        ("(a{900}){900}", "too large"),
    ],
)
def test_what_an_automaton_cannot_do_is_refused(expression: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        Pattern(expression)


SPELLINGS = ["a", "b", "ab", " a", " ", "c", "\ufffd", ""]


def spelled(automaton: Automaton, length: int) -> set[str]:
    """All texts of so many tokens that an automaton accepts."""
    found = set()
    for tokens in itertools.product(range(len(SPELLINGS)), repeat=length):
        state = 0
        for token in tokens:
            state = int(automaton.table[state, token])
        if automaton.accepts[state]:
            found.add("".join(SPELLINGS[token] for token in tokens))
    return found


def test_tokens_spell_what_the_pattern_describes() -> None:
    automaton = compile_pattern(Pattern("(ab)+"), SPELLINGS, ())
    assert spelled(automaton, 1) == {"ab"}
    assert spelled(automaton, 2) == {"ab", " ab", "abab"}
    # One space in front is free, and no more than one.
    assert spelled(automaton, 3) == {" ab", "abab", " abab", "ababab"}
    without = compile_pattern(Pattern("(ab)+"), SPELLINGS, (2,))
    assert spelled(without, 2) == {"ab", " ab"}
    assert without.lengths()[:3] == [2, 3, 4]
    with pytest.raises(
        UserError, match="a blank of 1 tokens cannot hold x: it takes 2 to 64 or more"
    ):
        check_fits(without, 1, "x")
    with pytest.raises(UserError, match="no number of tokens can"):
        check_fits(compile_pattern(Pattern("xyz"), SPELLINGS, ()), 3, "x")


def test_draws_follow_the_constrained_law() -> None:
    """Frequencies against the law by enumeration: 4,000 draws, 5 standard errors."""
    automaton = compile_pattern(Pattern("a*b?a*"), SPELLINGS, ())
    weights = torch.rand(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(8), repeat=3):
        state = 0
        for token in tokens:
            state = int(automaton.table[state, token])
        if automaton.accepts[state]:
            law[tokens] = float(torch.stack([weights[i, t] for i, t in enumerate(tokens)]).prod())
    total, n = sum(law.values()), 4_000
    numbers = torch.rand(n, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = [tuple(automaton.draw(weights, row, Filter()).tolist()) for row in numbers]
    assert set(drawn) <= set(law)
    for tokens, weight in law.items():
        p = weight / total
        error = 5 * (p * (1 - p) / n) ** 0.5 + 1 / n
        assert abs(drawn.count(tokens) / n - p) < error
    best = tuple(automaton.draw(weights, numbers[0], Filter(0.0)).tolist())
    assert best in law and law[best] > total / len(law)


def test_what_cannot_be_reached_outweighs_nothing() -> None:
    """Texts of the second kind need more tokens than there are, so that their states near the end are never
    come to, however likely their tokens; beside them 20 times 1e-30 would be rounded to nothing."""
    automaton = compile_pattern(Pattern("c{20}|b[ab]{60,}"), SPELLINGS, ())
    weights = torch.ones(20, 8, dtype=torch.float64)
    weights[:, 5] = 1e-30
    drawn = automaton.draw(weights, torch.full((20,), 0.5, dtype=torch.float64), Filter())
    assert drawn.tolist() == [5] * 20


def test_compiling_can_be_stopped() -> None:
    calls = []

    def stop() -> None:
        calls.append(None)
        if len(calls) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        compile_pattern(Pattern("a{9}"), SPELLINGS, (), on_state=stop)


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {name: load(name, device="cpu") for name in KINDS}


def spellings(model: Model) -> list[str]:
    assert model.process is not None
    return model.tokenizer.pieces(range(model.process.vocab.size))


def filled(model: Model, rules: Rules, ids: list[int | None], **how: Any) -> list[list[int]]:
    assert model.process is not None
    config = configure({"steps": 6, **how}, model.process)
    with Engine(model.denoiser, model.process) as engine:
        rows = engine.submit(Request(ids, config, n=6, seed=5, rules=rules)).result(60)
    return [row.tokens.tolist() for row in rows]


HOWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5, "top_p": 0.5, "last": "argmax"},
    {"sampler": "confidence", "temperature": 0.0},
    {"sampler": "confidence", "block_length": 4, "confidence": "random"},
]


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_are_honoured(models: dict[str, Model], kind: str) -> None:
    """Two blanks, a choice and an expression, under every noise and sampler; the rest is untouched."""
    model = models[kind]
    assert model.process is not None
    words, eos = spellings(model), model.tokenizer.eos_id
    before, after = model.tokenizer.encode("The"), model.tokenizer.encode(" said")
    choice = compile_pattern(Pattern.of_choices(["old man", "king."]), words, (eos,))
    number = compile_pattern(Pattern(r"[1-9]\d\d?,"), words, (eos,))
    check_fits(choice, 4, "it")
    check_fits(number, 4, "it")
    ids = [*before, *[None] * 4, *after, *[None] * 4, *[None] * 5]
    first, second = len(before), len(before) + 4 + len(after)
    rules = Rules(
        banned=(eos, *model.tokenizer.encode(" the")),
        blanks=(
            Blank(tuple(range(first, first + 4)), choice),
            Blank(tuple(range(second, second + 4)), number),
        ),
    )
    for how in HOWS if kind != "pocket-udlm" else HOWS[:2]:
        for row in filled(model, rules, ids, **how):
            assert model.tokenizer.decode(row[first : first + 4]).removeprefix(" ") in (
                "old man",
                "king.",
            )
            assert re.fullmatch(r" ?[1-9]\d\d?,", model.tokenizer.decode(row[second : second + 4]))
            assert not set(row) & set(rules.banned)
            assert (row[:first], row[first + 4 : second]) == (before, after)


@pytest.mark.parametrize("kind", KINDS)
def test_banned_tokens_never_come(models: dict[str, Model], kind: str) -> None:
    """Half of the vocabulary, under every noise: also what the noise itself wrote is gone at the end."""
    model = models[kind]
    banned = tuple(range(0, 2048, 2))
    for how in HOWS if kind != "pocket-udlm" else HOWS[:2]:
        for row in filled(model, Rules(banned), [None] * 16, **how):
            assert all(token % 2 for token in row)


def test_an_unconstraining_pattern_changes_nothing_much(models: dict[str, Model]) -> None:
    """A pattern that allows everything leaves single-token marginals as they are: how often a blank of one
    token holds each of the most likely tokens, with and without, 250 draws, 5 standard errors."""
    model = models["pocket-xdlm"]
    assert model.process is not None
    anything = compile_pattern(Pattern(r"(.|\n)*"), spellings(model), ())
    prompt = model.tokenizer.encode("There was an old")
    config = configure({"steps": 2}, model.process)
    counts = []
    for blanks in ((), (Blank((len(prompt),), anything),)):
        with Engine(model.denoiser, model.process) as engine:
            asked = Request([*prompt, None], config, n=250, rules=Rules(blanks=blanks))
            drawn = [int(row.tokens[-1]) for row in engine.submit(asked).result(60)]
        counts.append(torch.bincount(torch.tensor(drawn), minlength=2049) / 250)
    common = (counts[0] + counts[1]) / 2 > 0.03
    assert common.sum() >= 2
    p = ((counts[0] + counts[1]) / 2)[common]
    assert ((counts[0] - counts[1])[common].abs() < 5 * (2 * p * (1 - p) / 250).sqrt()).all()


def test_what_cannot_be_is_an_error(models: dict[str, Model]) -> None:
    model = models["pocket-xdlm"]
    assert model.process is not None
    config = configure({"steps": 2}, model.process)
    word = compile_pattern(Pattern("cat"), spellings(model), ())
    for rules, stop, says in (
        (Rules(tuple(range(2048))), (), "every token is banned"),
        (Rules((2048,)), (), "no token of a text"),
        (Rules(blanks=(Blank((0,), word),)), (), "positions that are to be filled"),
        (Rules(blanks=(Blank((1,), word),)), (7,), "leave out what would end it"),
    ):
        with (
            Engine(model.denoiser, model.process) as engine,
            pytest.raises(UserError, match=says),
        ):
            engine.submit(Request([5, None], config, stop_ids=stop, rules=rules))


@pytest.mark.parametrize("sampler", ["ancestral", "confidence"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_fills_under_rules(kind: str, sampler: str) -> None:
    """In Python, the same texts as from the engine, in groups of any size, with every step."""
    if kind == "pocket-udlm" and sampler == "confidence":
        pytest.skip("it has no masks to fill")
    model = load(kind, device="cpu")
    template = "The <mask:3> said <mask:4>."
    rules: dict[str, Any] = {
        "blanks": [BlankRule(choices=["old king", "young queen"]), BlankRule(regex="[a-z ]+")],
        "banned": [" a", 0],
        "forced": {},
    }
    how: dict[str, Any] = {"steps": 5, "sampler": sampler, "seed": 4}
    out = model.infill(template, n=3, **rules, **how)
    assert out.trajectory is not None and torch.equal(out.trajectory.frames[-1].long(), out.tokens)
    for text in out.text:
        assert re.fullmatch(r"The ?(old king|young queen) said ?[a-z ]+\.", text), text
    assert not (set(out.tokens.flatten().tolist()) & {0, *model.tokenizer.encode(" a")})
    one_by_one = model.infill(template, n=3, batch_tokens=1, **rules, **how)
    assert torch.equal(one_by_one.tokens, out.tokens)

    assert model.process is not None
    row = read_template(template, model.tokenizer.encode, max_length=99)
    made = make_rules(
        row.holes, model.tokenizer, model.process.vocab.size, model.tokenizer.encode,
        banned=rules["banned"], blanks=rules["blanks"],
    )  # fmt: skip
    config = configure({"steps": 5, "sampler": sampler}, model.process)
    with Engine(model.denoiser, model.process) as engine:
        rows = engine.submit(Request(row.ids, config, n=3, seed=4, rules=made)).result(60)
    assert [written.tokens.tolist() for written in rows] == out.tokens.tolist()


def test_banned_and_forced_tokens_of_a_model() -> None:
    model = load("pocket", device="cpu")
    free = model.sample(2, length=24, steps=6, seed=1)
    common = free.tokens.flatten().mode().values.item()
    banned = model.sample(2, length=24, steps=6, seed=1, banned=[common])
    assert common in free.tokens and common not in banned.tokens
    forced = model.infill("It <mask:5>.", steps=4, forced={2: " was", 3: 7})
    assert forced.tokens[0, 3] == 7 and " was" in forced.text[0]
    for bad, message in (
        ({"forced": {0: 5}}, "not in a hole"),
        ({"forced": {2: " extraordinarily"}}, "not one"),
        ({"banned": [10**6]}, "no token of a text"),
        ({"blanks": [None, None]}, "2 rules for 1 blanks"),
        ({"blanks": [BlankRule()]}, "either choices or a regex"),
    ):
        with pytest.raises(UserError, match=message):
            model.infill("It <mask:5>.", steps=4, **bad)
