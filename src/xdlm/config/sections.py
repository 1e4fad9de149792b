"""What a run reads and how it trains: the sections of a recipe beside process and model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from xdlm.errors import UserError, did_you_mean
from xdlm.objective import WEIGHTINGS


@dataclass(frozen=True)
class DataConfig:
    """Text and how it is cut, or images."""

    train: str = "corpus:train"
    """Training text: corpus:train, a corpus of the papers (openwebtext:train), a file, or a folder of
    files or of shards that `xdlm prepare` made. Images: cifar10:train, a file of them, a folder with a
    folder for each class or without classes, or one of codes that `xdlm prepare imagenet` made."""
    val: str | None = "corpus:heldout"
    """Validation text, in the same forms; None to skip validation."""
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
    """elbo, the bound's own weights, or GIDD's clipped or dynamic ones. In small trials models of text
    learnt faster under dynamic, and those of pixels under elbo; evaluation is of the bound in any case."""
    impl: Literal["auto", "eager", "chunked", "fused"] = "auto"
    """How the head and the sums over the vocabulary are computed."""
    kept_rows: float = 0.1
    """How often training looks at tokens that noise left unchanged: each is kept with a probability of
    about this times its loss under a uniform prediction (but no less than the probability that it is noise
    after all), and weighted by the inverse, so that the loss stays unbiased. 1 keeps all."""

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
    """Decay of the averaged weights, reached gradually from the start of the run; 0 averages nothing, and
    takes no memory."""

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
