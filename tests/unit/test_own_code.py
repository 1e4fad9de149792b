"""What people's own code around the library runs into: models in training mode, autocast, wrong shapes and
orders, tokens that cannot be, and numbers that are none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from xdlm import UserError, Vocab, load
from xdlm.blanks import BlankRule
from xdlm.data import Rows, TokensInMemory
from xdlm.evaluation import likelihood, row_bounds
from xdlm.models import Denoiser
from xdlm.noise import Cosine, Gidd, Masked, Mixed, Uniform
from xdlm.objective import nelbo, step_kl
from xdlm.ops import categorical, forbid, row_stats
from xdlm.sampling import (
    ConfidenceConfig,
    SamplerConfig,
    ancestral_step,
    decode,
    dense_step,
    sample,
)
from xdlm.training.parallel import World

N = 11
PROCESS = Mixed(Vocab(N, mask_id=N - 1), k=0.1)


class Own(Denoiser):
    """With dropout, and modules of both modes."""

    def __init__(self, n_states: int = N) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(n_states, 16), nn.Linear(16, n_states)
        self.dropout, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5)
        self.train()
        self.frozen.eval()

    def trunk(self, z: Tensor, t: Tensor, label: Tensor | None = None) -> Tensor:
        seen = self.frozen(self.dropout(self.embed(z)))
        return seen + seen.mean(1, keepdim=True)

    @property
    def head_weight(self) -> Tensor:
        return self.out.weight

    @property
    def head_bias(self) -> Tensor:
        return self.out.bias


def some(b: int = 3, length: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randint(0, N - 1, (b, length), generator=g)
    return torch.randn(b, length, N, generator=g), x, PROCESS.corrupt(x, 0.5, generator=g)


class AloneIn(World):
    """One of several processes, of which no other is there."""

    def collect(self, found: object) -> NoReturn:
        raise ConnectionError("nobody answers")


def text(tokens: list[int]) -> Rows:
    return Rows(TokensInMemory(np.array(tokens, dtype=np.uint16), len(tokens), 1), 8)


def test_a_model_in_training_is_asked_without_dropout_and_goes_on() -> None:
    model, rows = Own(), text([i % 10 for i in range(40)])
    holes = torch.zeros(2, 6, dtype=torch.int64)

    def asked() -> list[object]:
        drawn = [
            sample(model, PROCESS, batch=2, length=6, config=SamplerConfig(8)),
            decode(model, PROCESS, given=holes, frozen=holes > 0, config=ConfidenceConfig(4)),
        ]
        return [*(each.tokens.tolist() for each in drawn), likelihood(model, PROCESS, rows).value]

    found = asked()
    assert model.training and model.dropout.training and not model.frozen.training
    assert asked() == found
    model.eval()
    assert asked() == found and not model.training


def test_several_draws_in_a_pass_are_the_same_draws() -> None:
    model, (_, x, _) = Own().eval(), some(2)
    even = torch.rand(2, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    index = torch.tensor([4, 9])
    alone, many = (
        row_bounds(model, PROCESS, x, index, even, seed=5, at_once=n).detach() for n in (1, 3)
    )
    torch.testing.assert_close(alone, many, rtol=1e-5, atol=1e-6)


def test_every_process_takes_as_many_passes_as_the_others() -> None:
    """A sharded trunk meets the others in each: also where one has the last and smallest batch."""
    counts = []
    for rank in (0, 1):
        model, passes = Own().eval(), []
        model.embed.register_forward_hook(lambda *_, to=passes: to.append(1))
        world = AloneIn(rank, 2)
        with pytest.raises(ConnectionError):
            likelihood(model, PROCESS, text([1] * (8 * 5 + 3)), batch=4, draws=3, world=world)
        counts.append(len(passes))
    assert counts[0] == counts[1] > 0


def test_logits_are_float32_under_autocast() -> None:
    model, (_, x, z) = Own().eval(), some()
    hidden, log_c = model.trunk(z, torch.ones(3)), torch.zeros(x.shape)
    for impl in ("eager", "chunked"):
        args = (hidden, model.head_weight, model.head_bias, x, z, log_c)
        expected = row_stats(*args, mask_id=N - 1, impl=impl)
        with torch.autocast("cpu", torch.bfloat16):
            found = row_stats(*args, mask_id=N - 1, impl=impl)
            assert model.head(hidden).dtype == torch.float32
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert model.to("meta").head(hidden.to("meta")).shape == (3, 5, N)  # as counters of FLOPs do


def test_shapes_that_do_not_go_together_get_one_line() -> None:
    logits, x, z = some()
    for call in (
        lambda: nelbo(PROCESS, logits, x[:1], z[:1], 0.5),
        lambda: nelbo(PROCESS, logits, x, z[:, :2], 0.5),
        lambda: step_kl(PROCESS, logits[:1], x, z, 0.2, 0.5),
        lambda: ancestral_step(PROCESS, logits, z[:1], 0.2, 0.5),
        lambda: dense_step(PROCESS, logits[0], z, 0.2, 0.5),
        lambda: PROCESS.posterior(logits.softmax(-1), z[:, :1], 0.2, 0.5),
    ):
        with pytest.raises(UserError, match="go with tokens of shape"):
            call()
    with pytest.raises(UserError, match=r"times of shape \[5\] for tokens of shape \[3, 5\]"):
        nelbo(PROCESS, logits, x, z, torch.rand(5))
    nelbo(PROCESS, logits, x, z, torch.rand(3, 5))  # one for each position


def test_steps_go_down() -> None:
    logits, x, z = some()
    for call in (
        lambda: step_kl(PROCESS, logits, x, z, 0.9, 0.5),
        lambda: ancestral_step(PROCESS, logits, z, 0.9, 0.5),
        lambda: dense_step(PROCESS, logits, z, 0.9, 0.5),
        lambda: PROCESS.posterior(logits.softmax(-1), z, 0.9, 0.5),
    ):
        with pytest.raises(UserError, match="s must be smaller than t"):
            call()


def test_a_posterior_leaves_special_tokens_out() -> None:
    logits, _, z = some()
    logits[..., N - 1] = 8.0
    q = PROCESS.posterior(logits.softmax(-1), z, 0.2, 0.5)
    clean = forbid(logits, PROCESS.special_ids).softmax(-1)
    torch.testing.assert_close(q, PROCESS.posterior(clean, z, 0.2, 0.5), rtol=1e-5, atol=1e-7)
    assert PROCESS.posterior(logits.softmax(-1), z, 0.0, 0.5)[..., N - 1].max() == 0
    masks_alone = torch.zeros_like(logits).index_fill(-1, torch.tensor(N - 1), 1.0)
    for probs in (logits, masks_alone):
        with pytest.raises(UserError, match="take the softmax"):
            PROCESS.posterior(probs, z, 0.2, 0.5)


def test_data_with_a_mask_in_it_is_refused() -> None:
    logits, x, z = some()
    x[1, 2] = N - 1
    for call in (
        lambda: nelbo(PROCESS, logits, x, z, 0.5),
        lambda: step_kl(PROCESS, logits, x, z, 0.2, 0.5),
        lambda: likelihood(Own(), PROCESS, text([1, 2, N - 1, 3, 4, 5, 6, 7, 8])),
    ):
        with pytest.raises(UserError, match=rf"the data holds token {N - 1} \(at .*special"):
            call()
    x[1, 2] = N
    with pytest.raises(
        UserError, match=rf"the data holds tokens 1..{N}, the vocabulary 0..{N - 1}"
    ):
        nelbo(PROCESS, logits, x, z, 0.5)


def test_tokens_that_are_none_are_refused_everywhere() -> None:
    logits, x, z = some()
    clean = (
        lambda x: PROCESS.corrupt(x, 0.5),
        lambda x: nelbo(PROCESS, logits, x, z, 0.5),
        lambda x: step_kl(PROCESS, logits, x, z, 0.2, 0.5),
    )
    noisy = (
        lambda z: nelbo(PROCESS, logits, x, z, 0.5),
        lambda z: step_kl(PROCESS, logits, x, z, 0.2, 0.5),
        lambda z: ancestral_step(PROCESS, logits, z, 0.2, 0.5),
        lambda z: dense_step(PROCESS, logits, z, 0.2, 0.5),
        lambda z: PROCESS.posterior(logits.softmax(-1), z, 0.2, 0.5),
    )
    for calls, tokens, what in ((clean, x, "the data"), (noisy, z, "the noisy text")):
        for call in calls:
            for wrong in (-1, N):
                with pytest.raises(UserError, match=rf"{what} holds tokens .*0\.\.{N - 1}"):
                    call(tokens.index_fill(1, torch.tensor([2]), wrong))
            with pytest.raises(UserError, match=rf"{what} must be int64 or int32, .*\.long"):
                call(tokens.float())
    for call in clean:
        with pytest.raises(UserError, match="special to the noise"):
            call(x.index_fill(1, torch.tensor([2]), N - 1))
    with pytest.raises(UserError, match="must be a tensor of tokens, got list"):
        PROCESS.corrupt([[1, 2]], 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing_stays_nothing(shape: tuple[int, int]) -> None:
    x, logits = torch.zeros(shape, dtype=torch.int64), torch.zeros(*shape, N)
    for found in (
        PROCESS.corrupt(x, 0.5),
        nelbo(PROCESS, logits, x, x, 0.5),
        step_kl(PROCESS, logits, x, x, 0.2, 0.5),
        ancestral_step(PROCESS, logits, x, 0.2, 0.5),
    ):
        assert found.shape == shape


@pytest.mark.parametrize("kind", [Masked, Gidd, Mixed])
def test_losses_of_all_pairs_are_numbers(kind) -> None:
    """Also of those that noise cannot make, so that an expectation over all pairs gives them no weight."""
    process, (logits, x, _) = kind(PROCESS.vocab), some()
    other, mask = (x + 1) % (N - 1), torch.full_like(x, N - 1)
    for z in (x, other, mask):
        assert nelbo(process, logits, x, z, 0.5).isfinite().all()
        assert step_kl(process, logits, x, z, 0.2, 0.5).isfinite().all()
    if kind is Masked:
        assert not nelbo(process, logits, x, other, 0.5).any()


def test_parts_of_a_process_of_another_kind_are_refused() -> None:
    for kind in (Masked, Uniform, Mixed, Gidd):
        with pytest.raises(UserError, match=r"such as Vocab\(101, mask_id=100\), got 101"):
            kind(101)
        for t in (2.0, -0.1, math.nan):
            with pytest.raises(UserError, match="times must lie in"):
                kind(PROCESS.vocab).corrupt(torch.zeros(1, 2, dtype=torch.int64), t)
            with pytest.raises(UserError, match="times must lie in"):
                kind(PROCESS.vocab).bridge(0.5, t)
    with pytest.raises(UserError, match="the mixing ratio k must be a number, got 'a'"):
        Mixed(PROCESS.vocab, k="a")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="p_uniform must be a number, got None"):
        Gidd(PROCESS.vocab, p_uniform=None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a shape such as \(4, 128\)"):
        PROCESS.prior(4)  # type: ignore[arg-type]
    assert Mixed(PROCESS.vocab, k=np.float32(0.5)).k == 0.5
    assert PROCESS.prior([2, 3]).shape == PROCESS.prior(torch.Size((2, 3))).shape == (2, 3)


@pytest.mark.parametrize("process", [PROCESS, Masked(PROCESS.vocab), Gidd(PROCESS.vocab)])
@pytest.mark.parametrize("t", [0.0, 1.0])
def test_the_loss_is_finite_at_both_ends_of_time(process, t: float) -> None:
    logits, x, _ = some()
    z = process.corrupt(x, t, generator=torch.Generator().manual_seed(0))
    assert nelbo(process, logits, x, z, t).isfinite().all()


def test_predictions_that_are_no_numbers_are_refused() -> None:
    for row in ([math.nan, 1.0], [-math.inf, -math.inf], [math.inf, 0.0]):
        with pytest.raises(UserError, match="not numbers"):
            categorical(torch.tensor([row]), torch.tensor([0.5]))
    model = Own().eval()
    nn.init.constant_(model.out.weight, math.nan)
    with pytest.raises(UserError, match="not numbers"):
        sample(model, PROCESS, batch=2, length=6)


def test_a_model_of_another_vocabulary_is_refused() -> None:
    holes = torch.zeros(2, 6, dtype=torch.int64)
    for call in (
        lambda model: sample(model, PROCESS, batch=2, length=6),
        lambda model: decode(model, PROCESS, given=holes, frozen=holes > 0),
        lambda model: likelihood(model, PROCESS, text(list(range(10)))),
    ):
        for size in (N - 1, N + 1):
            with pytest.raises(
                UserError, match=f"predicts {size} states, the noise process has {N}"
            ):
                call(Own(size))
    with pytest.raises(UserError, match="a length of at least 1"):
        sample(Own(), PROCESS, batch=2, length=0)
    with pytest.raises(UserError, match="an index for each"):
        sample(Own(), PROCESS, batch=2, length=3, index=torch.arange(3))


def test_objects_say_what_they_are() -> None:
    assert (
        repr(PROCESS) == "Mixed(Vocab(size=11, mask_id=10), k=0.1, schedule=LogLinear(eps=0.001))"
    )
    several = Mixed(PROCESS.vocab, k=0.1, mu={10: 0.6, 3: 0.3})
    assert "k=0.1, mu={10: 0.6, 3: 0.3}, schedule=LogLinear" in repr(several)
    assert repr(Gidd(PROCESS.vocab)) == "Gidd(Vocab(size=11, mask_id=10), p_uniform=0.1, gamma=1.0)"
    said = repr(load("pocket-mdlm", device="cpu"))
    assert said.startswith("Model(Masked(Vocab(") and said.endswith("ema weights of step 10,000)")


def test_arguments_of_another_kind_are_taken_or_refused_in_one_line(tmp_path: Path) -> None:
    assert Vocab(np.int64(N), np.int32(3)) == Vocab(N, 3)
    with pytest.raises(UserError, match="must be an integer"):
        Vocab(10.0)
    for schedule in ("cosine", Cosine):
        with pytest.raises(UserError, match=r"such as Cosine\(\)"):
            Masked(PROCESS.vocab, schedule=schedule)
    model = load("pocket-mdlm", device=torch.device("cpu"))
    with pytest.raises(UserError, match=r"unknown precision 'torch\.float16'"):
        load("pocket", precision=torch.float16)
    with pytest.raises(UserError, match="banned takes a list"):
        model.sample(1, steps=1, length=4, banned=" the")
    with pytest.raises(UserError, match="choices takes a list"):
        model.infill("The <mask:2>.", blanks=[BlankRule(choices="old king")])
    with pytest.raises(UserError, match="blanks takes a list"):
        model.infill("The <mask:2>.", blanks=BlankRule(regex="a"))
    for dtype in ("bfloat16", torch.int32):
        with pytest.raises(UserError, match="a floating-point type"):
            model.save(tmp_path / "saved", dtype=dtype)
    assert not (tmp_path / "saved").exists()


def test_a_model_sampled_as_another_reads_and_is_saved_as_itself(tmp_path: Path) -> None:
    model = load("pocket-mdlm", device="cpu")
    mixed, text = model.mixed(0.3), ["It was the best of times."]
    assert mixed.perplexity(text, draws=2).value == model.perplexity(text, draws=2).value
    for write in (mixed.save, mixed.publish):
        with pytest.raises(UserError, match="is not saved"):
            write(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
