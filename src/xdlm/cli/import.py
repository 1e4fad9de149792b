"""`xdlm import`: models that others published."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Literal

import torch

from xdlm.api import load_tokenizer
from xdlm.cli.options import named, parse, positional, shown_as
from xdlm.cli.progress import console, waiting
from xdlm.config import DataConfig, ProcessConfig, RunConfig
from xdlm.errors import UserError
from xdlm.files import check_free
from xdlm.models import DiTConfig, LladaConfig, PretrainedConfig, build_denoiser
from xdlm.tokens import TextTokenizer
from xdlm.tokens.vq import read_llamagen
from xdlm.training.checkpoint import MODEL, Content, save_checkpoint
from xdlm.training.codec import save_codec
from xdlm.training.folders import Published, PublishedOther, open_published
from xdlm.training.foreign import Said, Told, check_rows, dit_shape, dit_tensors, read_foreign
from xdlm.training.tensors import check_fit
from xdlm.training.trained import read_trained

_DESCRIPTION = """Turn a published model into a folder that all verbs read. FROM says whose it is:

  llada         a folder of LLaDA: config.json, safetensors (sharded or not), tokenizer.json
  transformers  a folder of any masked or causal language model of transformers
  mdlm, udlm, gidd, xdlm   a checkpoint of one of these repositories: .ckpt (averaged weights), .pt,
                safetensors, or a folder that holds one. Nothing that such a file holds is run.
  llamagen      LlamaGen's codec of images, VQ-16 (vq_ds16_c2i.pt), into a folder that `vq:FOLDER` names

What neither the file nor a config.json beside it says is given by flags: xdlm its --process.k, gidd its
--process.p-uniform. A udlm is told the noise level, as all published ones are, unless it says otherwise.

LLaDA folders need no import: `--model FOLDER` reads them as they are.

examples:
  xdlm import --from mdlm mdlm.ckpt --tokenizer gpt2 --out models/mdlm
  xdlm import --from xdlm xdlm.ckpt --process.k 0.1 --tokenizer gpt2 --out models/xdlm
  xdlm import --from gidd gidd-small/ --process.p-uniform 0.2 --out models/gidd
  xdlm import --from llada LLaDA-8B-Base/ --dtype bfloat16 --out models/llada
  xdlm import --from llada LLaDA-XDLM/ --process.k 0.1 --dtype bfloat16 --out models/llada-xdlm
  xdlm import --from transformers SmolLM2-135M/ --shift --out models/smol
  xdlm import --from llamagen vq_ds16_c2i.pt --out codecs/vq16
"""
_DITS = {"mdlm": "masked", "udlm": "uniform", "gidd": "gidd", "xdlm": "mixed"}


@dataclass(frozen=True)
class Noise:
    """What the noise was, as far as FROM does not say it."""

    k: float | None = None
    """xdlm: share of uniform noise. Also of a llada or transformers model that was trained on as XDLM, and
    does not say so."""
    p_uniform: float | None = None
    """gidd: probability of uniform noise at half time."""


@dataclass(frozen=True)
class Options:
    path: Annotated[str, positional(), shown_as("PATH")]
    """File or folder to read."""
    from_: Annotated[
        Literal["llada", "transformers", "mdlm", "udlm", "gidd", "xdlm", "llamagen"], named("from")
    ]
    """Whose model it is."""
    out: str
    """Folder to write."""
    tokenizer: str | None = None
    """mdlm, udlm, gidd, xdlm: the model's tokenizer (default: tokenizer.json beside the weights)."""
    process: Noise = field(default_factory=lambda: Noise())
    length: int | None = None
    """mdlm, udlm, gidd, xdlm: tokens in a row at training time (default: what a config.json beside the
    weights says, or 1,024)."""
    heads: int | None = None
    """mdlm, udlm, gidd, xdlm: attention heads, if nothing beside the weights tells."""
    shift: bool = False
    """transformers: the state at a position predicts the next token."""
    weights: Literal["ema", "raw"] = "ema"
    """mdlm, udlm, gidd, xdlm: averaged weights, or those that training left."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights on disk."""


def run(arguments: list[str]) -> None:
    options = parse(Options, arguments, prog="xdlm import", description=_DESCRIPTION)
    _check_flags(options)
    check_free(Path(options.out))
    if options.from_ == "llamagen":
        _import_codec(options)
        return
    read = _content_of_dit if options.from_ in _DITS else _content_of_folder
    with waiting(f"reading {options.path}"):
        content = read(options)
    with waiting(f"writing {options.out}"):
        save_checkpoint(Path(options.out), content)
    n = sum(tensor.numel() for tensor in content.tensors[MODEL].values())
    console().print(
        f"{options.out}: {n / 1e6:.1f} M parameters ({content.weights}), "
        f"{content.config.process.kind} noise",
    )


def _check_flags(options: Options) -> None:
    """That no flag is given which would be ignored."""
    meant = {
        "shift": ("transformers",), "dtype": ("llada", "transformers", *_DITS),
        "process": ("llada", "transformers", *_DITS),
    }  # fmt: skip
    for given in fields(Options):
        default = given.default if given.default is not MISSING else Noise()
        allowed = meant.get(given.name, tuple(_DITS))
        if given.name in ("path", "from_", "out") or options.from_ in allowed:
            continue
        if getattr(options, given.name) != default:
            raise UserError(f"--{given.name} has no meaning for --from {options.from_}; remove it")


def _import_codec(options: Options) -> None:
    codec = read_llamagen(Path(options.path))
    save_codec(codec, Path(options.out))
    shape = codec.config
    console().print(
        f"{options.out}: {shape.codes:,} codes, each of {shape.shrink} x {shape.shrink} pixels",
    )


def _content_of_dit(options: Options) -> Content:
    foreign = read_foreign(Path(options.path), averaged=options.weights == "ema")
    tokenizer = _tokenizer_of(options)
    process = _process_of(options, tokenizer, foreign.said)
    config = RunConfig(
        process=process,
        model=dit_shape(foreign, heads=options.heads, told=_told(options.from_, foreign.said)),
        data=DataConfig(
            tokenizer=options.tokenizer or options.path,
            length=options.length or foreign.said.length or 1024,
        ),
    )
    vocab = config.vocab(tokenizer.size)
    check_rows(foreign, vocab.size)
    assert isinstance(config.model, DiTConfig)
    tensors = dit_tensors(foreign, config.model, vocab.size)
    with torch.device("meta"):
        shapes = dict(build_denoiser(config.model, vocab.size).named_parameters())
    check_fit(tensors, shapes, Path(options.path), "a DiT of its shape")
    dtype = getattr(torch, options.dtype)
    cast = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return Content(config, tokenizer.files(), foreign.step, {MODEL: cast}, foreign.weights)


def _told(repository: str, said: Said) -> Told:
    """GIDD's models are told the time. Those of the others are told the noise level or nothing, as their
    configuration says; where that is not there, as all that the repository published are."""
    if repository == "gidd":
        return "time"
    is_told = repository == "udlm" if said.time_conditioning is None else said.time_conditioning
    return "level" if is_told else "nothing"


def _process_of(options: Options, tokenizer: TextTokenizer, said: Said) -> ProcessConfig:
    """Where a tokenizer has a mask of its own, these repositories use that."""
    p_uniform = options.process.p_uniform
    if options.from_ == "gidd" and p_uniform is None:
        p_uniform = said.p_uniform
    needed = {"gidd": p_uniform, "xdlm": options.process.k}
    if options.from_ in needed and needed[options.from_] is None:
        flag = "k" if options.from_ == "xdlm" else "p-uniform"
        raise UserError(f"--from {options.from_} needs --process.{flag}: the file does not say it")
    kind = _DITS[options.from_]
    mask_id = None if kind == "uniform" else tokenizer.mask_id
    return ProcessConfig(kind, k=options.process.k, p_uniform=p_uniform, mask_id=mask_id)


def _tokenizer_of(options: Options) -> TextTokenizer:
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    path = Path(options.path)
    return TextTokenizer.load(path if path.is_dir() else path.parent)


def _content_of_folder(options: Options) -> Content:
    """All weights of a hub's folder; a model that was not trained under noise is taken as one of masked
    noise, which is what it is nearest to."""
    folder = Path(options.path)
    if not folder.is_dir():
        raise UserError(f"no folder at {folder}")
    source = open_published(folder)
    is_llada = source.config.model.kind == LladaConfig.kind
    if is_llada != (options.from_ == "llada"):
        raise UserError(f"{folder} is {'' if is_llada else 'not '}a folder of LLaDA")
    if isinstance(source, PublishedOther) and not source.is_denoiser:
        assert isinstance(source.config.model, PretrainedConfig)
        shifted = replace(source.config.model, shift=options.shift)
        source = replace(source, config=replace(source.config, model=shifted))
    elif options.shift:
        raise UserError(f"--shift has no meaning here: {folder} says what it is; remove it")
    source = _under_noise(source, options.process)
    denoiser, _, tokenizer, weights = read_trained(source, dtype=getattr(torch, options.dtype))
    tensors = {MODEL: dict(denoiser.named_parameters())}
    return Content(source.config, tokenizer.files(), 0, tensors, weights)


def _under_noise(source: Published | PublishedOther, noise: Noise) -> Published | PublishedOther:
    """With the mixed noise that it was trained under, where a folder does not say so itself."""
    if noise.p_uniform is not None:
        raise UserError("--process.p-uniform is about checkpoints of gidd; remove it")
    if noise.k is None:
        return source
    said = source.config.process
    if said.kind != "masked":
        raise UserError(
            f"{source.folder} says that its noise is {said.kind}; leave --process.k out"
        )
    return replace(source, config=replace(source.config, process=ProcessConfig("mixed", k=noise.k)))
