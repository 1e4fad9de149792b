"""Text to token ids and back, with the `tokenizers` library underneath."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from xdlm.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Marks the end of a document; the only special token of a tokenizer that we train.
END_OF_TEXT = "<|endoftext|>"
#: The file that holds a tokenizer, in a folder of its own or beside a model's weights.
FILE_NAME = "tokenizer.json"
#: The files that may say how a model reads conversations: the template, and settings that it may be among.
CHAT_TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
#: What tokenizers call a mask.
_MASKS = ("[MASK]", "<mask>", "<|mask|>", "<|mdm_mask|>")
MAX_VOCAB = 10_000_000
#: The tokens that begin and end a document, by family: LLaDA, GPT-2 (one for both), BERT, Llama 2 and 3.
_ENDS = (
    ("<|startoftext|>", END_OF_TEXT),
    (END_OF_TEXT, END_OF_TEXT),
    ("[CLS]", "[SEP]"),
    ("<s>", "</s>"),
    ("<|begin_of_text|>", "<|end_of_text|>"),
)


class TextTokenizer:
    """A tokenizer with tokens that begin and end a document. The mask is not its concern: noise adds
    that state. `chat_files` are those beside it that say how conversations are read, by name."""

    def __init__(self, tokenizer: Tokenizer, chat_files: Mapping[str, str] | None = None) -> None:
        self._tokenizer = tokenizer
        self.chat_files: Mapping[str, str] = chat_files or {}
        for bos, eos in _ENDS:
            bos_id, eos_id = tokenizer.token_to_id(bos), tokenizer.token_to_id(eos)
            if bos_id is not None and eos_id is not None:
                self.bos_id: int = bos_id
                self.eos_id: int = eos_id
                return
        known = ", ".join(dict.fromkeys(eos for _, eos in _ENDS))
        raise UserError(f"the tokenizer has no end-of-text token (known ones: {known})")

    @classmethod
    def load(cls, path: str | Path) -> TextTokenizer:
        """Read `tokenizer.json`, given as a file or as the folder that holds it, and a chat template that
        lies beside it."""
        from tokenizers import Tokenizer

        path = Path(path)
        file = path / FILE_NAME if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"no tokenizer at {file}; make one with `xdlm tokenizer`")
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise UserError(f"{file} is not a tokenizer file: {error}") from error
        return cls(tokenizer, _chat_files(file.parent))

    @classmethod
    def from_json(cls, text: str) -> TextTokenizer:
        """From the content of a `tokenizer.json`."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(text))

    @classmethod
    def train(
        cls, documents: Iterable[str], vocab_size: int, *, progress: bool = False
    ) -> TextTokenizer:
        """Learn a byte-level BPE of `vocab_size` tokens, the end-of-text token included."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        alphabet = pre_tokenizers.ByteLevel.alphabet()
        if not len(alphabet) < vocab_size <= MAX_VOCAB:
            raise UserError(
                f"vocab_size must exceed {len(alphabet)} (256 bytes and end-of-text) and be at most "
                f"{MAX_VOCAB:,}, got {vocab_size}"
            )
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=sorted(alphabet),
            show_progress=progress,
        )
        tokenizer.train_from_iterator(documents, trainer)
        return cls(tokenizer)

    @property
    def mask_id(self) -> int | None:
        """The mask, where a tokenizer has one among its tokens."""
        ids = (self._tokenizer.token_to_id(name) for name in _MASKS)
        return next((i for i in ids if i is not None), None)

    @property
    def size(self) -> int:
        """Number of tokens, without the mask."""
        return self._tokenizer.get_vocab_size()

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name; None if there is none."""
        return self._tokenizer.token_to_id(token)

    def names_of(self, ids: Iterable[int]) -> list[str]:
        """Tokens by their ids, as the tokenizer's file has them."""
        return [str(self._tokenizer.id_to_token(i)) for i in ids]

    def to_json(self) -> str:
        return self._tokenizer.to_str()

    def files(self) -> dict[str, str]:
        """All that a folder needs to hold this tokenizer, by name."""
        return {FILE_NAME: self.to_json(), **self.chat_files}

    @property
    def digest(self) -> str:
        """Hash of the tokenizer, however its file was formatted."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [item.ids for item in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids; whatever is beyond the tokenizer (the mask) is left out."""
        known = [int(i) for i in ids if 0 <= int(i) < self.size]
        return self._tokenizer.decode(known, skip_special_tokens=False)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each id on its own, for showing a sequence token by token; the mask is an empty string.

        A token that is part of a character shows as the replacement character.
        """
        return [self.decode([i]) for i in ids]


def _chat_files(folder: Path) -> dict[str, str]:
    """The files of a chat template; none where there is none."""
    found = {}
    for name in (CHAT_TEMPLATE, SETTINGS):
        if (folder / name).is_file():
            try:
                found[name] = (folder / name).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"cannot read {folder / name}: {error}") from error
    has_template = CHAT_TEMPLATE in found or '"chat_template"' in found.get(SETTINGS, "")
    return found if has_template else {}
