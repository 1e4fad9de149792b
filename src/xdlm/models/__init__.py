"""Denoisers."""

from collections.abc import Callable
from typing import NamedTuple

from xdlm.models.contract import BackboneConfig, Denoiser
from xdlm.models.dit import PRESETS, DiT, DiTConfig
from xdlm.models.graphed import run_body, run_trunk
from xdlm.models.heads import drawing_head, head_stats
from xdlm.models.level_dit import LevelDiT, LevelDiTConfig
from xdlm.models.llada import Llada, LladaConfig
from xdlm.models.pretrained import Pretrained, PretrainedConfig
from xdlm.models.unet import UNet, UNetConfig

#: What describes a backbone; the choice is the recipe's (`model: {kind: ...}`).
ModelConfig = DiTConfig | LevelDiTConfig | LladaConfig | PretrainedConfig | UNetConfig


class Backbone(NamedTuple):
    """A kind of model: what describes it, and what builds it."""

    config: type[BackboneConfig]
    build: Callable[..., Denoiser]


#: Kinds by name. A new backbone is one class, its configuration, a place in `ModelConfig` and a line here.
BACKBONES: dict[str, Backbone] = {
    DiTConfig.kind: Backbone(DiTConfig, DiT),
    LevelDiTConfig.kind: Backbone(LevelDiTConfig, LevelDiT),
    LladaConfig.kind: Backbone(LladaConfig, Llada),
    PretrainedConfig.kind: Backbone(PretrainedConfig, Pretrained),
    UNetConfig.kind: Backbone(UNetConfig, UNet),
}


def build_denoiser(config: ModelConfig, vocab_size: int, *, causal: bool = False) -> Denoiser:
    """The backbone that a configuration describes, with fresh weights."""
    return BACKBONES[config.kind].build(config, vocab_size, causal=causal)


__all__ = [
    "BACKBONES",
    "PRESETS",
    "Denoiser",
    "DiT",
    "DiTConfig",
    "LevelDiTConfig",
    "LladaConfig",
    "ModelConfig",
    "PretrainedConfig",
    "UNet",
    "UNetConfig",
    "build_denoiser",
    "drawing_head",
    "head_stats",
    "run_body",
    "run_trunk",
]
