"""Models that say how likely a text is: any causal language model, or trigrams where there is none."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from xdlm.errors import UserError
from xdlm.files import sha256_of
from xdlm.tokens import TextTokenizer

#: The judge that needs no download.
NGRAM = "ngram"


class Score(NamedTuple):
    """Nats of a text under a judge, and over how many of the judge's tokens."""

    nats: float
    tokens: int


class Judge(Protocol):
    """`sha256` tells judges of the same name apart."""

    name: str
    sha256: str

    def score(self, text: str) -> Score: ...


def open_judge(name: str, tokenizer: TextTokenizer, device: torch.device) -> Judge:
    """`ngram`, a folder with a causal language model, or a .gguf file."""
    if name == NGRAM:
        from xdlm.evaluation.ngram import NgramJudge

        return NgramJudge(tokenizer)
    path = Path(name)
    if not path.exists():
        raise UserError(
            f"no judge at {name}; give a folder with a causal language model, or {NGRAM}"
        )
    return CausalJudge(path, device)


class CausalJudge:
    """A causal language model of the `transformers` library, from local files alone."""

    def __init__(self, path: Path, device: torch.device) -> None:
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as error:
            raise UserError(
                "a judge of this kind needs transformers; install xdlm[text]"
            ) from error
        folder, gguf = (path, None) if path.is_dir() else (path.parent, path.name)
        files: dict[str, Any] = {} if gguf is None else {"gguf_file": gguf}
        model: Any
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, **files
            )
            model = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32, **files
            )
        except (OSError, ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{path} is not a causal language model: {reason}") from error
        self._model = model.to(device).eval()
        if len(self._tokenizer) > model.get_input_embeddings().num_embeddings:
            raise UserError(f"{path}: its tokenizer has more tokens than its model")
        self.name = path.name
        if gguf is None and not any(folder.glob("*.safetensors")):
            raise UserError(f"{path} holds no .safetensors file")
        files_read = [path] if gguf else sorted(f for f in folder.iterdir() if f.is_file())
        self.sha256 = hashlib.sha256(
            " ".join(f"{file.name} {sha256_of(file)}" for file in files_read).encode()
        ).hexdigest()
        self._context = getattr(model.config, "max_position_embeddings", 1024)

    @torch.no_grad()
    def score(self, text: str) -> Score:
        """All tokens after the first; in windows of the judge's context, if the text is longer."""
        ids = self._tokenizer(text, return_tensors="pt").input_ids[0]
        nats, counted = 0.0, 0
        for start in range(0, max(len(ids) - 1, 0), self._context - 1):
            window = ids[start : start + self._context].to(self._model.device)
            log_p = self._model(window[None]).logits[0, :-1].float().log_softmax(-1)
            nats -= float(log_p.gather(1, window[1:, None]).sum())
            counted += len(window) - 1
        return Score(nats, counted)
