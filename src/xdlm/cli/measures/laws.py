"""The laws that texts can be drawn from, as the command line names them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch

from xdlm.api import MAX_LENGTH, load_tokenizer
from xdlm.cli.progress import progress, waiting
from xdlm.data import EMBEDDED, load_rows, open_source
from xdlm.data.order import ShuffledOrder
from xdlm.errors import UserError, near_miss
from xdlm.evaluation.judges import CausalJudge
from xdlm.evaluation.known_law import ZIPF, Law, next_tokens, zipf
from xdlm.evaluation.markov_fit import FEWEST_ROWS, check_states, fit_markov
from xdlm.evaluation.markov_law import MARKOV, SUFFIX, MarkovLaw
from xdlm.files import check_file
from xdlm.tokens import TextTokenizer

#: Tokens of a row that is learned from, whatever the length of the texts that are drawn.
_ROW = 64


@dataclass(frozen=True)
class LawOptions:
    law: str = ZIPF
    """zipf; markov, or a file of one that was kept (.safetensors); or a folder with a causal language
    model, or a .gguf file."""
    tokens: int = 50257
    """zipf: in the vocabulary."""
    exponent: float = 1.0
    """zipf: of a token's rank."""
    data: str | None = None
    """The real text that a language model reads, whose beginning is enough (default: corpus:heldout), or
    that a hidden Markov model learns (default: corpus:train): a corpus, a file, or a folder of files or of
    shards."""
    tokenizer: str = "pocket"
    """markov: a tokenizer.json, a folder that holds one, the name of a bundled model, gpt2 or
    bert-base-uncased."""
    states: int = 64
    """markov: how many hidden states it has; time grows with their square."""
    read: int = 2_000_000
    """markov: tokens of the text to learn from."""
    keep_law: str | None = None
    """markov: keep what was learned in this file, so that others draw from the same law."""
    length: int = 1024
    """Positions of a text."""

    @property
    def has_memory(self) -> bool:
        """Whether tokens depend on each other."""
        return self.law == MARKOV or self.is_kept

    @property
    def is_kept(self) -> bool:
        return self.law.endswith(SUFFIX)

    @property
    def text(self) -> str:
        learned, read = EMBEDDED
        return self.data if self.data is not None else learned if self.law == MARKOV else read


#: Options that only one kind of law reads.
_ONLY = {
    ZIPF: ("tokens", "exponent"),
    MARKOV: ("tokenizer", "states", "read", "keep_law"),
}


def check_law(options: LawOptions) -> None:
    """What can be known to be wrong before any text is read."""
    if not 1 <= options.length <= MAX_LENGTH:
        raise UserError(f"--length must lie in 1..{MAX_LENGTH:,}, got {options.length}")
    meant = near_miss(options.law.lower(), _ONLY)
    if options.law not in _ONLY and meant and not Path(options.law).exists():
        raise UserError(f"no law {options.law}{meant}")
    if options.law not in _ONLY and not options.is_kept and not Path(options.law).exists():
        raise UserError(
            f"no law {options.law}: give {', '.join(_ONLY)}, a kept law or a model's folder"
        )
    _check_unread(options)
    if options.law == MARKOV:
        check_states(options.states)
        if options.read < FEWEST_ROWS * _ROW:
            raise UserError(
                f"--read must be at least {FEWEST_ROWS * _ROW:,} tokens, got {options.read:,}"
            )
    if options.keep_law is not None:
        _check_kept(Path(options.keep_law))


def _check_unread(options: LawOptions) -> None:
    """An option that has no say in this kind of law is a mistake."""
    for kind, names in _ONLY.items():
        for field in fields(LawOptions):
            given = getattr(options, field.name) != field.default
            if field.name in names and options.law != kind and given:
                flag = field.name.replace("_", "-")
                raise UserError(f"--{flag} works with --law {kind} only, not with {options.law}")
    if options.data is not None and (options.law == ZIPF or options.is_kept):
        raise UserError(f"--data does not work with {options.law}, which reads no text")


def _check_kept(file: Path) -> None:
    if file.suffix != SUFFIX:
        raise UserError(f"--keep-law must end in {SUFFIX}, got {file}")
    if file.exists():
        raise UserError(f"{file} already exists; choose another file or remove it")
    check_file(file)


def open_law(options: LawOptions, device: torch.device) -> Law:
    if options.law == ZIPF:
        return zipf(options.tokens, options.length, options.exponent)
    if options.is_kept:
        return MarkovLaw.load(Path(options.law))
    if options.law == MARKOV:
        return _learned(options)
    with waiting(f"reading {options.law}"):
        return next_tokens(
            CausalJudge(Path(options.law), device), _beginning(options), options.length
        )


def _learned(options: LawOptions) -> MarkovLaw:
    """From rows of all of the text, in the order in which a model would be trained on them."""
    tokenizer = load_tokenizer(options.tokenizer)
    if not isinstance(tokenizer, TextTokenizer):
        raise UserError(f"{options.tokenizer} is a tokenizer of images, and this is about text")
    with progress(f"reading {options.text}") as show:
        rows = load_rows(options.text, tokenizer, _ROW, on_progress=show)
    n = min(len(rows), -(-options.read // _ROW))
    taken = torch.from_numpy(rows.take(ShuffledOrder(len(rows), 0).rows(0, n)))
    origin = {
        "data": options.text, "tokenizer": options.tokenizer, "states": options.states,
        "read": n * _ROW,
    }  # fmt: skip
    with progress(f"learning {options.states} hidden states") as show:
        law = fit_markov(
            f"{MARKOV}-{options.states}", taken, n_hidden=options.states, n_tokens=tokenizer.size,
            origin=origin, on_batch=show,
        )  # fmt: skip
    if options.keep_law is not None:
        law.save(Path(options.keep_law))
    return law


def _beginning(options: LawOptions) -> str:
    """Of the real text: 16 characters for each token are more than enough."""
    read, enough = [], 16 * options.length
    for document in open_source(options.text).documents():
        read.append(document)
        enough -= len(document)
        if enough <= 0:
            break
    return "\n\n".join(read)
