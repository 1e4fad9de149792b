"""LLaDA: parity with the published code, names and shapes of the published weights."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from xdlm.models import LladaConfig, build_denoiser
from xdlm.models.llada import Llada

PARITY = Path(__file__).parents[1] / "parity" / "llada"
SMALL = LladaConfig(
    depth=3, width=32, heads=4, mlp_width=80, vocab_size=96, mask_id=92, context=4096
)


def published() -> tuple[Llada, dict[str, torch.Tensor]]:
    model = Llada(SMALL, SMALL.vocab_size).eval()
    model.load_state_dict(load_file(PARITY / "model.safetensors"), strict=True)
    return model, load_file(PARITY / "outputs.safetensors")


def test_logits_are_those_of_the_published_code() -> None:
    model, outputs = published()
    with torch.no_grad():
        logits = model(outputs["tokens"].long(), torch.zeros(2))
        far = model(outputs["far"].long(), torch.zeros(1))[:, -3:]
    torch.testing.assert_close(logits, outputs["logits"], rtol=0, atol=1e-5)
    torch.testing.assert_close(far, outputs["far_logits"], rtol=0, atol=1e-5)


def test_names_and_shapes_of_the_8b_weights() -> None:
    with torch.device("meta"):
        model = build_denoiser(LladaConfig(), 126464)
    square, wide = (4096, 4096), (12288, 4096)
    block = dict.fromkeys(("q_proj", "k_proj", "v_proj", "attn_out"), square)
    block |= {"ff_proj": wide, "up_proj": wide, "ff_out": wide[::-1]}
    block |= {"attn_norm": (4096,), "ff_norm": (4096,)}
    expected = {f"blocks.{i}.{name}": shape for i in range(32) for name, shape in block.items()}
    expected |= {"wte": (126464, 4096), "ff_out": (126464, 4096), "ln_f": (4096,)}
    found = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert found == {f"model.transformer.{n}.weight": s for n, s in expected.items()}
    assert sum(p.numel() for p in model.parameters()) == 8_015_581_184


def test_padding_changes_nothing() -> None:
    """On either side: positions are relative."""
    model, outputs = published()
    row = outputs["tokens"][:1, :20].long()
    junk = torch.full((1, 5), 7)
    with torch.no_grad():
        alone = model.head(model.trunk(row, torch.zeros(1)))
        for pieces, where in (([row, junk], slice(0, 20)), ([junk, row], slice(5, 25))):
            z = torch.cat(pieces, dim=1)
            padding = torch.ones_like(z, dtype=torch.bool)
            padding[:, where] = False
            padded = model.head(model.trunk(z, torch.zeros(1), padding=padding))[:, where]
            torch.testing.assert_close(padded, alone, rtol=0, atol=1e-4)
