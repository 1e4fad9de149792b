"""All sections together, and what they must agree on."""

from __future__ import annotations

from dataclasses import dataclass, field

from xdlm.config.process import AUTOREGRESSIVE, ProcessConfig
from xdlm.config.sections import DataConfig, LoraConfig, LossConfig, OptimConfig, TrainConfig
from xdlm.errors import UserError
from xdlm.models import DiTConfig, ModelConfig
from xdlm.structs import Vocab


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
            raise UserError("lora adapts trained weights: give train.start")
        if not self.lora.rank and self.lora != LoraConfig():
            raise UserError("lora needs a rank: give lora.rank")
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
