"""What a run is made of: typed dataclasses, read from YAML, overridden by dotted flags.

The resolved configuration is saved with every checkpoint, so a folder says how it came to be. An
unknown key, a wrong type or a setting that the chosen kind would ignore is an error.
"""

from __future__ import annotations

import dataclasses
import math
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from xdlm.errors import UserError, did_you_mean
from xdlm.models import BACKBONES, PRESETS, DiTConfig, ModelConfig
from xdlm.models.contract import BackboneConfig
from xdlm.noise import PROCESSES, SCHEDULES, NoiseProcess
from xdlm.objective import WEIGHTINGS
from xdlm.structs import Vocab

T = TypeVar("T")

#: The kind of process that is none.
AUTOREGRESSIVE = "autoregressive"


@dataclass(frozen=True)
class ProcessConfig:
    """The noise process."""

    kind: str = "mixed"
    """masked (MDLM), uniform (UDLM), mixed (XDLM) or gidd (GIDD); or autoregressive: no noise, each token
    is predicted from those before it (a judge of texts)."""
    k: float | None = None
    """mixed: share of uniform noise, 0 to 1 (default 0.1)."""
    p_uniform: float | None = None
    """gidd: probability of uniform noise at half time (default 0.1)."""
    gamma: float | None = None
    """gidd: shape of the uniform bump (default 1)."""
    schedule: str | None = None
    """log-linear (default), cosine or polynomial; gidd has its own."""
    eps: float | None = None
    """What is left of the data at time 1 (default 1e-3)."""
    power: float | None = None
    """polynomial: exponent of time (default 2)."""
    mask_id: int | None = None
    """The token that is the mask, where the tokenizer has one (default: a state of its own after all
    tokens). A model that brings its own vocabulary has its mask there."""

    def __post_init__(self) -> None:
        self.build(Vocab(size=1000, mask_id=0))
        if self.mask_id is not None and (self.is_autoregressive or not self._class().wants_mask):
            raise UserError(f"process.mask_id has no meaning for kind '{self.kind}'; remove it")

    def vocab(self, n_tokens: int) -> Vocab:
        """The state space over `n_tokens` tokens: the mask is added as the last id, if there is one and
        it is not one of them."""
        if self.is_autoregressive or not self._class().wants_mask:
            return Vocab(n_tokens)
        if self.mask_id is not None:
            return Vocab(n_tokens, mask_id=self.mask_id)
        return Vocab(n_tokens + 1, mask_id=n_tokens)

    @property
    def is_autoregressive(self) -> bool:
        """Whether there is no noise, but a model that predicts the next token."""
        return self.kind == AUTOREGRESSIVE

    def _class(self) -> type[NoiseProcess]:
        if self.kind not in PROCESSES:
            known = (*PROCESSES, AUTOREGRESSIVE)
            raise UserError(f"unknown process '{self.kind}'{did_you_mean(self.kind, known)}")
        return PROCESSES[self.kind]

    def build(self, vocab: Vocab) -> NoiseProcess | None:
        """None where there is no noise."""
        if self.is_autoregressive:
            self._given(allowed=())
            return None
        cls = self._class()
        own = cls.settings
        given = self._given((*own, "schedule", "eps", "power") if cls.has_schedule else own)
        arguments = {name: given[name] for name in own if name in given}
        if cls.has_schedule:
            arguments["schedule"] = self._schedule()
        return cls(vocab, **arguments)  # type: ignore[call-arg]

    def _given(self, allowed: tuple[str, ...]) -> dict[str, Any]:
        """The settings that are set, all of them allowed."""
        given = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("kind", "mask_id") and getattr(self, f.name) is not None
        }
        for name in given:
            if name not in allowed:
                raise UserError(f"process.{name} has no meaning for kind '{self.kind}'; remove it")
        return given

    def _schedule(self) -> Any:
        name = self.schedule or "log-linear"
        if name not in SCHEDULES:
            raise UserError(f"unknown schedule '{name}'{did_you_mean(name, SCHEDULES)}")
        if self.power is not None and name != "polynomial":
            raise UserError(f"process.power has no meaning for schedule '{name}'; remove it")
        arguments = {"eps": self.eps, "power": self.power}
        return SCHEDULES[name](**{k: v for k, v in arguments.items() if v is not None})


@dataclass(frozen=True)
class DataConfig:
    """Text and how it is cut, or images."""

    train: str = "corpus:train"
    """Training text: corpus:train, a corpus of the papers (openwebtext:train), a file, or a folder of
    files or of shards that `xdlm prepare` made. Images: cifar10:train, a file of them, a folder with a
    folder for each class, or one of codes that `xdlm prepare imagenet` made."""
    val: str | None = "corpus:heldout"
    """Validation text, in the same forms; none to skip validation."""
    tokenizer: str = "pocket"
    """A tokenizer.json, a folder that holds one, the name of a bundled model, gpt2 or bert-base-uncased
    (from the folder of local data, or the hub). Or, where the data is images: pixels, and a
    token is one of the 256 levels of one channel of a pixel; vq:FOLDER, and it is a code of that codec."""
    length: int = 1024
    """Tokens in a row; for pixels, 3 x side x side (3072 for 32 x 32), and for codes one for each cell."""
    bos: bool = False
    """Put the end-of-text token before every document too."""
    eos: bool = True
    """Put the end-of-text token after every document."""
    frame: bool = False
    """Begin and end every row with tokens of its own, as published code does."""
    limit: int | None = None
    """Use only so many documents of the training text."""
    pairs: bool = False
    """The training text is records with a prompt and a response, one pair to a row: prompts are never
    noised, and the loss is of responses alone. Or with messages (role and content), which the tokenizer's
    chat template makes pairs of: one for every answer of the assistant."""
    flips: bool = False
    """images: train on every image's mirror image too."""

    @property
    def is_images(self) -> bool:
        return self.tokenizer == "pixels" or self.tokenizer.startswith("vq:")

    def __post_init__(self) -> None:
        if self.length < 2:
            raise UserError(f"data.length must be at least 2, got {self.length}")
        if self.limit is not None and self.limit < 1:
            raise UserError(f"data.limit must be at least 1, got {self.limit}")
        if self.pairs and (self.frame or not self.eos):
            raise UserError("data.pairs: a row ends with end tokens, and has no frame")
        for name in ("bos", "frame", "pairs") if self.is_images else ("flips",):
            if getattr(self, name):
                what = "images" if self.is_images else "text"
                raise UserError(f"data.{name} has no meaning for {what}; remove it")


@dataclass(frozen=True)
class LossConfig:
    """The training objective."""

    weighting: str = "elbo"
    """elbo, or GIDD's clipped or dynamic weights."""
    impl: Literal["auto", "eager", "chunked", "fused"] = "auto"
    """How the head and the sums over the vocabulary are computed."""
    kept_rows: float = 0.1
    """How often the loss looks at unchanged tokens (z = x): each with this times what it costs a model that
    knows nothing as probability, and weighed up by the inverse. 1 looks at all."""

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise UserError(
                f"unknown weighting '{self.weighting}'{did_you_mean(self.weighting, WEIGHTINGS)}"
            )
        if not 0 < self.kept_rows <= 1:
            raise UserError(f"loss.kept_rows must lie in (0, 1], got {self.kept_rows}")


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank beside frozen weights; train.start (or model.path) says whose these are."""

    rank: int = 0
    """Rank of the adapters; 0 for none: all weights are trained."""
    alpha: float = 16.0
    """What an adapter gives is weighed by alpha/rank."""
    targets: str = "all-linear"
    """The linear layers that get one, by the last part of their names (q_proj,v_proj for LLaDA), separated
    by commas; or all-linear, those of all blocks."""
    dropout: float = 0.0
    """Share of an adapter's inputs that are dropped, in training."""

    def __post_init__(self) -> None:
        if self.rank < 0 or not 0 < self.alpha < math.inf or not 0 <= self.dropout < 1:
            raise UserError(
                "lora.rank must be >= 0, lora.alpha > 0 and lora.dropout in [0, 1), got "
                f"{self.rank}, {self.alpha} and {self.dropout}"
            )


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser, with warm-up, clipping and averaging; the defaults are the paper's."""

    kind: str = "adamw"
    """adamw for all weights; or muon for the matrices in blocks, and AdamW for the rest."""
    lr: float = 3e-4
    """Learning rate after the warm-up."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    warmup: int = 2500
    """Steps of linear warm-up."""
    decay: int = 0
    """Steps of linear decay to zero at the end of the run; 0 keeps the rate constant."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    ema: float = 0.9999
    """Decay of the averaged weights, reached gradually from the start of the run."""

    def __post_init__(self) -> None:
        if self.kind not in (kinds := ("adamw", "muon")):
            raise UserError(f"unknown optim.kind '{self.kind}'{did_you_mean(self.kind, kinds)}")
        for name in ("lr", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(
                    f"optim.{name} must be positive and finite, got {getattr(self, name)}"
                )
        if min(self.warmup, self.decay) < 0 or not 0 <= self.weight_decay < math.inf:
            raise UserError("optim.warmup, optim.decay and optim.weight_decay must be >= 0")
        for name in ("beta1", "beta2", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"optim.{name} must lie in [0, 1), got {getattr(self, name)}")


@dataclass(frozen=True)
class TrainConfig:
    """The run itself."""

    out: str = "runs/default"
    """Folder for checkpoints and logs."""
    start: str | None = None
    """Begin with the weights of this model (a bundled name, a checkpoint or run folder, or LLaDA or a
    transformers model as published), averaged ones if it has them; by default with random ones, or those
    of model.path."""
    steps: int = 1_000_000
    """Optimiser steps."""
    minutes: float | None = None
    """Stop after so many minutes, if that comes first, and save; --resume goes on."""
    batch: int = 512
    """Rows per optimiser step."""
    micro_batch: int = 32
    """Rows that go through the model at a time; gradients add up to the whole batch."""
    seed: int = 0
    """Decides the initial weights, the order of the data and all noise."""
    device: str = "auto"
    """auto, cpu or cuda."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the trunk computes in; auto is bfloat16 on a GPU and float32 elsewhere."""
    parallel: Literal["ddp", "fsdp"] = "ddp"
    """What each of several processes holds: ddp all weights; fsdp a part of them, of the averages and of
    the optimiser's state, for models that one GPU has no room for. One process alone always holds all."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass rather than keep what is inside it: less memory,
    about a third more time."""
    compile: bool = False
    """Compile the trunk with torch.compile."""
    log_every: int = 10
    """Steps between lines of the log."""
    eval_every: int = 5000
    """Steps between validations; 0 for none."""
    eval_rows: int = 256
    """Rows of the validation text that a validation looks at."""
    save_every: int = 5000
    """Steps between checkpoints; 0 for one at the end only."""
    keep: int = 2
    """Checkpoints to keep, the newest ones."""
    keep_every: int = 0
    """Keep those at multiples of this many steps too, however many they are; 0 for none."""
    tensorboard: bool = False
    """Draw the log's curves in TensorBoard too, in the folder tensorboard beside the checkpoints."""
    wandb: str | None = None
    """Draw them in Weights & Biases, in the project of this name (offline with WANDB_MODE=offline)."""

    def __post_init__(self) -> None:
        positive = ("steps", "batch", "micro_batch", "log_every", "eval_rows", "keep")
        for name in positive:
            if getattr(self, name) < 1:
                raise UserError(f"train.{name} must be at least 1, got {getattr(self, name)}")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise UserError(f"train.minutes must be positive, got {self.minutes}")
        if not 0 <= self.seed < 2**31:
            raise UserError(f"train.seed must lie in 0..2^31-1, got {self.seed}")
        if min(self.eval_every, self.save_every, self.keep_every) < 0:
            raise UserError("train.eval_every, train.save_every and train.keep_every must be >= 0")
        if self.keep_every and (not self.save_every or self.keep_every % self.save_every):
            raise UserError(
                f"train.keep_every must be a multiple of train.save_every ({self.save_every}), "
                f"got {self.keep_every}"
            )


@dataclass(frozen=True)
class RunConfig:
    """Everything about a training run."""

    process: ProcessConfig = field(default_factory=ProcessConfig)
    model: ModelConfig = field(default_factory=DiTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        own = self.model.own_vocab()
        if own is not None and self.process.mask_id not in (None, own.mask_id):
            raise UserError(
                f"process.mask_id is {self.process.mask_id}, but the model's mask is {own.mask_id}"
            )
        length = self.model.own_length()
        if length is not None and self.data.length != length:
            raise UserError(
                f"data.length is {self.data.length}, but the model takes rows of {length}"
            )
        if self.data.is_images and self.process.mask_id is not None:
            raise UserError(
                "process.mask_id has no meaning for images: every level is data; remove it"
            )
        if self.lora.rank and not self.start():
            raise UserError("lora needs trained weights to stand beside: give train.start")
        if not self.lora.rank and self.lora != LoraConfig():
            raise UserError("lora has no meaning without a rank; give lora.rank")
        if self.optim.kind == "muon" and self.train.parallel == "fsdp":
            raise UserError("optim.kind muon needs whole matrices: use train.parallel ddp")

    def refuse_idle(self) -> None:
        """Settings that nothing would read. For what people write: a checkpoint may hold an old default."""
        if not self.process.is_autoregressive:
            return
        idle = {
            "loss": ("weighting", "kept_rows"), "model": ("time_conditioning",), "data": ("pairs",),
        }  # fmt: skip
        for section, names in idle.items():
            given = getattr(self, section)
            for name in names:
                if getattr(given, name) != getattr(type(given), name):
                    raise UserError(
                        f"{section}.{name} has no meaning for process.kind '{AUTOREGRESSIVE}'; "
                        "remove it"
                    )

    def start(self) -> str | None:
        """Where the first weights come from; None where they are random."""
        return self.train.start or self.model.start()

    def vocab(self, n_tokens: int) -> Vocab:
        """The state space: the model's own if it brings one, or else that of a tokenizer's tokens."""
        own = self.model.own_vocab()
        if own is None:
            return self.process.vocab(n_tokens)
        if n_tokens > own.size:
            raise UserError(
                f"the tokenizer has {n_tokens} tokens and the model's vocabulary {own.size}: "
                "they do not belong together"
            )
        return own


def load_config(path: str | Path) -> RunConfig:
    """Read a recipe."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UserError(f"no such recipe: {path}") from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: it is not text (UTF-8)") from error
    config = parse_config(text, str(path))
    config.refuse_idle()
    return config


def parse_config(text: str, name: str = "the configuration") -> RunConfig:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"{name} is not YAML: {_gist(error)}") from error
    return from_tree(RunConfig, tree if tree is not None else {}, name)


def _gist(error: yaml.YAMLError) -> str:
    """Where and what, without the excerpt."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    return f"line {error.problem_mark.line + 1}: {error.problem}"


def dump_config(config: RunConfig) -> str:
    """YAML that `parse_config` reads back to an equal configuration; unset options are left out."""
    tree = {
        section: {
            k: v for k, v in values.items() if v is not None or (section, k) == ("data", "val")
        }
        for section, values in dataclasses.asdict(config).items()
    }
    if config.model.kind != DiTConfig.kind:  # which is meant where nothing is said
        tree["model"] = {"kind": config.model.kind, **tree["model"]}
    return yaml.safe_dump(tree, sort_keys=False)


def from_tree(cls: type[T], tree: Any, where: str) -> T:
    """A dataclass from nested dictionaries, strictly."""
    if not isinstance(tree, dict):
        raise UserError(f"{where}: expected a mapping, got {tree!r}")
    hints = {f.name: get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in tree:
        if key not in hints:
            raise UserError(f"{where}: unknown key '{key}'{did_you_mean(str(key), hints)}")
    values = {key: _convert(hints[key], value, f"{where}: {key}") for key, value in tree.items()}
    try:
        return cls(**values)
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(where) else f"{where}: {message}") from error


def _model_from_tree(tree: Any, where: str) -> BackboneConfig:
    """A model of the kind that is named, a DiT if none is; or the name of a preset."""
    if isinstance(tree, str):
        if tree not in PRESETS:
            raise UserError(f"{where}: unknown preset '{tree}'{did_you_mean(tree, PRESETS)}")
        return PRESETS[tree]
    if not isinstance(tree, dict):
        raise UserError(f"{where}: expected a mapping, got {tree!r}")
    kind = tree.get("kind", DiTConfig.kind)
    if kind not in BACKBONES:
        raise UserError(f"{where}: unknown kind '{kind}'{did_you_mean(str(kind), BACKBONES)}")
    shape = {key: value for key, value in tree.items() if key != "kind"}
    return from_tree(BACKBONES[kind].config, shape, where)


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint == ModelConfig:
        return _model_from_tree(value, where)
    if dataclasses.is_dataclass(hint):
        return from_tree(hint, value, where)  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin is Literal:
        if value not in get_args(hint):
            known = [str(choice) for choice in get_args(hint)]
            raise UserError(f"{where}: '{value}' is not allowed{did_you_mean(str(value), known)}")
        return value
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if hint is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        try:  # YAML reads 1e-3 (without a dot) as a string
            return float(value)
        except ValueError:
            pass
    if hint is int and isinstance(value, bool):
        raise UserError(f"{where}: expected int, got {value!r}")
    if not isinstance(value, hint):
        raise UserError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value
