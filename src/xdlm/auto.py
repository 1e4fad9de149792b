"""Our models as transformers has them. Importing this makes them known to its `Auto` classes:

    import xdlm.auto
    from transformers import AutoModel

    model = AutoModel.from_pretrained("LLaDA-8B-Base")   # or a folder that `xdlm export --format hub` wrote
    logits = model(input_ids).logits

Weights have the names that they have in such folders, so that `save_pretrained` writes what `xdlm.load`
reads, once a tokenizer.json lies beside it. No code that lies in a folder is run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xdlm.config import AUTOREGRESSIVE
from xdlm.errors import UserError
from xdlm.models import Denoiser, LladaConfig, build_denoiser, run_trunk
from xdlm.training.folders import llada_config
from xdlm.training.note import ENTRY, read_backbone

try:
    import transformers
    from transformers.modeling_outputs import MaskedLMOutput
except ImportError as error:
    raise UserError("xdlm.auto needs transformers: install xdlm[text]") from error


def _denoiser_of(tree: Mapping[str, Any]) -> Denoiser:
    """With fresh weights, of the shape that a config.json describes."""
    if tree.get("model_type") == LladaConfig.kind:
        shape = llada_config(tree, Path("config.json"))
        return build_denoiser(shape, shape.vocab_size)
    backbone = read_backbone(tree, "config.json")
    causal = tree[ENTRY].get("process", {}).get("kind") == AUTOREGRESSIVE
    return build_denoiser(backbone, tree["vocab_size"], causal=causal)


class LladaHubConfig(transformers.PreTrainedConfig):
    """All keys of a published config.json, as they are."""

    model_type = LladaConfig.kind


class XdlmHubConfig(transformers.PreTrainedConfig):
    model_type = ENTRY


class XdlmForMaskedLM(transformers.PreTrainedModel):
    """A `Denoiser`, its layers under their own names."""

    denoiser: Denoiser
    config_class: Any = XdlmHubConfig
    base_model_prefix = ""
    _no_split_modules = ["Block"]  # noqa: RUF012 (as the base class has it)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        denoiser = _denoiser_of(config.to_dict())
        # Kept out of the modules: the layers are this model's own, and stand in its state once.
        object.__setattr__(self, "denoiser", denoiser)
        for name, child in denoiser.named_children():
            setattr(self, name, child)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        """They come with their own."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.denoiser._apply(fn, recurse)
        return self

    def train(self, mode: bool = True) -> Any:
        self.denoiser.train(mode)
        return super().train(mode)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        times: Tensor | None = None,
        labels: Tensor | None = None,
        **unused: Any,
    ) -> Any:
        """Logits of the clean tokens. `times` [B] are those of the noise, for a model that is told
        them; where `attention_mask` [B, L] is 0 there is no token."""
        if labels is not None:
            raise UserError("a loss needs the noise too: see xdlm.objective, or xdlm train")
        padding = None if attention_mask is None else attention_mask == 0
        if padding is not None and not bool(padding.any()):
            padding = None
        if padding is not None and not self.denoiser.takes_padding:
            raise UserError("this model takes no padding: give it rows of one length")
        if times is None:
            times = torch.zeros(len(input_ids), device=input_ids.device)
        hidden = run_trunk(self.denoiser, input_ids, times, None, padding)
        logits: Any = self.denoiser.head(hidden)
        return MaskedLMOutput(logits=logits)


class LladaForMaskedLM(XdlmForMaskedLM):
    config_class = LladaHubConfig


for _config, _model in ((XdlmHubConfig, XdlmForMaskedLM), (LladaHubConfig, LladaForMaskedLM)):
    transformers.AutoConfig.register(_config.model_type, _config, exist_ok=True)
    for _auto in (transformers.AutoModel, transformers.AutoModelForMaskedLM):
        _auto.register(_config, _model, exist_ok=True)
