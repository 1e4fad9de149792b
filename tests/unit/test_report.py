"""Pages, panels and figures: true to the run, and safe whatever a token's text is."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from xdlm import UserError, Vocab
from xdlm.models import PRESETS, DiT
from xdlm.noise import Mixed
from xdlm.report import (
    LOOKS,
    MASK,
    frame_text,
    plot_loss,
    plot_overview,
    plot_transitions,
    trajectory_page,
    trajectory_panel,
    visible,
)
from xdlm.sampling import Change, SamplerConfig, Trajectory, sample

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "[bold red]x[/]",
    "\"'&amp;",
    "a\nb",
    "\x1b[31m",
    "{{title}}",
    "\u202e<img onerror=alert(1)>",
]
MASK_ID = len(HOSTILE)


class Words:
    """As much of a tokenizer as reports need, with the words of our choice."""

    def pieces(self, ids: Iterable[int]) -> list[str]:
        return [HOSTILE[i] if i < MASK_ID else "" for i in ids]


class Harmless(Words):
    def pieces(self, ids: Iterable[int]) -> list[str]:
        return ["x" for _ in ids]


@pytest.fixture(scope="module")
def path() -> Trajectory:
    """A real run of an untrained model over three sequences."""
    torch.manual_seed(0)
    vocab = Vocab(MASK_ID + 1, MASK_ID)
    model = DiT(PRESETS["nano"], vocab.size).eval()
    process = Mixed(vocab, k=0.5)
    config = SamplerConfig(steps=8)
    result = sample(model, process, batch=3, length=20, config=config, seed=1, record=True)
    assert result.trajectory is not None
    assert all(sum(counts) for counts in result.trajectory.counts().values()), "want all kinds"
    return result.trajectory


@pytest.fixture
def small() -> Trajectory:
    """Words by hand: one of each kind of change, a token that stays, and a mask that stays."""
    m = MASK_ID
    frames = torch.tensor([[[m, 3, 2, 6, m]], [[2, 4, m, 6, m]]])
    return Trajectory(frames, (1.0, 0.0), (m,))


class Reader(HTMLParser):
    """Collects the tags, and the text inside each script, as a browser would delimit them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] and self.tags[-1][0] == "script":
            self.scripts[-1] += data
        self.text.append(data)


def page_of(path: Trajectory, **kwargs) -> str:
    kwargs = {"title": "a run", "details": {"steps": "8"}} | kwargs
    return trajectory_page(path, Words(), **kwargs)  # type: ignore[arg-type]


def test_page_needs_nothing_from_outside(path: Trajectory) -> None:
    page = page_of(path)
    for outside in ("http:", "https:", "@import", "url(", "src=", "href=", "//cdn", "fetch("):
        assert outside not in page
    names = {name for _, attributes in Reader(page).tags for name in attributes}
    assert not any(name.startswith("on") for name in names), "inline event handlers"
    assert "default-src 'none'" in page


def test_page_holds_every_frame(path: Trajectory) -> None:
    data = json.loads(Reader(page_of(path)).scripts[0])
    ids = torch.tensor(data["ids"])
    assert data["times"] == pytest.approx(list(path.times), abs=1e-6)
    assert [data["ids"][i] for i in data["masks"]] == [MASK_ID]
    assert len(data["samples"]) == 3
    changes = path.changes()
    for number, packed in enumerate(data["samples"]):
        frame = torch.tensor(packed["first"])
        assert torch.equal(ids[frame], path.frames[0, number])
        assert len(packed["steps"]) == path.steps
        for step, flat in enumerate(packed["steps"]):
            position, token, kind, prob = torch.tensor(flat, dtype=torch.int64).view(-1, 4).T
            frame[position] = token
            assert torch.equal(ids[frame], path.frames[step + 1, number])
            assert torch.equal(kind, changes[step, number, position].long())
            known = path.probs[step, number, position].nan_to_num(-0.001)
            assert torch.equal(prob, (1000 * known).round().long())
            # Nothing that changed is missing.
            assert len(position) == int((changes[step, number] > 0).sum())


def test_hostile_text_stays_text(path: Trajectory) -> None:
    harmless = Reader(trajectory_page(path, Harmless(), title="x", details={"a": "b"}))  # type: ignore[arg-type]
    evil = "<script>alert('{{data}}')</script>"
    page = page_of(path, title=evil, details={evil: '"><b onclick=alert(1)>'})
    hostile = Reader(page)
    # The same elements, whatever the text: nothing broke out of where it was put.
    assert hostile.tags == harmless.tags
    pieces = json.loads(hostile.scripts[0])["pieces"]
    assert set(pieces) >= {HOSTILE[i] for i in path.frames[-1].unique().tolist()}
    assert evil in "".join(hostile.text), "shown as it is, placeholders included"


def test_page_is_small() -> None:
    """Four samples of 128 tokens in 33 steps, even if every step moves a fifth of the tokens."""
    generator = torch.Generator().manual_seed(0)
    frames = [torch.randint(0, MASK_ID + 1, (4, 128), generator=generator)]
    for _ in range(33):
        fresh = torch.randint(0, MASK_ID + 1, (4, 128), generator=generator)
        moves = torch.rand(4, 128, generator=generator) < 0.2
        frames.append(torch.where(moves, fresh, frames[-1]))
    times = tuple(1 - i / 33 for i in range(34))
    page = page_of(Trajectory(torch.stack(frames), times, (MASK_ID,)))
    assert len(page.encode()) < 200_000


def test_page_of_a_run_without_masks_or_steps() -> None:
    path = Trajectory(torch.tensor([[[0, 1]]]), (1.0,), ())
    data = json.loads(Reader(page_of(path)).scripts[0])
    assert (data["masks"], data["samples"]) == ([], [{"first": [0, 1], "steps": []}])


def test_page_parts_fit_together(path: Trajectory) -> None:
    """Each id and count that the script asks for is there, and each class that it sets has a style."""
    page = page_of(path)
    reader = Reader(page)
    present = {attributes.get("id") for _, attributes in reader.tags}
    wanted = set(re.findall(r'byId\("([\w-]+)"\)', page))
    assert len(wanted) > 6
    assert wanted <= present
    script = reader.scripts[1]
    assert re.findall(r"^(?:import|export)\b", script, re.MULTILINE) == [], "its modules are one"
    names = re.findall(r"^(?:const|let|class|function) (\w+)", script, re.MULTILINE)
    assert len(names) > 20 and len(set(names)) == len(names), "and share a scope"
    for look in (*LOOKS.values(), MASK):
        assert f'class="count-{look.name}"' in page
        assert f".{look.name} {{" in page
        assert f"--{look.name}: {look.colour};" in page


def test_frame_colours_what_changed(small: Trajectory) -> None:
    pieces = Words().pieces(small.frames[1, 0].tolist())
    text = frame_text(small, pieces, 1)
    shown = [(text.plain[s.start : s.end], s.style) for s in text.spans]
    styled = [(piece, style.color.name, bool(style.bold)) for piece, style in shown if style]
    assert styled == [
        ("[bold red]x[/]", LOOKS[Change.UNMASK].colour.lower(), True),
        ("a↵b", LOOKS[Change.REFINE].colour.lower(), True),
        ("░", LOOKS[Change.REMASK].colour.lower(), True),
        ("░", MASK.colour.lower(), False),
    ]
    assert text.plain == "[bold red]x[/]a↵b░{{title}}░"


def test_first_frame_has_no_changes(small: Trajectory) -> None:
    text = frame_text(small, Words().pieces(small.frames[0, 0].tolist()), 0)
    assert not any(span.style.bold for span in text.spans if span.style)  # type: ignore[union-attr]


def shown(renderable) -> str:
    console = Console(width=100, file=StringIO())
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


@pytest.mark.parametrize(
    ("n_frames", "steps"), [(1, [9]), (2, [0, 9]), (4, [0, 3, 6, 9]), (99, list(range(10)))]
)
def test_panel_selects_frames(path: Trajectory, n_frames: int, steps: list[int]) -> None:
    assert path.steps == 9
    text = shown(trajectory_panel(path, Words(), sample=1, n_frames=n_frames))  # type: ignore[arg-type]
    assert [int(step) for step in re.findall(r"step (\d+)/9", text)] == steps
    assert all(look.name in text for look in (*LOOKS.values(), MASK))


def test_panel_counts_are_those_of_the_sample(path: Trajectory) -> None:
    text = shown(trajectory_panel(path, Words(), sample=2, n_frames=99))  # type: ignore[arg-type]
    for kind, look in LOOKS.items():
        told = [int(n) for n in re.findall(rf"(\d+) {look.name}", text)]
        assert told == [n for n in path.only(2).counts()[kind] if n]
    assert "\x1b" not in text
    with pytest.raises(UserError):
        trajectory_panel(path, Words(), n_frames=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (" the", " the"),
        ("\n\n", "↵↵"),
        ("\t\r", "⇥␍"),
        ("\x1b[0m\x7f", "␛[0m␡"),
        ("\x9b", "\\u009b"),
        ("\u202eabc", "\\u202eabc"),
        ("👩\u200d🔬", "👩\u200d🔬"),
        ("", "∅"),
    ],
)
def test_visible(piece: str, expected: str) -> None:
    assert visible(piece) == expected


RECORDS = [{"step": 10 * i, "loss": 8.0 / (i + 1)} for i in range(60)] + [
    {"step": 300, "val_nats": 1.5, "val_stderr": 0.1, "val_ppl": 4.5},
    {"step": 600, "val_nats": 1.2},
]


def size_of_png(file: Path) -> tuple[int, int]:
    content = file.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def test_figures(path: Trajectory, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    had_pyplot = "matplotlib.pyplot" in sys.modules
    plot_transitions(path, tmp_path / "new" / "transitions.png")
    plot_loss(RECORDS, tmp_path / "loss.png", reference=2.0, reference_name="unigrams")
    plot_loss(RECORDS[:1], tmp_path / "short.png")
    plot_overview(path, RECORDS, tmp_path / "both.png")
    width, height = size_of_png(tmp_path / "new" / "transitions.png")
    assert width > 600
    assert height > 400
    assert size_of_png(tmp_path / "loss.png") == (width, height)
    assert size_of_png(tmp_path / "short.png") == (width, height)
    assert size_of_png(tmp_path / "both.png") == (2 * width, height)
    # pyplot may want a display, and keeps figures alive.
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
    names = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert names == {"transitions.png", "loss.png", "short.png", "both.png"}


def test_figure_that_cannot_be_written(path: Trajectory, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*folder\.png"):
        plot_transitions(path, tmp_path / "folder.png")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="cannot write"):
        plot_loss(RECORDS, tmp_path / "file" / "loss.png")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder.png"]


def test_log_without_a_loss(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match="no loss"):
        plot_loss([{"step": 1, "val_nats": 2.0}], tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())


def test_missing_matplotlib(path: Trajectory, tmp_path: Path, monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'xdlm\[log\]'"):
        plot_transitions(path, tmp_path / "x.png")
