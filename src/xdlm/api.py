"""A trained model as one object: sample, fill in, measure.

For example:

    from xdlm import load

    model = load("pocket")
    print(model.sample(1, steps=32, seed=0).text[0])
    print(model.infill("The <mask:12> sat on the mat.").text[0])
    print(model.perplexity(["It was a dark night."]).value)
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Unpack, get_args

import torch
from torch import Tensor

from xdlm.blanks import BlankRule, force, make_rules, read_template
from xdlm.config import DataConfig, LoraConfig, ProcessConfig, RunConfig, TrainConfig
from xdlm.data import Rows, data_root, pack
from xdlm.errors import UserError, check_known, check_seed, check_whole
from xdlm.evaluation import Likelihood, likelihood
from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.sampling import How, Trajectory, configure, write
from xdlm.sampling.constraints import Rules
from xdlm.sampling.filling import fill
from xdlm.sampling.writing import BATCH_TOKENS, Part, join_trajectories
from xdlm.tokens import Codes, Pixels, TextTokenizer, Tokenizer, known_tokenizer
from xdlm.tokens.codes import PREFIX
from xdlm.training.adapters import merge_adapters, write_adapters
from xdlm.training.checkpoint import save_weights
from xdlm.training.device import pick_device
from xdlm.training.folders import SHARD_BYTES, PublishedOther, write_published
from xdlm.training.model_card import adapter_card, model_card
from xdlm.training.note import Note
from xdlm.training.trained import (
    Precision,
    Weights,
    bundled,
    describe,
    find_model,
    read_trained,
)

MAX_LENGTH, MAX_SAMPLES = 1_000_000, 1_000_000
#: Draws of noise for each row of some texts, at least, and for all rows together, at least.
_FEW_DRAWS, _DRAWS = 16, 512
#: Tokens that a completion has at most, if nobody says otherwise.
_NEW_TOKENS = 256
#: Texts of a result that its repr shows, and how much of each.
_SHOWN, _SHOWN_CHARS = 3, 60


@dataclass(frozen=True)
class TextSample:
    """Generated text. `nfe` is the largest number of forward passes that a sequence took; `trajectory`
    holds every step of all texts, if it was asked for. `stopped` says of each text whether it ended at an
    end-of-text token; the text then ends before that token."""

    tokens: Tensor
    text: list[str]
    nfe: int
    trajectory: Trajectory | None
    stopped: list[bool]

    def __repr__(self) -> str:
        texts = [repr(_cut(text)) for text in self.text[:_SHOWN]]
        more = len(self.text) - len(texts)
        texts += [f"and {more} more"] if more else []
        return f"TextSample({', '.join(texts)}; tokens {list(self.tokens.shape)}, nfe={self.nfe})"


class Completion(NamedTuple):
    """What follows a prompt: tokens and text up to the end, whether the model ended it (rather than the
    limit of tokens), and the forward passes that it took."""

    tokens: list[int]
    text: str
    stopped: bool
    nfe: int


@dataclass(frozen=True)
class Model:
    """A denoiser with its noise process and tokenizer. `weights` says which ones it runs on, averaged or
    raw. A model without a process is autoregressive: it can judge text, but not write any."""

    denoiser: Denoiser
    process: NoiseProcess | None
    tokenizer: TextTokenizer
    config: RunConfig
    weights: str
    step: int
    sampled_as: ProcessConfig | None = None
    """The noise process of sampling, if that is not the one of training."""
    name: str = "the model"
    """What it was loaded as."""

    def __repr__(self) -> str:
        about = describe(self.denoiser, self.weights, self.step)
        return f"Model({self.process}, rows of {self.length} tokens, {about})"

    @property
    def length(self) -> int:
        """Tokens in a row at training time."""
        return self.config.data.length

    def mixed(self, k: float) -> Model:
        """The same model, sampled as one of mixed noise: its predictions in XDLM's reverse process. Unless
        it was trained under such noise, it has not learnt to doubt the tokens that it sees."""
        check_writes(self.config)
        assert self.process is not None
        vocab = self.process.vocab
        if vocab.mask_id is None:
            raise UserError("a model of uniform noise has no mask, and mixed noise needs one")
        own = self.config.process  # the schedule stays; GIDD has none, and gets the default
        process = ProcessConfig("mixed", k=k, schedule=own.schedule, eps=own.eps, power=own.power)
        return replace(self, process=process.build(vocab), sampled_as=process)

    def sample(
        self,
        n: int = 1,
        *,
        prompt: str = "",
        length: int | None = None,
        new_tokens: int | None = None,
        seed: int = 0,
        stop: bool = False,
        banned: Sequence[int | str] = (),
        batch_tokens: int = BATCH_TOKENS,
        trajectory: bool = True,
        on_step: Callable[[int, int], None] | None = None,
        **how: Unpack[How],
    ) -> TextSample:
        """Draw `n` texts, each a pure function of (seed, its number); `prompt` is kept in front.

        A text has `length` tokens including its prompt (unless given, as many as a row of training), or
        `new_tokens` behind the prompt. With `stop` it ends where the model writes the end-of-text token.
        Tokens that are `banned`, by number or by a text that is one token, are never written. Texts of up
        to `batch_tokens` tokens together go through the model at once.

        Settings of the sampler: `steps`, `temperature`, `top_p`; for exact reverse steps, the default, also
        `last` and `impl` (`xdlm.sampling.SamplerConfig`); for `sampler="confidence"`, the paper's
        Algorithm 1, which looks for likely text rather than draw from the model, also `block_length`,
        `guidance`, `confidence` and `refresh` (`xdlm.sampling.ConfidenceConfig`).
        """
        _check_text("a prompt", prompt)
        ids = self.tokenizer.encode(prompt)
        holes = _room(len(ids), length, new_tokens, self.length)
        self._warn_beyond(len(ids) + len(holes))
        ends = (self.tokenizer.eos_id,) if stop else ()
        return self._texts(
            n, [*ids, *holes], how, rules=self._rules(banned=banned), seed=seed, stop_ids=ends,
            batch_tokens=batch_tokens, record=trajectory, on_step=on_step,
        )  # fmt: skip

    def infill(
        self,
        template: str,
        *,
        n: int = 1,
        seed: int = 0,
        forced: Mapping[int, int | str] | None = None,
        banned: Sequence[int | str] = (),
        blanks: Sequence[BlankRule | None] = (),
        batch_tokens: int = BATCH_TOKENS,
        trajectory: bool = True,
        on_step: Callable[[int, int], None] | None = None,
        **how: Unpack[How],
    ) -> TextSample:
        """Fill the holes of a template: `<mask:12>` is a hole of 12 tokens, the rest never changes.

        A space just before a hole belongs to the hole, since tokens carry the space in front of them.
        `forced` maps positions of the row to tokens, `banned` are tokens that are never written, both by
        number or by a text that is one token; `blanks` says of each hole, in order, what it may hold. The
        settings of the sampler are those of `sample`.
        """
        _check_text("a template", template)
        encode = self.tokenizer.encode
        row = read_template(template, encode, max_length=MAX_LENGTH)
        self._warn_beyond(len(row.ids))
        return self._texts(
            n, force(row.ids, forced or {}, encode), how,
            rules=self._rules(row.holes, banned=banned, blanks=blanks), seed=seed,
            batch_tokens=batch_tokens, record=trajectory, on_step=on_step,
        )  # fmt: skip

    def complete(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        *,
        new_tokens: int | None = None,
        seed: int = 0,
        index: Sequence[int] | None = None,
        stop: bool = True,
        stop_ids: Sequence[int] = (),
        batch_tokens: int = BATCH_TOKENS,
        on_step: Callable[[int, int], None] | None = None,
        on_frame: Callable[[Tensor], None] | None = None,
        **how: Unpack[How],
    ) -> list[Completion]:
        """Continue each of some prompts, texts or token ids of any lengths, by at most `new_tokens` tokens:
        by default 256, or fewer if a row of training has room for fewer (but for some) behind the prompt.
        Completions are in the order of the prompts and independent of each other: each is a pure function
        of its prompt, the seed and its number, which counts from 0 unless `index` gives it.

        A text ends at the end-of-text token, or at one of `stop_ids`. Prompts of similar lengths (of equal
        ones, if the backbone takes no padding) go through the model together, `batch_tokens` tokens at a
        time; `on_frame` is called with their tokens after every step. The settings of the sampler are those
        of `sample`.
        """
        if isinstance(prompts, str) or not isinstance(prompts, Iterable):
            raise UserError(f"complete takes a list of prompts, got {_shown(prompts)}")
        rows = []
        for ids in map(self._ids, prompts):
            fitting = self.length - len(ids)
            usual = min(_NEW_TOKENS, fitting) if fitting > 0 else _NEW_TOKENS
            most = usual if new_tokens is None else new_tokens
            rows.append([*ids, *_room(len(ids), None, most, self.length)])
        self._warn_beyond(max(map(len, rows), default=0))
        ends = (*((self.tokenizer.eos_id,) if stop else ()), *stop_ids)
        found: dict[int, Completion] = {}
        for group, drawn in self._write(
            rows, how, seed=seed, index=index, stop_ids=ends, batch_tokens=batch_tokens,
            on_step=on_step, on_frame=on_frame,
        ):  # fmt: skip
            for i, (row, ids) in enumerate(zip(group, drawn.tokens.tolist(), strict=True)):
                end = int(drawn.ends[i])
                tokens = ids[rows[row].index(None) : end]
                found[row] = Completion(
                    tokens, self.tokenizer.decode(tokens), end < len(rows[row]), int(drawn.nfe[i])
                )
        return [found[row] for row in range(len(rows))]

    def perplexity(
        self,
        texts: list[str],
        *,
        draws: int | None = None,
        seed: int = 0,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Likelihood:
        """An upper bound on the perplexity per token of some texts, each ended as in training. Noise is
        drawn `draws` times for each row of text; unless given, at least 16 times for each and 512 times for
        all together, since in the few tokens of a sentence most draws say little."""
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise UserError(f"perplexity takes a list of texts, got {_shown(texts)}")
        for text in (texts := list(texts)):
            if not isinstance(text, str):
                raise UserError(
                    f"perplexity takes a list of texts, and {_shown(text)} is not a text"
                )
        if not any(text.strip() for text in texts):
            raise UserError("there is no text to evaluate: the list holds no text")
        rows = self.pack(texts)
        if draws is None:
            draws = max(_FEW_DRAWS, _DRAWS // max(1, len(rows) + (rows.tail.size > 0)))
        return self.perplexity_of(rows, draws=draws, seed=seed, on_batch=on_batch)

    def perplexity_of(
        self,
        rows: Rows,
        *,
        draws: int = 4,
        seed: int = 0,
        batch: int = 16,
        max_rows: int | None = None,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Likelihood:
        """The same for text that is already packed. The bound is always under the noise of training, also
        for a model from `mixed`."""
        check_seed(seed)
        check_whole("draws", draws)
        process = self.process
        if self.sampled_as is not None and process is not None:
            process = self.config.process.build(process.vocab)
        return likelihood(
            self.denoiser, process, rows, draws=draws, seed=seed, batch=batch,
            max_rows=max_rows, on_batch=on_batch,
        )  # fmt: skip

    def pack(self, texts: Iterable[str]) -> Rows:
        """Tokenise and cut as for training."""
        data = self.config.data
        return pack(
            texts, self.tokenizer, data.length, bos=data.bos, eos=data.eos, frame=data.frame
        )

    def merged(self) -> Model:
        """The same model with its adapters in its weights; itself, if it has none."""
        if not self.config.lora.rank:
            return self
        denoiser = copy.deepcopy(self.denoiser)
        merge_adapters(denoiser)
        return replace(self, denoiser=denoiser, config=replace(self.config, lora=LoraConfig()))

    def save(self, folder: str | Path, *, dtype: torch.dtype | None = None) -> None:
        """Write a folder that `load` reads: these weights alone, with adapters merged into them, cast to
        `dtype` if given (int8: matrices as bytes, with one scale for each of their rows)."""
        self._check_own_noise()
        if dtype not in (None, torch.int8) and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point
        ):
            raise UserError(
                f"weights are saved as a floating-point type of torch or torch.int8, not {dtype!r}"
            )
        whole = self.merged()
        save_weights(
            Path(folder), whole.denoiser, self.tokenizer, whole.config, step=self.step,
            weights=self.weights, dtype=dtype,
        )  # fmt: skip

    def publish(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write a folder as hubs hold it: config.json, safetensors, tokenizer.json and a model card."""
        self._check_own_noise()
        whole = self.merged()
        note = Note(whole.config, self.step, self.weights)
        card = model_card(note, self.tokenizer)
        write_published(
            Path(folder), whole.denoiser, self.tokenizer, note, card, dtype=dtype,
            shard_bytes=shard_bytes,
        )  # fmt: skip

    def publish_adapters(self, folder: str | Path, *, dtype: torch.dtype = torch.float32) -> None:
        """Write the adapters alone, unmerged, as peft reads them beside the weights that they belong to."""
        self._check_own_noise()
        base = self.config.start()
        if not self.config.lora.rank or base is None:
            raise UserError("this model has no adapters: write it whole")
        card = adapter_card(Note(self.config, self.step, self.weights), self.tokenizer, base)
        write_adapters(
            Path(folder), self.denoiser, self.config.lora, base=base, card=card, dtype=dtype
        )

    def _check_own_noise(self) -> None:
        """Refuse to write a model whose noise is not that of the configuration that it is read by."""
        if self.sampled_as is not None:
            raise UserError(
                "a model from mixed(k) is not saved, since it would be read again without that k: save the "
                "one that it was made from"
            )

    def _rules(
        self,
        holes: Sequence[tuple[int, ...]] = (),
        *,
        banned: Sequence[int | str],
        blanks: Sequence[BlankRule | None] = (),
    ) -> Rules:
        if not (banned or blanks):
            return Rules()
        check_writes(self.config)
        assert self.process is not None
        return make_rules(
            holes, self.tokenizer, self.process.vocab.size, self.tokenizer.encode,
            banned=banned, blanks=blanks,
        )  # fmt: skip

    def _texts(
        self, n: int, ids: list[int | None], how: Mapping[str, Any], *, rules: Rules, **args: Any
    ) -> TextSample:
        """`n` times the same row, filled; None is a hole."""
        check_whole("n", n)
        check_seed(args["seed"])
        if not 1 <= n <= MAX_SAMPLES:
            raise UserError(f"n must lie in 1..{MAX_SAMPLES:,}, got {n}")
        if rules:
            assert self.process is not None
            config = configure(how, self.process)
            parts = fill(self.denoiser, self.process, ids, n=n, config=config, rules=rules, **args)
        else:
            parts = [part.sample for part in self._write([ids] * n, how, **args)]
        tokens = torch.cat([part.tokens for part in parts]).cpu()
        ends = torch.cat([part.ends for part in parts]).tolist()
        paths = [part.trajectory for part in parts if part.trajectory is not None]
        return TextSample(
            tokens=tokens,
            text=[
                self.tokenizer.decode(row[:end])
                for row, end in zip(tokens.tolist(), ends, strict=True)
            ],
            nfe=max(int(part.nfe.max()) for part in parts),
            trajectory=join_trajectories(paths) if paths else None,
            stopped=[end < len(ids) for end in ends],
        )

    def _ids(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, Iterable):
            raise UserError(f"a prompt is a text or a list of tokens, got {_shown(prompt)}")
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _warn_beyond(self, length: int) -> None:
        """Warn of rows longer than those of training, which are written, but worse; not if the model is
        from elsewhere or was started from other weights, since it may have seen longer rows before."""
        config = self.config
        here = self.step > 0 and config.train != TrainConfig() and config.start() is None
        if here and length > self.length:
            _say_once(
                f"{self.name} was trained on rows of {self.length} tokens: quality drops beyond them"
            )

    def _write(
        self, rows: Sequence[Sequence[int | None]], how: Mapping[str, Any], **args: Any
    ) -> list[Part]:
        check_writes(self.config)
        check_seed(args["seed"])
        assert self.process is not None
        longest = max(map(len, rows), default=0)
        if longest > MAX_LENGTH:
            raise UserError(f"at most {MAX_LENGTH:,} tokens at once, got {longest}")
        config = configure(how, self.process)
        return write(self.denoiser, self.process, rows, config=config, **args)


@cache
def _say_once(line: str) -> None:
    warnings.warn(line, stacklevel=4)  # at the line that asked the model


def _cut(text: str) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}..."


def _shown(value: object) -> str:
    return _cut(repr(value))


def _check_text(what: str, given: object) -> None:
    if not isinstance(given, str):
        raise UserError(
            f"{what} is one text, got {_shown(given)}; complete([...]) takes several prompts"
        )


def _room(n_prompt: int, length: int | None, new_tokens: int | None, default: int) -> list[None]:
    """The holes behind a prompt of so many tokens."""
    if new_tokens is not None:
        if length is not None:
            raise UserError("give length, which counts the prompt, or new_tokens, not both")
        check_whole("new_tokens", new_tokens)
        if not 1 <= new_tokens <= MAX_LENGTH:
            raise UserError(f"new_tokens must lie in 1..{MAX_LENGTH:,}, got {new_tokens}")
        return [None] * new_tokens
    length = default if length is None else length
    check_whole("length", length)
    if not 1 <= length <= MAX_LENGTH:
        raise UserError(f"length must lie in 1..{MAX_LENGTH:,}, got {length}")
    if n_prompt >= length:
        raise UserError(
            f"the prompt has {n_prompt} tokens and leaves no room in {length}: shorten it, raise length, "
            "or give new_tokens instead"
        )
    return [None] * (length - n_prompt)


def load(
    name: str | Path,
    *,
    device: str | torch.device = "auto",
    weights: Weights = "ema",
    precision: Precision = "float32",
) -> Model:
    """Load a bundled model by name, or by path a checkpoint, a run, or LLaDA as it is published.

    The weights are averaged ones, unless `weights="raw"` asks for those at the end of training. `precision`
    is that of the trunk; what is computed from its output is float32 or better in any case.
    """
    if not isinstance(name, str | os.PathLike):
        raise UserError(f"load takes a name, such as 'pocket', or a path, got {name!r}")
    check_known("weights", weights, get_args(Weights))
    check_known("precision", precision, get_args(Precision))
    checkpoint = find_model(name)
    if isinstance(checkpoint, PublishedOther) and not checkpoint.is_denoiser:
        raise UserError(
            f"{name} was not trained under noise; adapt it first (model: {{kind: pretrained, path: "
            f"{name}}} in a recipe), or take it as it is with xdlm import --from transformers"
        )
    denoiser, process, tokenizer, used = read_trained(
        checkpoint,
        weights=weights,
        device=pick_device(str(device)),
        dtype=getattr(torch, precision),
    )
    if not isinstance(tokenizer, TextTokenizer):
        raise UserError(f"{name} makes images: see xdlm paint, or xdlm.images in Python")
    return Model(
        denoiser, process, tokenizer, checkpoint.config, used, checkpoint.step, name=str(name)
    )


def check_writes(config: RunConfig) -> None:
    """Raise unless a model of this configuration can sample."""
    if config.process.is_autoregressive:
        raise UserError(
            "this model is autoregressive: it judges texts (xdlm eval gen --judge) and has a perplexity "
            "(xdlm eval ppl), but does not write; sample from one that was trained under noise"
        )


def tokenizer_of(data: DataConfig) -> Tokenizer:
    """The tokenizer that a configuration names, of text or of images."""
    if not data.is_images:
        return load_tokenizer(data.tokenizer)
    if data.tokenizer.startswith(PREFIX):
        return Codes.open(data.tokenizer.removeprefix(PREFIX), data.length)
    return Pixels.of_length(data.length)


def load_tokenizer(name: str | Path, root: str | Path | None = None) -> TextTokenizer:
    """A bundled model's tokenizer by name, one by path, or one of the papers' by name: `gpt2` and
    `bert-base-uncased`, in the folder `root` of local data or from the hub."""
    path = bundled(name) or Path(name)
    if isinstance(name, str) and not path.exists():
        path = known_tokenizer(name, Path(root if root is not None else data_root())) or path
    return TextTokenizer.load(path)
