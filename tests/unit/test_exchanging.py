"""Memory of prompts and finished blocks for transformers models: exact where it should be, else near."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoding import COLD, PROCESS, N, refreshed, with_room
from torch import Tensor

from xdlm import UserError
from xdlm.models import PretrainedConfig
from xdlm.models.pretrained import Pretrained
from xdlm.sampling import ConfidenceConfig, decode
from xdlm.sampling.memory import Memory

transformers = pytest.importorskip("transformers")

SHAPE = {"vocab_size": N, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2,
         "max_position_embeddings": 64}  # fmt: skip
MODELS = {
    "llama": lambda n: transformers.LlamaConfig(
        **SHAPE, num_hidden_layers=n, num_key_value_heads=1
    ),
    "gpt2": lambda n: transformers.GPT2Config(
        vocab_size=N, n_embd=16, n_layer=n, n_head=2, n_positions=64
    ),
    "bert": lambda n: transformers.BertConfig(**SHAPE, num_hidden_layers=n),
    "roberta": lambda n: transformers.RobertaConfig(**SHAPE, num_hidden_layers=n, pad_token_id=1),
}


def make(name: str, depth: int, *, shift: bool = False) -> Pretrained:
    shape = MODELS[name](depth)
    masked = "ForMaskedLM" if name in ("bert", "roberta") else ""
    shape.architectures = [f"Some{masked}"]
    # The mask is one of the tokens, as `PROCESS` has it.
    config = PretrainedConfig(architecture=shape.to_json_string(), shift=shift, mask_id=7)
    model = Pretrained(config, N).double().eval()
    torch.manual_seed(depth)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_exact_where_it_should_be(name: str, shift: bool) -> None:
    """Anew in every step; or one layer deep, where what others show depends on their tokens alone."""
    for depth, refresh in ((2, 1), (1, 2), (1, 100)):
        model = make(name, depth, shift=shift)
        plain = refreshed(model, None)
        assert torch.equal(plain.tokens, refreshed(model, refresh).tokens)


@pytest.mark.parametrize("name", ["llama", "bert"])
@torch.no_grad()
def test_memory_is_an_approximation_elsewhere(name: str) -> None:
    model = make(name, 3, shift=name == "llama")
    z = torch.randint(8, N, (2, 24), generator=torch.Generator().manual_seed(0))
    memory, span, t, rows = Memory(model, 100), slice(9, 16), torch.zeros(2), torch.arange(2)

    def apart(z: Tensor) -> float:
        return float((memory.hidden(z, t, rows, span) - model.trunk(z, t)[:, span]).abs().max())

    assert apart(z) == 0 and apart(z) < 1e-9, "nothing has changed yet"
    z[:, 10] = 3
    assert apart(z) > 1e-6


def test_a_stretch_costs_what_it_is_long() -> None:
    model = make("llama", 2, shift=True)
    seen: list[int] = []
    model.lm.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(inputs[0].shape[1])
    )
    given, frozen = with_room(torch.zeros(1, 4, dtype=torch.int64), 16)
    config = ConfidenceConfig(steps=8, block_length=8, refresh=3, filter=COLD)
    decode(model, PROCESS, given=given, frozen=frozen, config=config)
    assert seen[3:] == [20, 9, 9, 20] * 2, "one more than a block: the state before it is needed"
    assert seen[:3] == [8, 8, 4], "once, to see that it can be done"


def test_noise_that_is_a_padding_token_moves_nothing() -> None:
    """RoBERTa numbers the tokens that are no padding; under noise any token may stand anywhere."""
    model = make("roberta", 1)
    z = torch.full((1, 6), 9)
    with torch.no_grad():
        z[0, 2] = 1
        swapped = model.trunk(z, torch.zeros(1))
        embedded = model.lm.roberta.embeddings(input_ids=z, position_ids=torch.arange(2, 8)[None])
        encoded = model.lm.roberta.encoder(embedded).last_hidden_state
        expected = model.lm.lm_head(encoded)
    torch.testing.assert_close(swapped, expected)


def test_a_published_model_says_nothing_of_it(tmp_path: Path) -> None:
    model = make("llama", 1)
    nothing = torch.zeros(1, 4, dtype=torch.int64)
    config = ConfidenceConfig(steps=4, refresh=2)
    decode(model, PROCESS, given=nothing, frozen=nothing.bool(), config=config)
    model.write(tmp_path)
    assert "xdlm" not in (tmp_path / "config.json").read_text()


def test_windows_are_refused() -> None:
    """A model whose positions see a window alone: where it lies among other keys, nobody knows."""
    shape = transformers.MistralConfig(
        **SHAPE, num_hidden_layers=1, num_key_value_heads=1, sliding_window=4
    )
    shape.architectures = ["MistralForCausalLM"]
    model = Pretrained(PretrainedConfig(architecture=shape.to_json_string(), mask_id=7), N).eval()
    given, frozen = with_room(torch.zeros(1, 4, dtype=torch.int64), 16)
    config = ConfidenceConfig(steps=8, block_length=8, refresh=3)
    with pytest.raises(UserError, match="mistral model cannot be run on a part of a row"):
        decode(model, PROCESS, given=given, frozen=frozen, config=config)
