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
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from xdlm.config import LoraConfig, ProcessConfig, RunConfig
from xdlm.data import Rows, data_root, pack
from xdlm.errors import UserError, did_you_mean
from xdlm.evaluation import Likelihood, likelihood
from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.sampling import Filter, Sample, SamplerConfig, Trajectory, parse_template, sample
from xdlm.sampling.ancestral import Last
from xdlm.tokens import TextTokenizer, known_tokenizer
from xdlm.training.adapters import merge_adapters
from xdlm.training.checkpoint import MODEL, Content, save_checkpoint
from xdlm.training.device import pick_device
from xdlm.training.folders import SHARD_BYTES, PublishedOther, write_published
from xdlm.training.trained import bundled, find_model, read_trained

Weights = Literal["ema", "raw"]
Precision = Literal["float32", "bfloat16"]

MAX_LENGTH, MAX_SAMPLES = 1_000_000, 1_000_000
#: Tokens that are sampled together.
_BATCH_TOKENS = 32_768


@dataclass(frozen=True)
class TextSample:
    """Generated text. `nfe` is the largest number of forward passes that a sequence took;
    `trajectory` holds every step of all texts, unless it was not asked for."""

    tokens: Tensor
    text: list[str]
    nfe: int
    trajectory: Trajectory | None


@dataclass(frozen=True)
class Model:
    """A denoiser with its noise process and tokenizer. `weights` says which ones it runs on. A model
    without a process is autoregressive: it predicts and judges text, and writes none."""

    denoiser: Denoiser
    process: NoiseProcess | None
    tokenizer: TextTokenizer
    config: RunConfig
    weights: str
    step: int
    sampled_as: ProcessConfig | None = None
    """The noise that is undone in sampling, where it is not that of training."""

    @property
    def length(self) -> int:
        """Tokens in a row at training time."""
        return self.config.data.length

    def mixed(self, k: float) -> Model:
        """The same model, to be sampled as one of mixed noise: its predictions in XDLM's reverse process.
        It was not trained to doubt a token that it sees, unless its noise was like that."""
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
        steps: int = 32,
        length: int | None = None,
        seed: int = 0,
        prefix: str = "",
        temperature: float = 1.0,
        top_p: float = 1.0,
        last: Last = "sample",
        impl: str = "thinned",
        trajectory: bool = True,
        on_step: Callable[[int, int], None] | None = None,
    ) -> TextSample:
        """Draw `n` texts, each a pure function of (seed, its number); `prefix` is kept in front."""
        length = self.length if length is None else length
        config = SamplerConfig(steps, Filter(temperature, top_p), last, impl)
        ids = self.tokenizer.encode(prefix)
        if not 1 <= length <= MAX_LENGTH:
            raise UserError(f"length must lie in 1..{MAX_LENGTH:,}, got {length}")
        if len(ids) >= length:
            raise UserError(f"the prefix has {len(ids)} tokens and leaves no room in {length}")
        holes = [None] * (length - len(ids))
        return self._sample(n, [*ids, *holes], config, seed, trajectory, on_step)

    def infill(
        self,
        template: str,
        *,
        n: int = 1,
        steps: int = 32,
        seed: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        last: Last = "sample",
        impl: str = "thinned",
        trajectory: bool = True,
        on_step: Callable[[int, int], None] | None = None,
    ) -> TextSample:
        """Fill the holes of a template: `<mask:12>` is a hole of 12 tokens, the rest never changes.

        A space just before a hole belongs to the hole, since tokens carry the space in front of them.
        """
        ids: list[int | None] = []
        for piece in parse_template(template):
            ids += [None] * piece.hole if piece.hole else self.tokenizer.encode(piece.text)
        config = SamplerConfig(steps, Filter(temperature, top_p), last, impl)
        return self._sample(n, ids, config, seed, trajectory, on_step)

    def perplexity(
        self,
        texts: list[str],
        *,
        draws: int = 16,
        seed: int = 0,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> Likelihood:
        """An upper bound on the perplexity per token of some texts, each ended as in training."""
        if isinstance(texts, str):
            raise UserError("perplexity takes a list of texts")
        return self.perplexity_of(self.pack(texts), draws=draws, seed=seed, on_batch=on_batch)

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
        """The same for text that is already packed."""
        return likelihood(
            self.denoiser, self.process, rows, draws=draws, seed=seed, batch=batch,
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
        """Write a folder that `load` reads: these weights alone, cast to `dtype` if given, with adapters
        merged into them."""
        whole = self.merged()
        weights = {
            name: p.to(dtype) if dtype is not None else p
            for name, p in whole.denoiser.named_parameters()
        }
        content = Content(
            whole.config, self.tokenizer.to_json(), self.step, {MODEL: weights}, self.weights
        )
        save_checkpoint(Path(folder), content)

    def publish(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        """Write a folder as hubs hold it: config.json, safetensors, tokenizer.json and a model card."""
        whole = self.merged().denoiser
        denoiser = whole if dtype is None else copy.deepcopy(whole).to(dtype)
        write_published(
            Path(folder), denoiser, self.tokenizer, self._card(), shard_bytes=shard_bytes
        )

    def _card(self) -> str:
        """What the model is and how to use it, with the header that hubs read."""
        noise = self.sampled_as or self.config.process
        name = f"{noise.kind} (k = {noise.k})" if noise.k is not None else noise.kind
        return (
            "---\nlibrary_name: xdlm\npipeline_tag: text-generation\n"
            "tags: [discrete-diffusion, masked-diffusion]\n---\n\n"
            f"A discrete diffusion language model ({self.config.model.kind}) trained under {name} noise: "
            f"{self.weights} weights of step {self.step}, rows of {self.length} tokens.\n\n"
            "    from xdlm import load\n\n"
            '    model = load("this-folder")\n'
            "    print(model.sample(1, steps=32).text[0])\n"
        )

    def _sample(
        self,
        n: int,
        ids: list[int | None],
        config: SamplerConfig,
        seed: int,
        record: bool,
        on_step: Callable[[int, int], None] | None,
    ) -> TextSample:
        """Sample around given ids; None is a position to fill. So many at a time as the device takes."""
        check_writes(self.config)
        assert self.process is not None
        if not 1 <= n <= MAX_SAMPLES:
            raise UserError(f"n must lie in 1..{MAX_SAMPLES:,}, got {n}")
        if len(ids) > MAX_LENGTH:
            raise UserError(f"at most {MAX_LENGTH:,} tokens at once, got {len(ids)}")
        given = torch.tensor([0 if i is None else i for i in ids])
        frozen = torch.tensor([i is not None for i in ids])
        batch = max(_BATCH_TOKENS // max(len(ids), 1), 1)
        starts = range(0, n, batch)
        parts: list[Sample] = []
        for part, first in enumerate(starts):
            size = min(batch, n - first)

            def show(step: int, steps: int, done: int = part) -> None:
                if on_step is not None:
                    on_step(done * steps + step, len(starts) * steps)

            parts.append(
                sample(
                    self.denoiser, self.process, batch=size, length=len(ids), config=config,
                    seed=seed, first_index=first, given=given.expand(size, -1),
                    frozen=frozen.expand(size, -1), record=record, on_step=show,
                )
            )  # fmt: skip
        tokens = torch.cat([part.tokens for part in parts]).cpu()
        paths = [part.trajectory for part in parts if part.trajectory is not None]
        path = None
        if paths:
            path = replace(paths[0], frames=torch.cat([each.frames for each in paths], dim=1))
        return TextSample(
            tokens=tokens,
            text=[self.tokenizer.decode(row.tolist()) for row in tokens],
            nfe=max(int(part.nfe.max()) for part in parts),
            trajectory=path,
        )


def load(
    name: str | Path,
    *,
    device: str = "auto",
    weights: Weights = "ema",
    precision: Precision = "float32",
) -> Model:
    """Load a bundled model by name, or by path a checkpoint, a run, or LLaDA as it is published.

    Averaged weights are used unless `weights="raw"` asks for those that training left. `precision` is the
    trunk's; what is computed from its output is float32 or better in any case.
    """
    for what, value, known in (("weights", weights, Weights), ("precision", precision, Precision)):
        if value not in get_args(known):
            raise UserError(f"unknown {what} '{value}'{did_you_mean(value, get_args(known))}")
    checkpoint = find_model(name)
    if isinstance(checkpoint, PublishedOther):
        raise UserError(
            f"{name} was not trained under noise; adapt it first (model: {{kind: pretrained, path: "
            f"{name}}} in a recipe), or take it as it is with xdlm import --from transformers"
        )
    denoiser, process, tokenizer, used = read_trained(
        checkpoint, weights=weights, device=pick_device(device), dtype=getattr(torch, precision)
    )
    return Model(denoiser, process, tokenizer, checkpoint.config, used, checkpoint.step)


def check_writes(config: RunConfig) -> None:
    """That a model of this configuration can sample."""
    if config.process.is_autoregressive:
        raise UserError(
            "this model is autoregressive: it judges texts (xdlm eval gen --judge) and has a perplexity "
            "(xdlm eval ppl), but it writes none; sample from one that was trained under noise"
        )


def load_tokenizer(name: str | Path, root: str | Path | None = None) -> TextTokenizer:
    """A bundled model's tokenizer by name, one by path, or one of the papers' by name: `gpt2` and
    `bert-base-uncased`, in the folder `root` of local data or from the hub."""
    path = bundled(name) or Path(name)
    if isinstance(name, str) and not path.exists():
        path = known_tokenizer(name, Path(root if root is not None else data_root())) or path
    return TextTokenizer.load(path)
