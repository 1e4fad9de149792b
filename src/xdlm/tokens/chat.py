"""Conversations as a model was taught to read them: the template that comes with its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypedDict

from xdlm.errors import UserError
from xdlm.tokens.text import FILE_NAME, TextTokenizer

#: Tokens that end a turn, beside the one that ends a text: Llama 3 and LLaDA, ChatML, Gemma.
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
ASSISTANT = "assistant"


class Message(TypedDict):
    """`role` is system, user or assistant."""

    role: str
    content: str


class Turn(NamedTuple):
    """An answer and all that comes before it, as text."""

    prompt: str
    answer: str


class ChatTemplate:
    """Turns messages into the text that a model answers."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def render(self, messages: Sequence[Message], *, answered: bool = False) -> str:
        """The conversation so far, up to where the assistant's next message begins; or all of it, if its
        last message is an answer."""
        try:
            return self._renderer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=not answered
            )
        except Exception as error:  # a template is a program, and raises what it likes
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"the model's chat template refuses these messages: {reason}"
            ) from error

    def turns(self, messages: Sequence[Message]) -> list[Turn]:
        """Every answer of the assistant, with the conversation up to it."""
        found = []
        for i, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = self.render(messages[:i])
            whole = self.render(messages[: i + 1], answered=True)
            if not whole.startswith(prompt):
                raise UserError(
                    "the model's chat template does not put an answer behind what it begins answers with: "
                    "give prompt and response as text instead"
                )
            found.append(Turn(prompt, whole[len(prompt) :]))
        return found


def find_template(tokenizer: TextTokenizer) -> ChatTemplate | None:
    """The template that came with a tokenizer; None if there was none."""
    if not tokenizer.chat_files:
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(
            "the model's chat template needs transformers: install xdlm[text]"
        ) from error
    try:
        with TemporaryDirectory() as folder:  # the library reads folders
            for name, text in {FILE_NAME: tokenizer.to_json(), **tokenizer.chat_files}.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            renderer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # the library raises whatever its readers do
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the model's chat template cannot be read: {reason}") from error
    return ChatTemplate(renderer)


def ends_of_turn(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Ids of the tokens that end a turn, as far as a tokenizer knows them."""
    found = (tokenizer.id_of(token) for token in _ENDS_OF_TURN)
    return tuple(token_id for token_id in found if token_id is not None)
