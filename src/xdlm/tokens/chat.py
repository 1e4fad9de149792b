"""Conversations as a model was taught to read them: the template that comes with its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

from xdlm.errors import UserError
from xdlm.tokens.text import TextTokenizer

#: Tokens that end a turn, beside the one that ends a text: Llama 3 and LLaDA, ChatML, Gemma.
_ENDS_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"


class Message(TypedDict):
    """`role` is system, user or assistant."""

    role: str
    content: str


class ChatTemplate:
    """Turns messages into the text that a model answers."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def render(self, messages: list[Message]) -> str:
        """The conversation so far, up to where the assistant's next message begins."""
        try:
            return self._renderer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program, and raises what it likes
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"the model's chat template refuses these messages: {reason}"
            ) from error


def find_template(folder: Path) -> ChatTemplate | None:
    """The template beside a model's weights; None if there is none."""
    if not (folder / _TEMPLATE).is_file() and "chat_template" not in _config(folder):
        return None
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise UserError(
            "the model's chat template needs transformers: install xdlm[text]"
        ) from error
    try:
        renderer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # the library raises whatever its readers do
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"the tokenizer of {folder} cannot be read: {reason}") from error
    return ChatTemplate(renderer)


def ends_of_turn(tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Ids of the tokens that end a turn, as far as a tokenizer knows them."""
    found = (tokenizer.id_of(token) for token in _ENDS_OF_TURN)
    return tuple(token_id for token_id in found if token_id is not None)


def _config(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not a tokenizer's configuration: {error}") from error
    return config if isinstance(config, dict) else {}
