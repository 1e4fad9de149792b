"""Row statistics (chunked against eager), exact draws, counter-based randomness."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
from torch import Tensor

from xdlm import UserError, Vocab
from xdlm.noise import Masked, Mixed
from xdlm.objective import elbo_weight, nelbo_of_stats, row_log_c, row_losses
from xdlm.ops import (
    Stream,
    categorical,
    chunked,
    device,
    draw_and_weigh,
    resolve_impl,
    row_loss,
    row_stats,
    rows,
    stats_of_logits,
    uniform,
)
from xdlm.ops.blocks import blocks
from xdlm.ops.counter import philox
from xdlm.ops.gather import ordered_rows, padded, take_rows
from xdlm.ops.padding import make_room, padded_rows
from xdlm.structs import HeadRows


def head_inputs(rows: int, width: int, vocab: int, mask_id: int, dtype, *, bias: bool = True):
    generator = torch.Generator().manual_seed(rows * vocab)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    offset = torch.randn(vocab, generator=generator, dtype=torch.float64) if bias else None
    x = torch.randint(0, vocab - 1, (rows,), generator=generator)
    x = x + (x >= mask_id)
    z = torch.where(torch.rand(rows, generator=generator) < 0.4, mask_id, x.roll(1))
    leaves = [v.to(dtype).requires_grad_() for v in (hidden, weight, offset) if v is not None]
    return leaves[0], leaves[1], leaves[2] if bias else None, x, z


def loss_and_grads(impl: str, hidden, weight, bias, x, z, process, t: float):
    coefs = process.coefs(torch.full(x.shape, t, dtype=torch.float64))
    stats = row_stats(
        hidden, weight, bias, x, z, row_log_c(process, coefs, x), mask_id=process.special_ids,
        impl=impl,
    )  # fmt: skip
    loss = nelbo_of_stats(coefs, stats, x, z).sum()
    leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
    return [*stats, loss, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize(("rows", "width", "vocab", "mask_id"), [
    (1, 3, 7, 0), (11, 4, 23, 5), (13, 5, 31, 17), (37, 8, 101, 100), (64, 16, 513, 256),
])  # fmt: skip
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("k", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("kept", [0, 1 << 24])
def test_chunked_equals_eager(monkeypatch, rows, width, vocab, mask_id, bias, k, kept) -> None:
    for limit in ("elements", "gradient_elements"):
        monkeypatch.setattr(chunked.TorchBlock, limit, 5 * vocab)  # several ragged chunks
    monkeypatch.setattr("xdlm.ops.rows._FEW", 0)
    monkeypatch.setattr(chunked.TorchBlock, "kept_elements", kept)
    process = Mixed(Vocab(vocab, mask_id), k=k)
    inputs = head_inputs(rows, width, vocab, mask_id, torch.float64, bias=bias)
    reference = loss_and_grads("eager", *inputs, process, 0.4)
    for ours, theirs in zip(
        loss_and_grads("chunked", *inputs, process, 0.4), reference, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_few_rows_are_no_blocks(monkeypatch) -> None:
    taken = []
    monkeypatch.setattr("xdlm.ops.blocks.blocked_row_stats", lambda *_: taken.append(1))
    for n in (1, 8):
        *leaves, x, z = head_inputs(n, 4, 21, 20, torch.float64)
        row_stats(*leaves, x, z, torch.zeros(n), mask_id=20, impl="chunked")
    assert not taken
    *leaves, x, z = head_inputs(9, 4, 21, 20, torch.float64)
    with pytest.raises(TypeError):
        row_stats(*leaves, x, z, torch.zeros(9), mask_id=20, impl="chunked")
    assert taken


def test_a_second_backward_pass_gives_the_same() -> None:
    """The first one works in place of what was kept."""
    *leaves, x, z = head_inputs(9, 4, 21, 20, torch.float64)
    stats = row_stats(*leaves, x, z, torch.zeros(9), mask_id=20, impl="chunked")
    loss = (stats.lse - stats.logit_x + stats.S).sum()
    first, second = (torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("k", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("t", [0.02, 0.5, 0.99])
@pytest.mark.parametrize("rows", [0, 7, 8, 37])
def test_one_sweep_equals_autograd(monkeypatch, k: float, t: float, rows: int) -> None:
    """`row_loss` with the closed-form derivatives against `row_stats` and automatic ones; of few rows it
    multiplies logits by what comes from above, and of many the weight's gradient."""
    vocab, mask_id = 101, 40
    monkeypatch.setattr(chunked.TorchBlock, "gradient_elements", 7 * vocab)
    process = Mixed(Vocab(vocab, mask_id), k=k)
    hidden, weight, bias, x, z = head_inputs(rows, 8, vocab, mask_id, torch.float64)
    z = torch.where(z == mask_id, z, x) if k == 0 else z
    *_, reference, by_hidden, by_weight, by_bias = loss_and_grads(
        "eager", hidden, weight, bias, x, z, process, t
    )
    coefs = process.coefs(torch.full(x.shape, t, dtype=torch.float64))
    weights = elbo_weight(coefs, x, z)

    total = row_loss(
        HeadRows(hidden, weight, bias, x, z, row_log_c(process, coefs, x)),
        row_losses(coefs, x, z, weights), mask_id=process.special_ids,
    )  # fmt: skip
    gradients = torch.autograd.grad(3 * total, (hidden, weight, bias))
    torch.testing.assert_close(total, reference.double(), rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(gradients, (by_hidden, by_weight, by_bias), strict=True):
        torch.testing.assert_close(ours, 3 * theirs, rtol=1e-8, atol=1e-10)


def test_coarse_gradients_are_multiplied_by_the_exact_factor() -> None:
    """bfloat16 has no 1.003: rounded before the product it would be 1, and every gradient as before."""
    process = Mixed(Vocab(101, 40), k=0.1)
    hidden, weight, bias, x, z = head_inputs(37, 8, 101, 40, torch.float64)
    leaves = [leaf.detach().bfloat16().requires_grad_() for leaf in (hidden, weight, bias)]
    coefs = process.coefs(torch.full(x.shape, 0.4, dtype=torch.float64))
    inputs = HeadRows(*leaves, x, z, row_log_c(process, coefs, x))
    loss = row_losses(coefs, x, z, elbo_weight(coefs, x, z))

    def by_hidden(factor: float) -> Tensor:
        total = row_loss(inputs, loss, mask_id=process.special_ids)
        return torch.autograd.grad(factor * total, leaves)[0]

    assert torch.equal(by_hidden(1.003), (1.003 * by_hidden(1.0).double()).bfloat16())


def test_one_block_is_in_memory_at_a_time(monkeypatch) -> None:
    """When the next one begins, nobody holds the logits of the last or their gradient."""
    vocab, held = 100, []
    whole = chunked.TorchBlock.stats, chunked.TorchBlock.gradient

    def stats(self, *arguments):
        assert not any(tensor() is not None for tensor in held)
        state = whole[0](self, *arguments)
        held.append(weakref.ref(state))
        return state

    def gradient(self, *arguments):
        found = whole[1](self, *arguments)
        held.append(weakref.ref(found.d_logits))
        return found

    monkeypatch.setattr(chunked.TorchBlock, "stats", stats)
    monkeypatch.setattr(chunked.TorchBlock, "gradient", gradient)
    monkeypatch.setattr(chunked.TorchBlock, "gradient_elements", 7 * vocab)
    monkeypatch.setattr(chunked.TorchBlock, "kept_elements", 0)
    coefs = Mixed(Vocab(vocab, 3), k=0.1).coefs(torch.linspace(0.1, 0.9, 30, dtype=torch.float64))
    hidden, weight, _, x, z = head_inputs(30, 8, vocab, 3, torch.float32)
    rows = HeadRows(hidden.requires_grad_(), weight.requires_grad_(), None, x, z, coefs.log_c)
    loss = row_losses(coefs, x, z, elbo_weight(coefs, x, z))
    row_loss(rows, loss, mask_id=3, impl="chunked").backward()
    assert len(held) == 10 and hidden.grad is not None


def test_blocks_are_whole_tiles_and_few_where_the_vocabulary_is_large() -> None:
    def size(vocab: int, elements: int, least: int = 1) -> int:
        parts = list(blocks(10_000, vocab, elements, least))
        assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
        assert parts[0].start == 0 and parts[-1].stop == 10_000
        return parts[0].stop

    assert size(50_304, 52_000_000, 256) == 1_024
    assert size(262_144, 52_000_000, 256) == 256
    assert size(262_144, 52_000_000) == 192
    assert size(50_258, 1 << 22) == 64
    assert size(500_000, 1 << 22) == 8
    assert size(1 << 23, 1 << 22) == 1


def test_fused_by_name_needs_a_gpu() -> None:
    assert resolve_impl("auto", torch.device("cpu")) == "chunked"
    with pytest.raises(UserError, match="impl='fused' cannot run here"):
        resolve_impl("fused", torch.device("cpu"))


def test_another_accelerator_falls_back_and_says_so() -> None:
    rows._say_once.cache_clear()
    with pytest.warns(UserWarning, match="need a CUDA device, not mps"):
        assert resolve_impl("auto", torch.device("mps")) == "chunked"


def test_a_gpu_without_triton_falls_back_and_says_so_once(monkeypatch) -> None:
    monkeypatch.setattr(rows, "kernel_obstacle", lambda: "Triton is not installed")
    rows._say_once.cache_clear()
    gpu = torch.device("cuda")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert [resolve_impl("auto", gpu) for _ in range(3)] == ["chunked"] * 3
        resolve_impl("auto", torch.device("cpu"))
        resolve_impl("auto", gpu, torch.float64)
    assert ["Triton is not installed" in str(line.message) for line in said] == [True]
    with pytest.raises(UserError, match="Triton is not installed"):
        resolve_impl("fused", gpu)


def test_an_old_gpu_runs_without_kernels(monkeypatch) -> None:
    monkeypatch.delenv("XDLM_KERNELS", raising=False)
    monkeypatch.setattr(device, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, obstacle in (((7, 5), "this one has 7.5"), ((8, 0), None), ((12, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda own=capability: own)
        found = device.kernel_obstacle.__wrapped__()
        assert found is None if obstacle is None else obstacle in found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_is_as_close_to_float64_as_eager(dtype) -> None:
    process = Mixed(Vocab(1023, 511), k=0.1)
    hidden, weight, bias, x, z = head_inputs(50, 32, 1023, 511, dtype)
    wide = [v.detach().double().requires_grad_() for v in (hidden, weight, bias)]
    exact = loss_and_grads("eager", *wide, x, z, process, 0.6)
    eager = loss_and_grads("eager", hidden, weight, bias, x, z, process, 0.6)
    chunks = loss_and_grads("chunked", hidden, weight, bias, x, z, process, 0.6)
    for truth, slow, fast in zip(exact, eager, chunks, strict=True):
        finite = truth.isfinite()
        scale = truth[finite].norm() + 1e-12
        slow_error = (slow.double() - truth)[finite].norm() / scale
        fast_error = (fast.double() - truth)[finite].norm() / scale
        assert fast_error <= 2 * slow_error + 1e-7


def test_masked_needs_no_vocabulary_sum() -> None:
    process = Masked(Vocab(31, 17))
    hidden, weight, bias, x, z = head_inputs(13, 5, 31, 17, torch.float32)
    assert row_log_c(process, process.coefs(0.5), x) is None
    stats = row_stats(hidden, weight, bias, x, z, None, mask_id=17)
    assert (stats.S == 0).all()
    assert torch.isneginf(stats.logit_z[z == 17]).all()


def test_log_probabilities_survive_large_logits(monkeypatch) -> None:
    """log p = logit - lse of a near-certain token among logits of a hundred: float32 would leave 1e-5."""
    monkeypatch.setattr("xdlm.ops.rows._FEW", 0)
    logits = torch.tensor([[100.0, 88.0, 90.0]])
    x = torch.tensor([0])
    for stats in (
        stats_of_logits(logits, x, x, None, mask_id=None),
        row_stats(logits, torch.eye(3), None, x, x, None, mask_id=None, impl="chunked"),
    ):
        exact = logits.double().log_softmax(-1)[0, 0]
        torch.testing.assert_close((stats.logit_x - stats.lse)[0], exact, rtol=5e-3, atol=0)


def test_leading_dimensions_are_kept() -> None:
    hidden, weight, bias, x, z = head_inputs(12, 5, 31, 17, torch.float32)
    log_c = torch.full((3, 4), 2.0)
    for impl in ("eager", "chunked"):
        stats = row_stats(
            hidden.view(3, 4, 5), weight, bias, x.view(3, 4), z.view(3, 4), log_c, mask_id=17,
            impl=impl,
        )  # fmt: skip
        assert all(field.shape == (3, 4) for field in stats)


def test_unknown_impl_is_named() -> None:
    hidden, weight, bias, x, z = head_inputs(2, 5, 31, 17, torch.float32)
    with pytest.raises(UserError, match="did you mean 'chunked'"):
        row_stats(hidden, weight, bias, x, z, None, mask_id=17, impl="chunkd")  # type: ignore


def test_philox_known_answers() -> None:
    """The first and last vectors of the reference implementation's known-answer file (kat_vectors)."""
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        words = philox(tuple(torch.tensor([c]) for c in counter), key)  # type: ignore[arg-type]
        assert tuple(int(w) for w in words) == expected


def test_uniform_is_a_pure_function_of_its_arguments() -> None:
    sample, position = torch.arange(64)[:, None], torch.arange(50)[None]
    whole = uniform(3, Stream.CORRUPT, sample, position, step=9)
    part = uniform(3, Stream.CORRUPT, sample[20:30], position[:, 5:], step=9)
    assert torch.equal(whole[20:30, 5:], part)
    assert whole.unique().numel() == whole.numel()
    for other in (
        uniform(4, Stream.CORRUPT, sample, position, step=9),
        uniform(3, Stream.NOISE, sample, position, step=9),
        uniform(3, Stream.CORRUPT, sample, position, step=10),
        uniform(3, Stream.CORRUPT, sample + (1 << 33), position, step=9),
        uniform(3, Stream.TIME, sample + (1 << 52), position, step=9),
        uniform(3 + (1 << 40), Stream.CORRUPT, sample, position, step=9),
    ):
        assert (whole == other).sum() == 0


def test_uniform_is_uniform() -> None:
    u = uniform(0, Stream.TOKEN, torch.arange(200)[:, None], torch.arange(500)[None])
    assert u.dtype == torch.float64
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, bins=50, min=0, max=1)
    chi_square = ((counts - 2000) ** 2 / 2000).sum()
    assert 20 < chi_square < 95  # 49 degrees of freedom: mean 49, standard deviation 9.9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_uniform_is_the_same_on_the_gpu() -> None:
    sample, position = torch.arange(64)[:, None], torch.arange(1000)[None]
    here = uniform(11, Stream.BRANCH, sample, position, step=5)
    there = uniform(11, Stream.BRANCH, sample.cuda(), position.cuda(), step=5)
    assert torch.equal(here, there.cpu())


def test_categorical_follows_the_softmax() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 1200, generator=generator) * 2
    logits[0, 7] = -torch.inf
    draws = 200_000
    u = torch.rand(draws, generator=generator, dtype=torch.float64)
    drawn = torch.cat([categorical(logits.expand(1000, -1), part) for part in u.split(1000)])
    expected = logits[0].double().softmax(-1)
    seen = torch.bincount(drawn, minlength=1200).double() / draws
    assert seen[7] == 0
    z_scores = (seen - expected) / (expected * (1 - expected) / draws).sqrt()
    assert z_scores[expected > 0].abs().max() < 5.5


def test_tail_of_the_categorical_draw() -> None:
    """A token of probability 1e-7 must own an interval of length 1e-7, not a multiple of 2^-24.

    Walking the uniforms over a fine grid around the tail measures the interval itself, so the test
    is exact: no waiting for ten million draws.
    """
    vocab, p = 1500, 1e-7
    for tail in (0, 700, 1499):
        logits = torch.full((vocab,), torch.log(torch.tensor((1 - p) / (vocab - 1))).item())
        logits[tail] = torch.log(torch.tensor(p, dtype=torch.float64)).float()
        start = tail * (1 - p) / (vocab - 1)
        grid = start + torch.linspace(-5 * p, 6 * p, 11_001, dtype=torch.float64)
        grid = grid[(grid >= 0) & (grid < 1)]
        drawn = categorical(logits.expand(len(grid), -1), grid)
        width = (drawn == tail).double().sum() * (11 * p / 11_000)
        assert abs(width / p - 1) < 2e-3


def test_categorical_never_draws_what_is_impossible() -> None:
    logits = torch.full((3, 600), -torch.inf)
    logits[0, 5] = logits[1, 599] = logits[2, 300] = 0.0
    for u in (0.0, 0.5, 1 - 2.0**-53):
        drawn = categorical(logits, torch.full((3,), u, dtype=torch.float64))
        assert drawn.tolist() == [5, 599, 300]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_probabilities_of_coarse_logits_are_exact(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (20 + 4 * torch.randn(500, 50, generator=generator)).to(dtype)
    z = torch.randint(50, (500,), generator=generator)
    _, p_z = draw_and_weigh(logits, torch.rand(500, generator=generator), z)
    expected = logits.double().softmax(-1).gather(1, z[:, None])[:, 0]
    torch.testing.assert_close(p_z, expected, rtol=1e-5, atol=0)


def test_picked_rows_come_first_and_all_rows_once() -> None:
    for mask in ([0, 0, 0], [1, 1, 1], [0, 1, 1, 0, 1], [1, 0]):
        flags = torch.tensor(mask, dtype=torch.bool)
        everything = flags.nonzero()[:, 0].tolist() + (~flags).nonzero()[:, 0].tolist()
        for multiple in (1, 2, 4):
            order, count = ordered_rows(flags)
            order = padded(order, int(count), multiple)
            assert count == sum(mask) and order.tolist() == everything[: len(order)]
            assert len(order) >= count and (len(order) % multiple == 0 or len(order) == len(mask))


def test_taken_rows_give_their_gradient_back() -> None:
    source = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: take_rows(s, torch.tensor([5, 0, 2])), source)


def test_a_weight_with_room_is_padded_without_a_copy() -> None:
    weight = torch.nn.Parameter(torch.randn(130, 3))
    before = weight.detach().clone()
    assert padded_rows(weight).data_ptr() != weight.data_ptr()
    make_room(weight)
    padded = padded_rows(weight)
    assert padded.data_ptr() == weight.data_ptr() and padded.shape == (256, 3)
    assert torch.equal(padded[:130], before) and (padded[130:] == 0).all()
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(padded_rows(weight)[:130], 2 * before)
    weight.data = weight.data[:100]  # other rows: what lies behind them is no padding
    assert (padded_rows(weight)[100:] == 0).all() and len(padded_rows(weight)) == 128
    weight.data = padded[:130].double()  # other memory: the room is gone
    assert padded_rows(weight).data_ptr() != weight.data_ptr()
    assert torch.equal(padded_rows(weight)[:130], 2 * before.double())
