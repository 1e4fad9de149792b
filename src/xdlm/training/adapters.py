"""LoRA (Hu et al. 2021) through peft: small trained matrices beside frozen weights, in a model's blocks."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from xdlm.config import LoraConfig
from xdlm.errors import UserError, did_you_mean
from xdlm.files import atomic_folder
from xdlm.models import Denoiser
from xdlm.training.blocks import blocks_of
from xdlm.training.tensors import save_tensors

#: What peft calls the layer that an adapter stands beside.
_BASE = ".base_layer"
#: And how it calls the adapter's own matrices, in the layer.
_ADAPTER = ".lora_"


def add_adapters(denoiser: Denoiser, config: LoraConfig) -> None:
    """Freeze a model, and give adapters to the linear layers in its blocks that are asked for. An untrained
    adapter changes nothing."""
    peft = _peft()
    names = _targets(denoiser, config)
    denoiser.requires_grad_(False)
    denoiser.replayable = False  # what an adapter drops is not drawn as a recording needs it
    lora = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, target_modules=names
    )
    peft.inject_adapter_in_model(lora, denoiser)


def merge_adapters(denoiser: Denoiser) -> None:
    """Add what adapters do to the weights beside them, and take them away."""
    _peft()
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [(name, m) for name, m in denoiser.named_modules() if isinstance(m, BaseTunerLayer)]
    for name, layer in layers:
        layer.merge(safe_merge=True)
        parent, _, own = name.rpartition(".")
        setattr(denoiser.get_submodule(parent), own, layer.get_base_layer())


def write_adapters(
    folder: Path,
    denoiser: Denoiser,
    config: LoraConfig,
    *,
    base: str,
    card: str,
    dtype: torch.dtype,
) -> None:
    """The adapters alone, as peft has them: `PeftModel.from_pretrained(base_model, folder)` puts them
    beside the weights that they were trained with, under the names that these have in transformers."""
    adapters = {
        name.removeprefix("lm.").replace(".default.", "."): p.detach().cpu().to(dtype)
        for name, p in denoiser.named_parameters()
        if _ADAPTER in name
    }
    lora = _peft().LoraConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=config.dropout, inference_mode=True,
        target_modules=sorted({name.partition(_ADAPTER)[0] for name in adapters}),
        base_model_name_or_path=base,
    )  # fmt: skip
    tensors = {f"base_model.model.{name}": tensor for name, tensor in adapters.items()}
    with atomic_folder(folder) as scratch:
        lora.save_pretrained(scratch)
        save_tensors(tensors, scratch / "adapter_model.safetensors")
        (scratch / "README.md").write_text(card, encoding="utf-8")


def trained_parameters(denoiser: nn.Module) -> dict[str, nn.Parameter]:
    """Those that are not frozen."""
    return {name: p for name, p in denoiser.named_parameters() if p.requires_grad}


def frozen_parameters(denoiser: nn.Module) -> dict[str, nn.Parameter]:
    """The others, under the names that they have in a model without adapters."""
    return {
        name.replace(_BASE, ""): p for name, p in denoiser.named_parameters() if not p.requires_grad
    }


def _targets(denoiser: Denoiser, config: LoraConfig) -> list[str]:
    """Full names, of layers in blocks alone: the head is not run as a layer."""
    blocks = {id(module) for block in blocks_of(denoiser) for module in block.modules()}
    linear = [
        name
        for name, module in denoiser.named_modules()
        if id(module) in blocks and type(module).__name__ in ("Linear", "Conv1D")
    ]
    known = sorted({name.rpartition(".")[2] for name in linear})
    if config.targets == "all-linear":
        return linear
    wanted = [target.strip() for target in config.targets.split(",")]
    for target in wanted:
        if target not in known:
            raise UserError(
                f"lora.targets: the model's blocks have no '{target}'{did_you_mean(target, known)}"
            )
    return [name for name in linear if name.rpartition(".")[2] in wanted]


def _peft():  # type: ignore[no-untyped-def]
    try:
        import peft
    except ImportError as error:
        raise UserError("lora needs peft: install xdlm[text]") from error
    return peft
