"""A judge that this library trained: an autoregressive model with its own tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from xdlm.errors import UserError
from xdlm.evaluation.scoring import OnText, Score, score_tokens
from xdlm.tokens import TextTokenizer
from xdlm.training.checkpoint import META, TOKENIZER, Checkpoint, latest_checkpoint
from xdlm.training.loss import next_token_nats
from xdlm.training.trained import bundled, find_checkpoint, read_trained

#: Tokens that go through the model at a time, on a GPU and elsewhere. Logits are never held for all.
_AT_ONCE = {"cuda": 1 << 15, "cpu": 1 << 12}


def is_own(name: str) -> bool:
    """Whether a name is that of a bundled model, or of a folder that training or export wrote."""
    folder = Path(name)
    return (
        bundled(name) is not None
        or (folder / META).is_file()
        or latest_checkpoint(folder) is not None
    )


class OwnJudge:
    """Averaged weights in float32; its context is the length of a row in training."""

    def __init__(self, name: str, device: torch.device) -> None:
        checkpoint = find_checkpoint(name)
        config = checkpoint.config
        if not config.process.is_autoregressive:
            raise UserError(
                f"{name} cannot judge: it was trained under noise ({config.process.kind}), and a judge "
                "predicts the next token; train one with process.kind autoregressive"
            )
        self._denoiser, _, tokenizer, _ = read_trained(checkpoint)
        if not isinstance(tokenizer, TextTokenizer):
            raise UserError(f"{name} cannot judge: it was trained on images")
        self._tokenizer = tokenizer
        self._denoiser.to(device)
        self._denoiser.replayable = False  # texts come in all lengths, and each would be recorded
        self._device, self._context = device, config.data.length
        self.name, self.sha256 = Path(name).absolute().name, _digest(checkpoint)

    def score(self, text: str) -> Score:
        """All tokens after the first; in windows of the judge's context, if the text is longer."""
        return self.score_many([text])[0]

    def score_many(self, texts: Sequence[str], on_text: OnText | None = None) -> list[Score]:
        return score_tokens(
            self._tokenizer.encode_many(texts), lambda x: next_token_nats(self._denoiser, x),
            context=self._context, at_once=_AT_ONCE[self._device.type], device=self._device,
            on_text=on_text,
        )  # fmt: skip

    @torch.no_grad()
    def features(self, text: str) -> NDArray[np.float32]:
        """The trunk's state at the last token, of at most the judge's context."""
        ids = self._tokenizer.encode(text)[: self._context] or [self._tokenizer.eos_id]
        tokens = torch.tensor([ids], device=self._device)
        states = self._denoiser.trunk(tokens, torch.zeros(1, device=self._device))
        vector: NDArray[np.float32] = states[0, -1].float().cpu().numpy()
        return vector


def _digest(checkpoint: Checkpoint) -> str:
    """Of all that decides a score: weights, tokenizer, context."""
    files = checkpoint.meta["files"]
    used = sorted(name for name in files if name == TOKENIZER or name.startswith("model"))
    content = " ".join(f"{name} {files[name]['sha256']}" for name in used)
    return hashlib.sha256(f"{content} {checkpoint.config.data.length}".encode()).hexdigest()
