"""Models that say how likely a text is: any causal language model, or trigrams where there is none."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from xdlm.errors import UserError, near_miss
from xdlm.evaluation.own_judge import OwnJudge, is_own
from xdlm.evaluation.scoring import OnText, Score, score_tokens
from xdlm.files import sha256_of
from xdlm.tokens import TextTokenizer

#: The judge that needs no download.
NGRAM = "ngram"
#: The one that comes with the package, as weights.
POCKET = "pocket-judge"
#: Logits of a causal language model that are held at a time, on a GPU and elsewhere, in float32.
_LOGITS = {"cuda": 1 << 28, "cpu": 1 << 25}


class Judge(Protocol):
    """`sha256` tells judges of the same name apart."""

    name: str
    sha256: str

    def score(self, text: str) -> Score: ...


@runtime_checkable
class BatchJudge(Judge, Protocol):
    """A judge that is faster with many texts at once, and says the same of each as of it alone."""

    def score_many(self, texts: Sequence[str], on_text: OnText | None = None) -> list[Score]: ...


@runtime_checkable
class FeatureJudge(Judge, Protocol):
    """A judge that also says what a text is like, as a vector."""

    def features(self, text: str) -> NDArray[np.float32]: ...


def open_judge(name: str, tokenizer: TextTokenizer, device: torch.device) -> Judge:
    """`ngram`, an autoregressive model of this library (a bundled name, a checkpoint or run folder), a
    folder with a causal language model, or a .gguf file."""
    if name == NGRAM:
        from xdlm.evaluation.ngram import NgramJudge

        return NgramJudge(tokenizer)
    if is_own(name):
        return OwnJudge(name, device)
    path = Path(name)
    if not path.exists():
        raise UserError(
            f"no judge at {name}; there are {POCKET}, {NGRAM}, folders of causal language models and of "
            f"autoregressive runs, and .gguf files{near_miss(name, (POCKET, NGRAM))}"
        )
    return CausalJudge(path, device)


def score_all(judge: Judge, texts: Sequence[str], on_text: OnText | None = None) -> list[Score]:
    """Of each text, in their order; as many at once as the judge can."""
    if isinstance(judge, BatchJudge):
        return judge.score_many(texts, on_text)
    scores = []
    for i, text in enumerate(texts):
        scores.append(judge.score(text))
        if on_text is not None:
            on_text(i + 1, len(texts))
    return scores


class CausalJudge:
    """A causal language model of the `transformers` library, from local files alone."""

    def __init__(self, path: Path, device: torch.device) -> None:
        _check_files(path)
        self._tokenizer, self._model = _load(path)
        _check_vocabulary(path, len(self._tokenizer), self._model)
        _check_causal(path, self._model)
        self._model.to(device)
        self.name, self.sha256 = path.name, _digest(path)
        self._context = getattr(self._model.config, "max_position_embeddings", 1024)

    def score(self, text: str) -> Score:
        """All tokens after the first; in windows of the judge's context, if the text is longer."""
        return self.score_many([text])[0]

    def score_many(self, texts: Sequence[str], on_text: OnText | None = None) -> list[Score]:
        device = self._model.device
        size = self._model.get_input_embeddings().num_embeddings
        return score_tokens(
            [self._tokenizer(text).input_ids for text in texts], self._nats, context=self._context,
            at_once=_LOGITS[device.type] // size, device=device, on_text=on_text,
        )  # fmt: skip

    def _nats(self, tokens: Tensor) -> Tensor:
        """Row by row from the logits on: what the softmax makes of them is as large as they are."""
        logits = self._model(tokens).logits
        return torch.stack([
            F.cross_entropy(row[:-1].float(), ids[1:], reduction="none")
            for row, ids in zip(logits, tokens, strict=True)
        ])  # fmt: skip

    @torch.no_grad()
    def features(self, text: str) -> NDArray[np.float32]:
        """The last layer's hidden state at the last token, of at most the judge's context."""
        ids = self._tokenizer(text).input_ids[: self._context] or [self._tokenizer.eos_token_id]
        if ids == [None]:
            raise UserError(f"{self.name} has no end token, and a text to judge is empty")
        tokens = torch.tensor([ids], device=self._model.device)
        states = self._model(tokens, output_hidden_states=True).hidden_states
        vector: NDArray[np.float32] = states[-1][0, -1].float().cpu().numpy()
        return vector

    @torch.no_grad()
    def predictions(self, text: str, n: int) -> tuple[Tensor, Tensor]:
        """Behind each of the first `n` tokens of a text the state [n, D] that the next one is told from,
        and the weight [V, D] that makes logits of it."""
        ids = self._tokenizer(text).input_ids[:n]
        if len(ids) < n:
            raise UserError(f"the text has {len(ids):,} of {self.name}'s tokens, fewer than {n:,}")
        if n > self._context:
            raise UserError(
                f"{self.name} sees {self._context:,} tokens at a time, fewer than {n:,}"
            )
        tokens = torch.tensor([ids], device=self._model.device)
        out = self._model(tokens, output_hidden_states=True)
        states = out.hidden_states[-1][0].float()
        weight: Tensor = self._model.get_output_embeddings().weight.detach().float()
        if not torch.allclose(F.linear(states, weight), out.logits[0].float(), atol=1e-2):
            raise UserError(
                f"{self.name} makes its logits by more than a product of its last states"
            )
        return states, weight


def _check_files(path: Path) -> None:
    """What can be seen without reading it all."""
    if path.is_file():
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise UserError(f"{path} is not a .gguf file; give one, or a folder with a model")
        return
    if not (path / "config.json").is_file():
        raise UserError(f"{path} is not a causal language model: it has no config.json")
    if not any(path.glob("*.safetensors")):
        raise UserError(f"{path} is not a causal language model: it holds no .safetensors file")


def _load(path: Path) -> tuple[Any, Any]:
    """Tokenizer and model, whole: a weight that the files do not hold is not made up."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise UserError("a judge of this kind needs transformers; install xdlm[text]") from error
    folder, more = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    for package in ("gguf", "accelerate") if more else ():
        if find_spec(package) is None:
            raise UserError(f"a .gguf judge needs the package {package}; install xdlm[text]")
    about: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, **more}
    with _silent():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **about)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, output_loading_info=True,
                ignore_mismatched_sizes=True, **about,
            )  # fmt: skip
        except Exception as error:  # the library raises whatever its many readers do
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{path} is damaged or not a causal language model: {reason}"
            ) from error
    model, info = loaded
    for key in sorted(info["missing_keys"]):
        raise UserError(f"{path} is not a causal language model: its files do not hold {key}")
    for key, *shapes in sorted(info["mismatched_keys"]):
        sizes = " and ".join(str(tuple(shape)) for shape in shapes)
        raise UserError(f"{path}: its config.json does not fit its weights: {key} is {sizes}")
    return tokenizer, model.eval()


@contextmanager
def _silent() -> Iterator[None]:
    """Without the library's bars and warnings: what matters of them becomes an error here. Some of its
    bars know of no setting, and are drawn where nobody looks."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _check_vocabulary(path: Path, tokens: int, model: Any) -> None:
    """Models round the number of rows up, by a few per cent at most."""
    rows = model.get_input_embeddings().num_embeddings
    if not 0.9 * rows <= tokens <= rows:
        raise UserError(
            f"{path}: its tokenizer has {tokens:,} tokens and its model {rows:,}; they do not belong "
            "together"
        )


@torch.no_grad()
def _check_causal(path: Path, model: Any) -> None:
    """Encoders load as causal models too, and see the very token that they are to predict."""
    ids = torch.arange(8)[None] % model.get_input_embeddings().num_embeddings
    other = ids.clone()
    other[0, -1] = 0
    before, after = (model(tokens).logits[0, :-1] for tokens in (ids, other))
    if (before - after).abs().max() > 1e-5 * before.abs().max():
        raise UserError(f"{path} is not a causal language model: it looks at later tokens")


def _digest(path: Path) -> str:
    files = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file())
    content = " ".join(f"{file.name} {sha256_of(file)}" for file in files)
    return hashlib.sha256(content.encode()).hexdigest()
