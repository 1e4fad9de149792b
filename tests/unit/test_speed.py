"""Speed as ratios in one run, with room to spare: what is claimed must not quietly get lost."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch

from xdlm import Vocab
from xdlm.cli.main import main
from xdlm.evaluation import speed
from xdlm.evaluation.plain import plain_decode, plain_loss, plain_sample
from xdlm.evaluation.speed import (
    METHODS,
    TIMED,
    SpeedSetting,
    make_process,
    measure,
    measure_in_turn,
)
from xdlm.models import PRESETS, DiT, DiTConfig
from xdlm.noise import Mixed
from xdlm.objective import nelbo
from xdlm.ops import row_stats
from xdlm.ops.rows import Impl
from xdlm.sampling import ConfidenceConfig, Filter, SamplerConfig, decode, sample
from xdlm.structs import Batch
from xdlm.training.loss import DiffusionLoss

VOCAB = Vocab(50_258, 50_257)


def seconds(run: Callable[[], object], repeats: int = 3) -> float:
    """The best of a few, which other work on the machine disturbs least."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


def wide_model() -> DiT:
    torch.manual_seed(0)
    model = DiT(DiTConfig(depth=1, width=64, heads=2, cond_width=8, dropout=0.0), VOCAB.size)
    torch.nn.init.normal_(model.out.weight, std=0.1)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "training"])
def test_chunked_is_not_slower_than_eager_on_a_cpu(backward: bool) -> None:
    model, process = wide_model(), Mixed(VOCAB, k=0.1)
    batch = Batch(torch.randint(0, 50_000, (4, 64)), torch.arange(4))

    def step(impl: str) -> Callable[[], None]:
        loss = DiffusionLoss(process, impl=impl)  # type: ignore[arg-type]

        def run() -> None:
            with torch.set_grad_enabled(backward):
                found = loss(model, batch, seed=0, step=0, global_batch=4).loss
            if backward:
                found.backward()
                model.zero_grad()

        return run

    assert seconds(step("chunked")) < seconds(step("eager"))


@pytest.mark.slow
@pytest.mark.parametrize("width, rows", [(64, 16), (64, 256), (768, 16), (768, 32), (768, 192)])
def test_statistics_in_blocks_cost_no_more_for_few_rows_and_wide_states(
    width: int, rows: int
) -> None:
    """With gradients; a few rows of wide states take hardly more than one look at the weight in both. The
    fifth is how far the ratio of two equal timings wanders on a busy machine (benchmarks/notes.md)."""
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = (torch.randn(VOCAB.size, width) / width**0.5).requires_grad_()
    x, z = torch.randint(0, 50_000, (2, rows)).unbind()

    def run(impl: Impl) -> None:
        stats = row_stats(
            hidden, weight, None, x, z, torch.zeros(rows), mask_id=VOCAB.mask_id, impl=impl
        )
        (stats.lse - stats.logit_x + stats.S).sum().backward()
        hidden.grad = weight.grad = None

    run("eager")
    chunked, eager = (seconds(partial(run, impl), repeats=5) for impl in ("chunked", "eager"))
    assert chunked < 1.2 * eager


@pytest.mark.slow
def test_thinned_sampling_is_five_times_as_fast_as_dense() -> None:
    model, process = wide_model(), Mixed(VOCAB, k=0.1)

    def run(impl: str) -> None:
        sample(model, process, batch=1, length=32, config=SamplerConfig(steps=64, impl=impl))

    assert 5 * seconds(lambda: run("thinned")) < seconds(lambda: run("dense"), repeats=1)


@pytest.mark.parametrize("method", METHODS)
def test_plain_loss_is_the_same_loss(method: str) -> None:
    process = make_process(method, setting())
    model = DiT(PRESETS["nano"], process.vocab.size)
    torch.nn.init.normal_(model.out.weight)
    x = torch.randint(0, 40, (3, 9))
    t = torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)
    plain = plain_loss(model, process, x, t, torch.Generator().manual_seed(1))
    z = process.corrupt(x, t, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        plain, nelbo(process, model(z, t.float()), x, z, t).sum(), rtol=1e-4, atol=1e-4
    )


def test_plain_sampling_ends_in_tokens() -> None:
    process = make_process("xdlm", setting())
    model = DiT(PRESETS["nano"], process.vocab.size)
    drawn = plain_sample(
        model, process, batch=2, length=9, steps=4, generator=torch.Generator().manual_seed(0)
    )
    assert drawn.shape == (2, 9) and not torch.isin(drawn, torch.tensor(process.special_ids)).any()


def test_a_cell_says_what_it_measured() -> None:
    cells = [*measure("xdlm", setting(), "ours"), *measure("xdlm", setting(), "plain")]
    assert {(c.impl, c.task) for c in cells} == {
        ("ours", "forward"), ("ours", "forward-thinned"), ("ours", "train"), ("ours", "sample"),
        ("plain", "forward"), ("plain", "train"), ("plain", "sample"),
    }  # fmt: skip
    for cell in cells:
        assert cell.tokens_per_s == pytest.approx(2 * 8 / cell.seconds)
        assert cell.peak_gb is None


class Watched:
    """What the trunk was run on, whether in training and with gradients; nothing else may be run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[tuple[bool, bool]] = []
        self.states: set[int] = set()
        self.gradients: list[torch.Tensor] = []
        trunk = DiT.trunk

        def watched(model: DiT, z, t, label=None):
            self.passes.append((model.training, torch.is_grad_enabled()))
            self.states |= {*z.unique().tolist()}
            assert z.shape == (2, 8) and t.shape == (2,) and len(model.head_weight) == 41
            hidden = trunk(model, z, t, label)
            if hidden.requires_grad:
                hidden.register_hook(self.gradients.append)
            return hidden

        monkeypatch.setattr(DiT, "trunk", watched)
        monkeypatch.setattr(DiT, "head", lambda *_: pytest.fail("the head was run"))
        monkeypatch.setattr(speed, "DiffusionLoss", lambda *_: pytest.fail("there was a loss"))
        monkeypatch.setattr(speed, "sample", lambda *_: pytest.fail("something was drawn"))


@pytest.mark.parametrize("task, passes", [("forward", 1), ("sample", 5), ("train", 1)])
def test_the_trunk_is_timed_alone(task: str, passes: int, monkeypatch) -> None:
    """A pass; those of 4 steps and the final denoise; or one there and back with dropout."""
    watched = Watched(monkeypatch)
    (cell,) = measure("trunk", replace(setting(), steps=4, warmup=0), "ours", (task,))
    assert (cell.method, cell.task, cell.impl) == ("trunk", task, "ours")
    assert cell.tokens_per_s == pytest.approx(2 * 8 / cell.seconds)
    assert watched.passes == passes * [(task == "train", task == "train")]
    assert 40 in watched.states and len(watched.states) > 2, "no noisy tokens"
    assert len(watched.gradients) == (task == "train")
    for gradient in watched.gradients:
        assert len(gradient.flatten(0, 1).unique(dim=0)) == 2 * 8 and gradient.all()


def test_the_trunk_has_no_plain_twin_and_nothing_to_thin() -> None:
    alone = measure("trunk", setting(), "ours")
    assert [cell.task for cell in alone] == ["forward", "train", "sample"]
    assert not [*measure("trunk", setting(), "plain")]
    cells = [*measure_in_turn(TIMED, setting(), ("forward-thinned", "train"))]
    assert [(c.method, c.task) for c in cells] == [
        *((method, "forward-thinned") for method in METHODS), *((method, "train") for method in TIMED),
    ]  # fmt: skip


def test_methods_in_turn_are_timed_run_by_run(monkeypatch) -> None:
    """UDLM takes ten times as long, and each turn (the first is not timed) longer than the one before."""
    clock, order = [0.0], []

    def task(method, name, impl, model, process, given):
        def run() -> None:
            order.append(process.vocab.size)
            clock[0] += (10 if process.vocab.size == 40 else 1) * ((len(order) - 1) // 2)

        return run

    monkeypatch.setattr("xdlm.evaluation.speed._task", task)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    cells = list(measure_in_turn(("mdlm", "udlm"), replace(setting(), repeats=3), ("train",)))
    warm_up, *turns = (order[i : i + 2] for i in range(0, len(order), 2))
    assert warm_up == [41, 40] and turns == [[41, 40], [40, 41], [41, 40]]
    assert [(c.method, c.impl, c.seconds, c.spread) for c in cells] == [
        ("mdlm", "in turn", 2.0, 1.0), ("udlm", "in turn", 20.0, 10.0),
    ]  # fmt: skip
    assert all(c.peak_gb is None for c in cells)


def test_a_table_has_the_trunk_as_its_floor(tmp_path, monkeypatch, capsys) -> None:
    """A thinned forward pass has the floor of a forward pass. All fits in 80 columns."""

    def timed(runs, task, impl, given):
        unit = {"forward": 1.0, "forward-thinned": 1.0, "train": 4.0, "sample": 33.0}[task]
        for method in runs:
            seconds = unit * {"mdlm": 3.1, "trunk": 2.0}[method] * (20 if impl == "plain" else 1)
            yield speed.Speed(method, task, impl, 4e6 / seconds, seconds, 0.0, 123.45)

    monkeypatch.setattr(speed, "_timed", timed)
    file, plot = tmp_path / "speed.csv", tmp_path / "speed.png"
    main(["bench", "--methods", "mdlm", "trunk", "--in-turn", "--device", "cpu", "--vocab", "40",
          "--csv", str(file), "--plot", str(plot)])  # fmt: skip
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.replace("│", " ").splitlines()]
    table = [line for line in lines if line[1:2] and line[1] in speed.TASKS]
    assert [(line[0], line[1], "1.55" in line) for line in table] == [
        *(("mdlm", task, True) for task in speed.TASKS),
        *(("trunk", task, False) for task in ("forward", "train", "sample")),
    ]  # fmt: skip
    assert max(map(len, shown.splitlines())) <= 80 and "1,290,323" in shown and plot.exists()
    rows = [tuple(row.split(",")[:3]) for row in file.read_text().splitlines()[1:]]
    assert len(rows) == len({*rows}) == 4 + 3 + 3 + 4 + 3
    assert ("trunk", "train", "in turn") in rows and ("trunk", "train", "plain") not in rows


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_in_turn_each_method_follows_each_other_equally_often(n: int) -> None:
    order: list[str] = []
    runs = {f"{i}": partial(order.append, f"{i}") for i in range(n)}
    turns = 2 * n if n % 2 else n
    given = replace(setting(), warmup=0, repeats=turns)
    assert [cell.method for cell in speed._timed(runs, "train", "in turn", given)] == [*runs]
    each = [order[i : i + n] for i in range(0, len(order), n)]
    assert all(sorted(turn) == [*runs] for turn in each)
    pairs = Counter(pair for turn in each for pair in pairwise(turn))
    assert len(pairs) == n * (n - 1) and len({*pairs.values()}) == 1
    places = Counter(place for turn in each for place in enumerate(turn))
    assert len(places) == n * n and len({*places.values()}) == 1


def test_a_table_in_turn_has_the_first_method_as_its_unit(tmp_path, capsys) -> None:
    file, plot = tmp_path / "speed.csv", tmp_path / "speed.png"
    main(["bench", "--methods", "mdlm", "xdlm", "--tasks", "forward", "--no-plain", "--in-turn", "--device",
          "cpu", "--vocab", "40", "--csv", str(file), "--plot", str(plot)])  # fmt: skip
    rows = [row.split(",") for row in file.read_text().splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        ["mdlm", "forward", "ours"], ["xdlm", "forward", "ours"],
        ["mdlm", "forward", "in turn"], ["xdlm", "forward", "in turn"],
    ]  # fmt: skip
    (first, sd_first), (other, sd_other) = ((float(row[4]), float(row[5])) for row in rows[2:])
    ratio = first / other
    error = ratio * (((sd_first / first) ** 2 + (sd_other / other) ** 2) / 5) ** 0.5
    shown = capsys.readouterr().out
    assert f"{ratio:.1%}" in shown and f"{error:.1%}" in shown and plot.exists()
    for wrong, message in (
        (["--methods", "mdlm"], "at least two"),
        (["--scan", "vocab"], "no --scan"),
        (["--methods", "mdlm", "mdlm"], "named twice"),
    ):
        with pytest.raises(SystemExit):
            main(["bench", *wrong, "--in-turn", "--device", "cpu"])
        assert message in capsys.readouterr().err


def test_a_unet_is_measured_too(tmp_path, capsys) -> None:
    file = tmp_path / "images.csv"
    main(["bench", "--preset", "unet-nano", "--methods", "udlm", "mdlm", "--device", "cpu", "--batch", "2",
          "--steps", "2", "--repeats", "1", "--sample-repeats", "1", "--csv", str(file)])  # fmt: skip
    assert "unet 2 x 8" in capsys.readouterr().out
    rows = file.read_text().splitlines()
    assert len(rows) == 1 + 2 * 7 and ",256,2,192," in rows[1]
    with pytest.raises(SystemExit):
        main(["bench", "--preset", "unet-nano", "--scan", "length", "--device", "cpu"])
    assert "a length of its own" in capsys.readouterr().err


def test_a_scan_is_drawn(tmp_path, capsys) -> None:
    plot = tmp_path / "scan.png"
    main(["bench", "--scan", "length", "--methods", "xdlm", "trunk", "--tasks", "forward", "--no-plain",
          "--device", "cpu", "--vocab", "40", "--repeats", "1", "--plot", str(plot)])  # fmt: skip
    assert plot.stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert all(f"batch 4 x {length}," in shown for length in (64, 128, 256, 512))
    assert shown.count("trunk  │ forward") == 4


def test_a_file_of_something_else_is_refused_before_anything_is_measured(
    tmp_path, monkeypatch, capsys
) -> None:
    file = tmp_path / "other.csv"
    file.write_text("method,seconds\n")
    monkeypatch.setattr("xdlm.cli.bench.measure", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--device", "cpu", "--csv", str(file)])
    assert stop.value.code == 2 and "other columns" in capsys.readouterr().err
    assert file.read_text() == "method,seconds\n"


def test_a_log_counts_cells_and_names_what_comes(monkeypatch, capsys) -> None:
    """What memory does not suffice for counts as done."""
    monkeypatch.setattr("xdlm.cli.progress._EVERY", 0.0)

    def timed(runs, task, impl, given):
        if impl == "plain":
            raise torch.cuda.OutOfMemoryError
        yield from (speed.Speed(method, task, impl, 1.0, 1.0, 0.0, None) for method in runs)

    monkeypatch.setattr(speed, "_timed", timed)
    small = ["--device", "cpu", "--vocab", "40", "--methods", "xdlm", "trunk"]
    main(["bench", "--tasks", "forward", "forward-thinned", "sample", "--in-turn", *small])
    assert [line.rpartition(",")[0] or line for line in capsys.readouterr().err.splitlines()] == [
        "measuring xdlm ours forward: 0 of 12",
        "measuring xdlm ours forward-thinned: 1 of 12",
        "measuring xdlm ours sample: 2 of 12",
        "measuring xdlm plain forward: 3 of 12",
        "xdlm plain: out of memory",
        "measuring trunk ours forward: 5 of 12",
        "measuring trunk ours sample: 6 of 12",
        "measuring in turn forward: 7 of 12",
        "measuring in turn forward-thinned: 9 of 12",
        "measuring in turn sample: 10 of 12",
    ]
    main(["bench", "--tasks", "train", "--no-plain", "--scan", "batch", *small])
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 * 4
    assert lines[3].startswith("measuring trunk ours train, batch 2: 3 of 8, ")


def test_what_was_measured_before_a_stop_is_kept(tmp_path, monkeypatch) -> None:
    def stopped(method, *rest):
        if method == "gidd":
            raise KeyboardInterrupt
        yield from measure(method, setting(), *rest[1:])

    monkeypatch.setattr("xdlm.cli.bench.measure", stopped)
    file = tmp_path / "speed.csv"
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        main(["bench", "--device", "cpu", "--tasks", "forward", "--csv", str(file)])
    rows = [row.split(",")[:3] for row in file.read_text().splitlines()]
    assert rows == [
        ["method", "task", "impl"],
        ["mdlm", "forward", "ours"],
        ["mdlm", "forward", "plain"],
    ]


def setting() -> SpeedSetting:
    return SpeedSetting(
        model=PRESETS["nano"], n_tokens=40, batch=2, length=8, steps=2, k=0.1, kept_rows=0.1,
        device=torch.device("cpu"), dtype=torch.float32, compiled=False, warmup=1, repeats=1,
        sample_repeats=1,
    )  # fmt: skip


@pytest.mark.parametrize("k", [0.0, 0.3])
def test_plain_decoding_is_the_same_where_nothing_is_drawn(k: float) -> None:
    model = DiT(DiTConfig(depth=1, width=16, heads=2, cond_width=4, dropout=0.0), 31).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    process = Mixed(Vocab(31, 30), k=0.1)
    prompt = torch.randint(0, 30, (3, 5))
    given = torch.cat([prompt, prompt.new_zeros(3, 20)], 1)
    frozen = (torch.arange(25) < 5).expand(3, -1)
    config = ConfidenceConfig(steps=8, k=k, filter=Filter(temperature=0.0))
    ours = decode(model, process, given=given, frozen=frozen, config=config).tokens
    plain = plain_decode(
        model, process, prompt=prompt, n_new=20, steps=8, k=k, temperature=0.0,
        generator=torch.Generator(),
    )  # fmt: skip
    assert torch.equal(ours, plain)
