"""Make the files beside this one, with the dit.py of the repository of MDLM, UDLM, GIDD or XDLM:

    python make.py REPOSITORY FOLDER_OF_DIT OUT

It needs what that file imports, but for flash-attn, which runs on GPUs alone: the three functions of it
that matter stand here in plain torch.
"""

import importlib.util
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

N_STATES, LENGTH = 37, 11
CONFIG = {
    "model": {"hidden_size": 16, "cond_dim": 8, "n_heads": 2, "n_blocks": 2, "dropout": 0.1,
              "scale_by_sigma": True, "max_seq_len": LENGTH, "length": LENGTH},
    "algo": {"causal_attention": False},
    "training": {"guidance": None},
    "guidance": None,
    "parameterization": "d3pm",
}  # fmt: skip


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [b, s, h, d]"""
    half = cos.shape[-1]
    a, b = x[..., :half], x[..., half : 2 * half]
    cos, sin = cos[None, :, None], sin[None, :, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def rotated_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q, k, v = qkv.unbind(2)
    return torch.stack([rotated(q, cos, sin), rotated(k, cos, sin), v], 2)


def attention(
    qkv: Tensor, ends: Tensor, length: int, dropout: float, causal: bool = False
) -> Tensor:
    """Of rows of one length, one behind the other."""
    n = len(ends) - 1
    q, k, v = (x.reshape(n, length, *x.shape[1:]).transpose(1, 2) for x in qkv.unbind(1))
    seen = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return seen.transpose(1, 2).reshape(n * length, *qkv.shape[2:])


def pretend_flash_attention() -> None:
    names = ("flash_attn", "flash_attn.layers", "flash_attn.layers.rotary")
    package, layers, rotary = modules = [types.ModuleType(name) for name in names]
    inside = types.ModuleType("flash_attn.flash_attn_interface")
    inside.flash_attn_varlen_qkvpacked_func = attention
    rotary.apply_rotary_emb_qkv_, rotary.apply_rotary_emb_torch = rotated_qkv, rotated
    package.layers, layers.rotary, package.flash_attn_interface = layers, rotary, inside
    sys.modules.update(zip(names, modules, strict=True))


repository, folder, out = sys.argv[1], *map(Path, sys.argv[2:])
if repository != "gidd":
    pretend_flash_attention()
spec = importlib.util.spec_from_file_location("dit", folder / "dit.py")
dit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dit)
torch.manual_seed(0)
model = dit.DIT(CONFIG, N_STATES).eval()
with torch.no_grad():
    for parameter in model.parameters():  # much of a DiT begins at zero
        parameter.add_(0.3 * torch.randn_like(parameter))
    z, t = torch.randint(0, N_STATES, (2, LENGTH)), torch.tensor([0.2, 0.9])
    # What a model is told: nothing, but the time in GIDD and the noise level in UDLM.
    told = {"gidd": t, "udlm": -torch.log1p((1e-3 - 1) * t)}.get(repository, torch.zeros(2))
    logits = model(z, told).float()
weights = {name: value.contiguous() for name, value in model.state_dict().items()}
save_file(weights, out / f"{repository}.safetensors")
save_file({"z": z.int(), "t": t, "logits": logits}, out / f"{repository}-outputs.safetensors")
