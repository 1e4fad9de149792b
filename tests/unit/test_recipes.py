"""The recipes of the paper's text rows, and their twins for a CPU: the same runs but for their size."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import runpy
import time
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
import torch
from studies import gen

from xdlm import Vocab
from xdlm.api import load_tokenizer
from xdlm.cli.lanes import LaneStudy, lane_options
from xdlm.config import ProcessConfig, RunConfig, load_config
from xdlm.data import Rows, load_rows, read_documents
from xdlm.evaluation.records import append_records
from xdlm.models import build_denoiser
from xdlm.training.trainer import Trainer

RECIPES = Path(__file__).parents[2] / "recipes"
CORPORA = ("owt", "lm1b")
METHODS = ("gidd", "mdlm", "udlm", "xdlm-k0.001", "xdlm-k0.1", "xdlm-k0.5", "xdlm-k0.9")
TWINS = [(corpus, method) for corpus in CORPORA for method in METHODS]
#: In what a twin may differ; it must not in anything else.
SIZES = {
    "process": set(),
    "model": {"depth", "width", "heads", "cond_width"},
    "data": {"train", "val", "tokenizer", "length"},
    "loss": set(),
    "optim": {"lr", "warmup", "ema"},  # they go with the number of steps
    "train": {"out", "steps", "batch", "micro_batch", "eval_every", "eval_rows", "save_every"},
}  # fmt: skip


def recipe(corpus: str, method: str, *, twin: bool) -> RunConfig:
    return load_config(RECIPES / ("cpu" if twin else ".") / corpus / f"{method}.yaml")


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("folder", [".", "cpu"])
def test_every_row_of_the_paper_has_its_recipe(folder: str, corpus: str) -> None:
    found = sorted(path.stem for path in (RECIPES / folder / corpus).glob("*.yaml"))
    assert found == sorted(METHODS)


@pytest.mark.parametrize(
    ("name", "tokens"), [("tiny", 2048), ("weights", 2048), ("pixels", 256), ("codes", 256)]
)
def test_small_recipes_say_how_large_their_models_are(name: str, tokens: int) -> None:
    file = RECIPES / f"cpu-{name}.yaml"
    said = re.search(r"([\d.]+) M parameters", file.read_text(encoding="utf-8"))
    config = load_config(file)
    model = build_denoiser(config.model, config.vocab(tokens).size)
    assert said and f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}" == said[1]


def test_the_reproduction_compares_noise_alone() -> None:
    found = {path.stem: load_config(path) for path in (RECIPES / "repro").glob("*.yaml")}
    assert sorted(found) == sorted((*METHODS, "judge"))
    one, judge = found["mdlm"], found.pop("judge")
    assert judge.process == ProcessConfig(kind="autoregressive")
    assert (judge.model, judge.data) == (one.model, one.data)
    for method, config in found.items():
        assert config.process == recipe("owt", method, twin=False).process
        assert config.loss.weighting == "dynamic"
        same = replace(config, process=one.process, train=replace(config.train, out=one.train.out))
        assert same == one
    folders = {config.train.out for config in (judge, *found.values())}
    assert len(folders) == len(found) + 1


def pretend(monkeypatch, script: dict) -> list[tuple[str, ...]]:
    """Commands are noted and taken for done; what is returned fills up with them."""
    said: list[tuple[str, ...]] = []
    trained: set[str] = set()

    def xdlm(log: Path, *words: str) -> None:
        time.sleep(0.01)
        said.append((log.name.removesuffix(".log"), *words))
        if words[0] in ("export", "codec"):
            Path(words[words.index("--out") + 1]).mkdir(parents=True)
        if words[0] == "train":
            trained.add(words[1])
            recipe = Path(load_config(words[1]).train.out)
            folder = (
                Path(words[words.index("--train.out") + 1]) if "--train.out" in words else recipe
            )
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "log.jsonl").write_text('{"step": 25, "loss": 9.0, "elbo": 8.5}\n')

    def steps_left(self, run: str) -> int:
        return int(str(self._recipes[run]) not in trained)

    def step_of_newest(self, run: str) -> int:
        return 5000 * (str(self._recipes[run]) in trained)

    monkeypatch.setitem(inspect.unwrap(script["main"]).__globals__, "xdlm", xdlm)
    monkeypatch.setattr("xdlm.cli.lanes.xdlm", xdlm)
    monkeypatch.setattr("xdlm.cli.lanes.LaneStudy.steps_left", steps_left)
    monkeypatch.setattr("xdlm.cli.lanes.LaneStudy.step_of_newest", step_of_newest)
    return said


@pytest.mark.parametrize(("device", "precision"), [("cuda", "bfloat16"), ("cpu", "float32")])
def test_a_study_measures_in_the_precision_of_training(monkeypatch, device, precision) -> None:
    monkeypatch.setattr("xdlm.cli.lanes.pick_device", lambda name: torch.device(device))
    parser = lane_options("", {"mdlm": Path("mdlm.yaml")}, Path("out"))
    assert parser.parse_args(["--minutes", "1"]).precision == precision


@pytest.mark.parametrize("lanes", ["1", "3"])
def test_the_script_trains_and_measures_what_depends_on_it(
    tmp_path: Path, monkeypatch, lanes: str
) -> None:
    """The judge before any measurement, what is adapted after what it starts from, each run once."""
    script = runpy.run_path(str(RECIPES / "repro" / "run.py"))
    said = pretend(monkeypatch, script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py", "--minutes", "1", "--lanes", lanes, "--judge", "x"])
    script["main"]()
    logs = [log for log, *_ in said]
    runs = (*METHODS, "judge", "adapt-mdlm", "adapt-xdlm")
    assert sorted(log for log, *words in said if words[0] == "train") == sorted(runs)
    for adapted in ("adapt-mdlm", "adapt-xdlm"):
        assert logs.index(adapted) > logs.index("mdlm")
    for log, *words in said:
        if words[0] == "eval":
            assert logs.index(log) > logs.index(log.rpartition(".")[0].removesuffix("-as-xdlm"))
            assert logs.index(log) > logs.index("judge")
            if log.endswith(".texts"):
                continue
            at = words.index("--judge")
            assert words[at + 1 : at + 3] == ["runs/repro/kept/judge", "x"]
    assert {f"{run}.measure" for run in runs} <= set(logs) and "mdlm.as-xdlm" in logs
    (early,) = ([*words] for log, *words in said if log == "udlm.measure")
    assert early[-8:] == ["--steps", "8", "32", "128", "--n", "1024", "512", "256"]
    assert "--row-nats" in early, "the gap over training is a comparison too"
    curves = Path("runs/repro/results/curves")
    assert sorted(file.stem for file in curves.iterdir()) == sorted(runs)
    assert (curves / "mdlm.csv").read_text() == "step,nats\n25,8.5000\n"


@pytest.mark.parametrize("judges", [1, 2])
def test_nothing_is_written_twice(tmp_path: Path, monkeypatch, judges: int) -> None:
    """Texts that are kept, and those of a foreign sampler once both judges have seen them."""
    script = runpy.run_path(str(RECIPES / "repro" / "run.py"))
    said = pretend(monkeypatch, script)
    monkeypatch.chdir(tmp_path)
    out = Path("runs/repro/results")
    for name in ("mdlm", "mdlm-as-xdlm"):
        (out / "samples" / name).mkdir(parents=True)
        for steps in (8, 16, 32, 64):
            (out / "samples" / name / f"steps-{steps:05d}.jsonl").touch()
    Path("runs/repro/kept/judge").mkdir(parents=True)
    own = [r for r in gen("MDLM", 9.0, 8, sampler="thinned as mixed, k = 0.1", n=5) if r.judge]
    append_records(out / "mdlm.jsonl", own[:judges])
    words = ["--minutes", "1", "--runs", "mdlm", "--steps", "8", "--early-steps", "8", "--n", "5"]
    monkeypatch.setattr("sys.argv", ["run.py", *words])
    script["main"]()
    again = ["mdlm.as-xdlm"] if judges == 1 else []
    assert [log for log, *_ in said if log.startswith("mdlm.")] == [
        "mdlm.last",
        "mdlm.measure",
        *again,
    ]


def test_another_seed_has_folders_and_a_judge_of_its_own(tmp_path: Path, monkeypatch) -> None:
    """And of the last checkpoint nothing but perplexities is measured."""
    script = runpy.run_path(str(RECIPES / "repro" / "run.py"))
    said = pretend(monkeypatch, script)
    monkeypatch.chdir(tmp_path)
    words = [
        "--minutes",
        "1",
        "--runs",
        "mdlm",
        "judge",
        "adapt-xdlm",
        "--seed",
        "1",
        "--last-only",
    ]
    words += ["--steps", "256", "8", "--n", "7", "5", "--batch-tokens", "99", "--out", "again"]
    monkeypatch.setattr("sys.argv", ["run.py", *words])
    script["main"]()
    named = {log: [*words] for log, *words in said}
    assert sorted(named) == sorted([
        "prepare", "mdlm", "judge", "judge.export", "adapt-xdlm", "mdlm.last", "judge.measure",
        "adapt-xdlm.last",
    ])  # fmt: skip
    flags = ["--train.seed", "1", "--train.out", "runs/repro/seed-1/mdlm"]
    assert named["mdlm"][-4:] == flags
    assert named["adapt-xdlm"][-2:] == ["--train.start", "runs/repro/seed-1/mdlm"]
    for run in ("mdlm", "adapt-xdlm"):
        last = named[f"{run}.last"]
        assert last[:3] == ["eval", "dynamics", f"runs/repro/seed-1/{run}"]
        assert last[last.index("--judge") + 1] == "runs/repro/seed-1/kept/judge"
        assert last[-14:] == [
            "--batch-tokens", "99", "--text-seed", "1", "--impl", "thinned", "--steps", "256", "8", "--n",
            "7", "5", "--every", "5000",
        ]  # fmt: skip
        assert "--transitions" not in last and "--seed" not in last, "rows are those of other seeds"
    assert named["judge.measure"][-3:] == ["--steps", "--every", "5000"]
    assert Path("again/curves/mdlm.csv").is_file() and Path("again/seconds.csv").is_file()
    assert not Path("again/samples").exists()


def test_what_was_cut_before_its_first_step_goes_on(tmp_path: Path, monkeypatch) -> None:
    """It has a checkpoint, of step 0, which training does not write over."""
    script = runpy.run_path(str(RECIPES / "repro" / "run.py"))
    said = pretend(monkeypatch, script)
    monkeypatch.setattr("xdlm.cli.lanes.LaneStudy.step_of_newest", lambda self, run: 0)
    monkeypatch.setattr(
        "xdlm.cli.lanes.latest_checkpoint",
        lambda folder: Path("step-00000000") if folder.name == "udlm" else None,
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py", "--minutes", "1", "--runs", "udlm", "gidd"])
    script["main"]()
    trained = {log: "--resume" in words for log, *words in said if words[0] == "train"}
    assert trained == {"udlm": True, "gidd": False}


def test_each_run_has_all_of_the_time_where_all_have_a_lane(tmp_path: Path, monkeypatch) -> None:
    """And the bundled models are exported when they are done, but not what was cut short."""
    script = runpy.run_path(str(RECIPES / "pocket" / "run.py"))
    said = pretend(monkeypatch, script)
    steps_left = LaneStudy.steps_left
    monkeypatch.setattr(
        "xdlm.cli.lanes.LaneStudy.steps_left",
        lambda self, run: 7 if run == "udlm" else steps_left(self, run),
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["run.py", "--minutes", "9", "--lanes", "4", "--novels", "n.xz"]
    )
    script["main"]()
    named = {log: [*words] for log, *words in said}
    assert named["prepare"][:3] == ["prepare", "--data", "n.xz"]
    for run in ("mdlm", "xdlm", "udlm", "judge"):
        words = named[run]
        assert words[0] == "train"
        assert float(words[words.index("--train.minutes") + 1]) == pytest.approx(9, abs=0.1)
    exported = {log: words[-1] for log, words in named.items() if words[0] == "export"}
    assert exported == dict.fromkeys(["mdlm.export", "xdlm.export", "judge.export"], "int8")


def test_the_last_checkpoint_of_a_run_that_was_cut_is_not_measured(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    script = runpy.run_path(str(RECIPES / "repro" / "run.py"))
    said = pretend(monkeypatch, script)
    monkeypatch.setattr("xdlm.cli.lanes.LaneStudy.steps_left", lambda self, run: 7)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py", "--minutes", "1", "--runs", "udlm", "--last-only"])
    script["main"]()
    assert [log for log, *_ in said if log != "prepare"] == ["udlm"]
    assert "udlm: 7 steps left, not measured" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["pixels", "codes", "small-pixels", "small-codes"])
def test_the_image_study_compares_noise_alone(folder: str) -> None:
    found = {p.stem: load_config(p) for p in (RECIPES / "cifar10" / folder).glob("*.yaml")}
    pixels, small = folder.endswith("pixels"), folder.startswith("small")
    assert sorted(found) == ["gidd", "mdlm", "udlm", "xdlm-k0.1", *(["xdlm-k0.5"] * pixels)]
    one = found["mdlm"]
    for method, config in found.items():
        assert config.process == load_config(RECIPES / "cifar10" / f"{method}.yaml").process
        dynamic = method == "gidd" or not pixels
        assert config.loss.weighting == ("dynamic" if dynamic else "elbo")
        same = replace(
            config,
            process=one.process,
            loss=one.loss,
            train=replace(config.train, out=one.train.out),
        )
        assert same == one and one.model.n_classes == 10
        root = "runs/cifar10-small" if small else "runs/cifar10"
        assert config.train.out == f"{root}/{'pixels' if pixels else 'codes'}-{method}"
        assert pixels or config.data.tokenizer == f"vq:{root}/codec"


def test_the_image_script_trains_measures_and_paints(tmp_path: Path, monkeypatch) -> None:
    """The codec before models of codes, the yardstick and a model's training before its measurement, and
    pictures of a kind as soon as all of it are measured."""
    script = runpy.run_path(str(RECIPES / "cifar10" / "run.py"))
    said = pretend(monkeypatch, script)
    monkeypatch.chdir(tmp_path)
    words = ["--minutes", "1", "--lanes", "2", "--inception", "x.pt", "--train-steps", "70", "--pixels",
             "model.channels=8", "--codec", "batch=4"]  # fmt: skip
    monkeypatch.setattr("sys.argv", ["run.py", *words, "--compile"])
    script["main"]()
    logs = [log for log, *_ in said]
    trained = [(log, *words) for log, *words in said if words[0] == "train"]
    assert sorted(log for log, *_ in trained) == sorted(script["RECIPES"]) and len(trained) == 9
    for log, *words in trained:
        coded = log.startswith("codes-")
        assert ("70" in words) == ("--model.channels" in words) == (not coded) == ("pixels-" in log)
        assert "--train.compile" in words and logs.count(f"{log}.measure") == 1
        assert logs.index(f"{log}.measure") > max(logs.index(log), logs.index("real.measure"))
        assert not coded or logs.index(log) > logs.index("codec")
    assert next(tuple(words[-2:]) for log, *words in said if log == "codec") == ("--batch", "4")
    measured = [words for log, *words in said if "--model" in words and words[0] == "eval"]
    for words in measured:
        scales = ["1"] if "codes" in words[words.index("--model") + 1] else ["1", "2"]
        assert words[words.index("--guidance") + 1 : words.index("--batch")] == scales
        assert words[words.index("--inception") + 1] == "x.pt"
    painted = [words for log, *words in said if words[0] == "paint"]
    assert [words.index("--n") for words in painted] == [6, 6, 6, 7, 7]  # so many models before it
    order = [
        log for log in logs if log.startswith(("paint.", "codes-gidd.m", "pixels-xdlm-k0.1.m"))
    ]
    assert order == ["codes-gidd.measure", *["paint.codes"] * 3, "pixels-xdlm-k0.1.measure",
                     *["paint.pixels"] * 2]  # fmt: skip
    assert logs[-2:] == ["paint.pixels"] * 2


def test_models_of_codes_stay_with_their_codec(tmp_path: Path, monkeypatch) -> None:
    """It is kept for another machine; there, without it, no other one is trained for models that belong to
    the first."""
    script = runpy.run_path(str(RECIPES / "cifar10" / "run.py"))
    said = pretend(monkeypatch, script)
    monkeypatch.chdir(tmp_path)
    words = ["run.py", "--minutes", "1", "--runs", "codes-mdlm", "--no-pictures"]
    monkeypatch.setattr("sys.argv", [*words, "--export", "kept"])
    (tmp_path / "runs/cifar10/codes-mdlm/step-00000009").mkdir(parents=True)
    script["main"]()
    assert (tmp_path / "kept/codec").is_dir() and "codec" in [log for log, *_ in said]
    said.clear()
    (tmp_path / "runs/cifar10/codec").rename(tmp_path / "away")
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="trained with a codec that is not here"):
        script["main"]()
    assert "codec" not in [log for log, *_ in said]


def test_the_image_script_has_a_size_for_a_cpu(tmp_path: Path, monkeypatch) -> None:
    """Recipes and a codec of its own; real images are all measured."""
    script = runpy.run_path(str(RECIPES / "cifar10" / "run.py"))
    said = pretend(monkeypatch, script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["run.py", "--minutes", "1", "--small", "--codec-steps", "7"])
    script["main"]()
    told = {log: words for log, *words in said}
    trained = {words[1] for words in told.values() if words[0] == "train"}
    assert trained == {str(path) for path in (RECIPES / "cifar10").glob("small-*/*.yaml")}
    assert told["codec"][4:] == ["runs/cifar10-small/codec", "--steps", "7", "--batch", "64",
                                 "--shape.channels", "32"]  # fmt: skip
    for of_model in (told["codes-udlm.measure"], told["pixels-udlm.measure"]):
        assert of_model[of_model.index("--n") + 1] == "2500"
    assert "--n" not in told["real.measure"]
    assert all("runs/cifar10-small/features" in w for w in told.values() if w[0] == "eval")


def test_adaptation_differs_in_noise_alone() -> None:
    ours, control = (
        load_config(RECIPES / "repro" / "adapt" / f"{m}.yaml") for m in ("xdlm", "mdlm")
    )
    out = replace(ours.train, out=control.train.out)
    assert replace(ours, process=control.process, train=out) == control
    start = load_config(RECIPES / "repro" / "mdlm.yaml")
    assert control.train.start == start.train.out and control.process == start.process
    assert (control.model, control.data, control.loss) == (start.model, start.data, start.loss)


@pytest.mark.parametrize(("corpus", "method"), TWINS)
def test_a_twin_differs_in_size_alone(corpus: str, method: str) -> None:
    small, large = (recipe(corpus, method, twin=twin) for twin in (True, False))
    for section, free in SIZES.items():
        ours, theirs = (dataclasses.asdict(getattr(c, section)) for c in (small, large))
        for field in ours.keys() - free:
            assert ours[field] == theirs[field], f"{section}.{field}"
    assert small.train.out != large.train.out
    k = method.partition("-k")[2]
    assert small.process.k == (float(k) if k else None)


@pytest.fixture(scope="module")
def data_root(tmp_path_factory) -> Path:
    """Sentences of the embedded corpus, laid out and spaced out as LM1B's are."""
    root = tmp_path_factory.mktemp("data")
    folder = root / "lm1b" / "training-monolingual"
    folder.mkdir(parents=True)
    text = " ".join(islice(read_documents("corpus:train"), 20)).replace("\n", " ")
    lines = [f"{line.strip()} .\n" for line in text.replace(",", " ,").split(". ")[:2000]]
    (folder / "news.en-00001-of-00100").write_text("".join(lines))
    return root


@cache
def rows_of(corpus: str, length: int, frame: bool) -> Rows:
    tokenizer = load_tokenizer("pocket")
    source, limit = ("lm1b:train", None) if corpus == "lm1b" else ("corpus:train", 1)
    return load_rows(source, tokenizer, length, frame=frame, limit=limit)


@pytest.mark.parametrize(("corpus", "method"), TWINS)
def test_twins_train(
    tmp_path: Path, monkeypatch, data_root: Path, corpus: str, method: str
) -> None:
    """An untrained model predicts all tokens alike: its bound is the logarithm of their number, up to the
    spread of one batch. Two steps lower it on the batch and under the noise of the first."""
    monkeypatch.setenv("XDLM_DATA", str(data_root))
    config = recipe(corpus, method, twin=True)
    train = replace(config.train, out=str(tmp_path), steps=2, eval_every=0, device="cpu")
    config = replace(config, train=train)
    tokenizer = load_tokenizer(config.data.tokenizer)
    trainer = Trainer(config, tokenizer, rows_of(corpus, config.data.length, config.data.frame))
    ((batch, _),) = trainer.loader.batches(0)
    assert (batch.tokens[:, 0] == tokenizer.bos_id).all()
    assert (batch.tokens[:, -1] == tokenizer.eos_id).all()

    def bound() -> float:
        model = trainer.model.eval()
        with torch.no_grad():
            sums = trainer.loss(model, batch, seed=0, step=0, global_batch=train.batch)
        return float(sums.elbo) / batch.tokens.numel()

    before = bound()
    assert before == pytest.approx(math.log(tokenizer.size), rel=0.15)
    assert trainer.run()
    assert bound() < before - 1e-4
    assert (tmp_path / "step-00000002").is_dir()


def test_sentences_are_packed_and_wrapped(monkeypatch, data_root: Path) -> None:
    """A row of LM1B runs on from sentence to sentence, each with its end token, between ends of its own."""
    monkeypatch.setenv("XDLM_DATA", str(data_root))
    rows, tokenizer = rows_of("lm1b", 32, True), load_tokenizer("pocket")
    sentences = list(read_documents("lm1b:train"))
    assert len(sentences) > 1900 and not any(" , " in s for s in sentences)
    inner = rows.take(range(50))[:, 1:-1].flatten()
    stream = [i for s in sentences[:200] for i in [*tokenizer.encode(s), tokenizer.eos_id]]
    assert inner.tolist() == stream[: len(inner)]
    assert tokenizer.eos_id in inner.tolist()


def test_llada_is_trained_on_as_in_the_paper() -> None:
    ours, control = (load_config(RECIPES / "llada" / f"cpt-{m}.yaml") for m in ("xdlm", "mdlm"))
    out = replace(ours.train, out=control.train.out)
    assert replace(ours, process=control.process, train=out) == control
    assert (ours.process, control.process.kind) == (ProcessConfig("mixed", k=0.1), "masked")
    optim, train = ours.optim, ours.train
    assert (optim.lr, optim.warmup, optim.weight_decay, optim.clip) == (2e-5, 100, 0.1, 1.0)
    assert (train.steps, train.batch, ours.data.length, train.parallel) == (600, 512, 4096, "fsdp")
    assert ours.vocab(126349) == Vocab(126464, 126336)
