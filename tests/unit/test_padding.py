"""Prompts of unequal lengths in one batch: every row comes out as it does alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from xdlm import UserError, Vocab
from xdlm.evaluation.conditional import Question, conditional_likelihood
from xdlm.models import Denoiser, DiT, DiTConfig, PretrainedConfig
from xdlm.models.llada import Llada, LladaConfig
from xdlm.models.pretrained import Pretrained
from xdlm.noise import Mixed
from xdlm.sampling import ConfidenceConfig, Filter, SamplerConfig, decode, sample, write
from xdlm.sampling.grouping import group_rows
from xdlm.sampling.writing import Config

N, MASK, NEW = 23, 22, 12
PROCESS = Mixed(Vocab(N, MASK), k=0.3)
#: Drawn from flat enough laws, so that texts differ and ends are met.
WARM = Filter(temperature=3.0)
CONFIGS: dict[str, Config] = {
    "confidence": ConfidenceConfig(
        steps=6, k=0.3, block_length=4, guidance=1.5, filter=WARM
    ),
    "ancestral": SamplerConfig(steps=5, filter=WARM),
    "dense": SamplerConfig(steps=5, filter=WARM, impl="dense"),
}  # fmt: skip
SHAPE = {"vocab_size": N - 1, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
         "num_attention_heads": 2, "max_position_embeddings": 64}  # fmt: skip


def wrapped(name: str) -> Pretrained:
    transformers = pytest.importorskip("transformers")
    shape = {
        "llama": lambda: transformers.LlamaConfig(**SHAPE),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=N - 1, n_embd=16, n_layer=2, n_head=2, n_positions=64
        ),
        "bert": lambda: transformers.BertConfig(**SHAPE),
    }[name]()
    shape.architectures = ["BertForMaskedLM" if name == "bert" else "Other"]
    config = PretrainedConfig(architecture=shape.to_json_string(), shift=name == "llama")
    return Pretrained(config, N)


def make(name: str) -> Denoiser:
    """In float64: what is compared differs by more than rounding or not at all."""
    torch.manual_seed(0)
    model: Denoiser
    if name == "llada":
        shape = LladaConfig(depth=2, width=16, heads=2, mlp_width=24, vocab_size=N, mask_id=MASK)
        model = Llada(shape, N)
    else:
        model = wrapped(name)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


def prompts(*lengths: int) -> list[list[int | None]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, N - 1, (n,), generator=generator).tolist() for n in lengths]
    return [[*prompt, *[None] * NEW] for prompt in drawn]


@pytest.mark.parametrize("how", CONFIGS)
@pytest.mark.parametrize("name", ["llada", "llama", "gpt2", "bert"])
def test_a_row_is_the_same_alone_and_beside_longer_ones(name: str, how: str) -> None:
    model, rows = make(name), prompts(9, 6, 8, 6, 9)
    stops = (3, 4, 5, 11) if how == "confidence" else (3,)
    args: dict[str, Any] = {"config": CONFIGS[how], "seed": 5, "stop_ids": stops}
    (part,) = write(model, PROCESS, rows, **args)
    assert part.sample.tokens.shape == (5, 9 + NEW), "all in one batch"
    ended = []
    for i, row in enumerate(part.rows):
        (alone,) = write(model, PROCESS, [rows[row]], index=[row], **args)
        length, end = len(rows[row]), int(part.sample.ends[i])
        assert part.sample.tokens[i, :length].tolist() == alone.sample.tokens[0].tolist()
        assert (end, int(part.sample.nfe[i])) == (int(alone.sample.ends), int(alone.sample.nfe))
        given = [token for token in rows[row] if token is not None]
        assert part.sample.tokens[i, : len(given)].tolist() == given
        ended.append(end < length)
    assert True in ended or how != "confidence"


@pytest.mark.parametrize("name", ["llada", "llama"])
def test_what_stands_in_the_padding_plays_no_part(name: str) -> None:
    model = make(name)
    given = torch.randint(0, N - 1, (2, 20), generator=torch.Generator().manual_seed(2))
    padding = torch.zeros(2, 20, dtype=torch.bool)
    padding[1, 16:] = True
    frozen = torch.zeros_like(padding)
    frozen[0, :8] = frozen[1, :4] = True
    frozen |= padding
    config = ConfidenceConfig(steps=4, k=0.3, filter=WARM)

    def written(junk: int) -> Tensor:
        tokens = given.masked_fill(padding, junk)
        out = decode(model, PROCESS, given=tokens, frozen=frozen, padding=padding, config=config)
        return out.tokens.masked_fill(padding, 0)

    assert torch.equal(written(1), written(7))


@pytest.mark.parametrize("name", ["llada", "llama"])
def test_likelihoods_are_the_same_alone_and_beside_longer_ones(name: str) -> None:
    model = make(name)
    drawn = torch.randint(0, N - 1, (5, 12), generator=torch.Generator().manual_seed(3)).tolist()
    questions = [
        Question(tuple(row[:n]), tuple(row[n:stop]))
        for row, (n, stop) in zip(drawn, ((4, 12), (4, 9), (0, 10), (8, 11), (5, 12)), strict=True)
    ]
    seen: list[int] = []
    trunk = model.trunk
    model.trunk = lambda z, *rest, **more: (seen.append(len(z)), trunk(z, *rest, **more))[1]  # type: ignore[method-assign]
    together = conditional_likelihood(model, PROCESS, questions, draws=3)
    assert set(seen) == {5}, "all in one batch"
    for one, question in zip(together, questions, strict=True):
        (alone,) = conditional_likelihood(model, PROCESS, [question], draws=3)
        assert one.log_p == pytest.approx(alone.log_p, rel=1e-9)
        assert one.stderr == pytest.approx(alone.stderr, rel=1e-6)


def test_groups_have_as_many_holes_and_little_padding() -> None:
    lengths, holes = [20, 112, 19, 20, 102, 18, 2, 3], [12] * 6 + [1] * 2

    def groups(tokens: int, *, padded: bool) -> list[list[int]]:
        return group_rows(lengths, tokens, padded=padded, kinds=holes)

    assert groups(1000, padded=True) == [[1, 4], [0, 3, 2, 5], [7], [6]]
    assert groups(1000, padded=False) == [[1], [4], [0, 3], [2], [5], [7], [6]]
    assert groups(45, padded=True) == [[1], [4], [0, 3], [2, 5], [7], [6]]
    assert group_rows([], 10, padded=True) == []
    assert group_rows([18, 18], 100, padded=True, kinds=[1, 2]) == [[0], [1]]


def test_padding_that_cannot_be_is_said() -> None:
    model = make("llada")
    given = torch.zeros(2, 6, dtype=torch.int64)
    frozen = torch.zeros(2, 6, dtype=torch.bool)
    frozen[0, 0] = frozen[1, -1] = True
    behind = frozen.clone()
    behind[0, 0] = False
    args: dict[str, Any] = {"given": given, "frozen": frozen}
    dit = DiT(DiTConfig(depth=1, width=8, heads=1, cond_width=4), N)
    refresh = ConfidenceConfig(steps=2, refresh=2)
    guided = ConfidenceConfig(steps=2, guidance=2.0)
    cases = (
        (lambda: decode(dit, PROCESS, padding=behind, **args), "takes no padding"),
        (lambda: decode(model, PROCESS, padding=frozen, **args), "stands behind the tokens"),
        (lambda: decode(model, PROCESS, padding=~behind, **args), "stands behind the tokens"),
        (lambda: decode(model, PROCESS, padding=behind, config=refresh, **args), "no padding"),
        (lambda: decode(model, PROCESS, padding=behind, config=guided, **args), "needs a prompt"),
        (lambda: sample(model, PROCESS, batch=2, length=6, padding=behind), "go together"),
    )
    for call, says in cases:
        with pytest.raises(UserError, match=says):
            call()
