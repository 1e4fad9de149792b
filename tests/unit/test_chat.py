"""Writing in turns: what is remembered, what is shown, templates."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from rich.console import Console
from test_cli import complaint

from xdlm import UserError, load
from xdlm.api import Completion, Model
from xdlm.cli.chat import Conversation, Options, _shown
from xdlm.cli.main import main
from xdlm.tokens import TextTokenizer
from xdlm.tokens.chat import ends_of_turn, find_template

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def ignore(z: torch.Tensor, n_prompt: int) -> None:
    pass


def chat(monkeypatch, capsys, lines: str, *arguments: str) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    main(["chat", "--steps", "4", "--new-tokens", "12", *arguments])
    return capsys.readouterr().out.splitlines()


def test_each_answer_says_how_it_ended(monkeypatch, capsys) -> None:
    told = iter([Completion([1, 2], "So.", True, 3), Completion([5] * 12, "So it", False, 4)])
    monkeypatch.setattr(Model, "complete", lambda *_, **__: [next(told)])
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    main(["chat", "--new-tokens", "12"])
    out, said = capsys.readouterr()
    assert out.splitlines() == ["So.", "So it"]
    assert said.splitlines()[1:] == [
        "2 tokens (ended), 3 forward passes", "12 tokens (reached --new-tokens), 4 forward passes",
    ]  # fmt: skip


def test_answers_lines_from_a_pipe(monkeypatch, capsys) -> None:
    lines = "It was a dark night, and\n\n/new\nIt was a dark night, and\n/quit\nnever read\n"
    first, second, again = chat(monkeypatch, capsys, lines)
    assert first and second and first != second
    assert again == first, "/new forgets, and counts turns anew"


@pytest.mark.parametrize("sampler", ["confidence", "ancestral"])
def test_a_text_goes_on_until_there_is_no_room(sampler: str) -> None:
    model = load("pocket", device="cpu")
    options = Options(new_tokens=8, steps=2, context=20, sampler=sampler)
    talk = Conversation(model, None, options)
    talk.answer("It was", ignore)
    encode = model.tokenizer.encode
    assert talk.ids[: len(encode("It was"))] == encode("It was")
    before = talk.ids
    seen: list[tuple[list[int], int]] = []
    talk.answer("night", lambda z, n: seen.append((z[0].tolist(), n)))
    (*_, (tokens, n_prompt)) = seen
    assert n_prompt <= 12 and tokens[:n_prompt] == (before + encode(" night"))[-12:]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal")
def test_an_answer_comes_about_in_a_terminal() -> None:
    """In a real one: masks and colours are seen on the way, and the text alone stays."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "xdlm.cli.main", "chat", "--new-tokens", "8", "--steps", "4"]
    chat = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "", "NO_COLOR": ""},
    )  # fmt: skip
    os.close(theirs)
    os.write(ours, b"It was a dark night\n/quit\n")
    seen = b""
    with suppress(OSError):  # how a terminal says that nobody is at its other end
        while piece := os.read(ours, 4096):
            seen += piece
    os.close(ours)
    assert chat.wait(60) == 0
    on_the_way, _, stays = seen.decode().rpartition("\x1b[?25h")  # the cursor comes back
    assert "░" in on_the_way and "\x1b[1;38;5;28m" in on_the_way
    assert "░" not in stays and len(stays.strip()) > 4


def test_a_step_is_shown_in_colour() -> None:
    model = load("pocket", device="cpu")
    mask = model.process.vocab.mask_id
    out = io.StringIO()
    screen = Console(file=out, force_terminal=True, color_system="truecolor", width=80)
    with _shown(screen, model) as show:
        ids = model.tokenizer.encode("It was a")
        show(torch.tensor([[*ids[:2], mask]]), 1)
        show(torch.tensor([ids]), 1)
    green = "38;2;34;139;34"
    assert out.getvalue().count(f"{green}m was") == 1, "coloured in the step that wrote it"
    assert f"{green}m a" in out.getvalue() and "░" in out.getvalue()
    assert "It" not in out.getvalue()


def templated(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(load("pocket", device="cpu").tokenizer.to_json())
    config = {"chat_template": TEMPLATE, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_messages_go_through_the_template(tmp_path: Path) -> None:
    template = find_template(TextTokenizer.load(templated(tmp_path)))
    model = load("pocket", device="cpu")
    talk = Conversation(model, template, Options(new_tokens=8, steps=2, context=60, system="Be."))
    answer = talk.answer("Hello", ignore).text
    roles = ["system", "user", "assistant"]
    assert [m["role"] for m in talk.messages] == roles
    assert talk.messages[-1]["content"] == answer
    text = model.tokenizer.decode(talk.ids)
    start = "<system>Be.<|endoftext|><user>Hello<|endoftext|><assistant>"
    assert text == start + answer
    for _ in range(3):
        talk.answer("And then?", ignore)
    assert talk.messages[0]["role"] == "system", "what is forgotten is the oldest turns"
    assert talk.messages[1]["content"] == "And then?"
    assert len(talk.ids) <= 60
    before = list(talk.messages)
    with pytest.raises(UserError, match="there is room for 52"):
        talk.answer("far too long " * 40, ignore)
    assert talk.messages == before, "a line that did not fit was never said"


def test_templates_that_are_none(tmp_path: Path) -> None:
    tokenizer = load("pocket", device="cpu").tokenizer
    assert find_template(tokenizer) is None and ends_of_turn(tokenizer) == ()
    (templated(tmp_path) / "tokenizer_config.json").write_text('{"chat_template": ')
    with pytest.raises(UserError, match="chat template cannot be read"):
        find_template(TextTokenizer.load(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert find_template(TextTokenizer.load(tmp_path)) is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--new-tokens", "0"], "leaves no room"),
        (["--new-tokens", "10000"], "lower --new-tokens or raise --context"),
        (["--system", "Be kind."], "needs a model with a chat template"),
        (["--steps", "0"], "at least 1 step"),
        (["--sampler", "ancestral", "--block-length", "4"], "no meaning for the ancestral"),
        (["--steps", "2", "--block-length", "4"], "2 steps cannot fill 16 blocks"),
        (["--model", "pocket-judge"], "this model is autoregressive"),
        (["--model", "pockte"], "did you mean 'pocket'"),
    ],
)
def test_bad_options_are_one_line(capsys, arguments, says) -> None:
    assert says in complaint(capsys, "chat", *arguments)
