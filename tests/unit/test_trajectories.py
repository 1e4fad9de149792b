"""Trajectories as data: events that hold the whole run, files in four formats, and the viewer."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from xdlm import UserError, Vocab
from xdlm.api import load
from xdlm.cli.main import main
from xdlm.models import PRESETS, DiT
from xdlm.noise import Mixed
from xdlm.ops import forbid
from xdlm.report import Recording, read_recording, trajectory_gif
from xdlm.report.exporting import export
from xdlm.report.recording import events, schema
from xdlm.report.viewer import Place
from xdlm.sampling import Change, SamplerConfig, Trajectory, sample, time_grid
from xdlm.structs import is_special


@pytest.fixture(scope="module")
def recording() -> Recording:
    model = load("pocket", device="cpu").mixed(0.5)
    drawn = model.sample(2, steps=6, length=24, seed=1)
    assert drawn.trajectory is not None
    assert all(sum(counts) for counts in drawn.trajectory.counts().values()), "want all kinds"
    return Recording.of(drawn.trajectory, model.tokenizer, {"steps": "6"})


def errors(value: Any, schema: dict[str, Any], at: str = "$") -> Iterator[str]:
    """Where a value breaks a schema, for the keywords that ours uses; another one is an error here."""
    known = {
        "$schema", "title", "description", "type", "required", "additionalProperties", "properties",
        "const", "items", "prefixItems", "minItems", "maxItems", "minimum", "maximum",
        "enum",
    }  # fmt: skip
    assert set(schema) <= known, set(schema) - known
    types = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
             "null": type(None)}  # fmt: skip
    allowed = schema.get("type", [])
    allowed = [allowed] if isinstance(allowed, str) else allowed
    if allowed and not any(isinstance(value, types[name]) for name in allowed):
        yield f"{at}: {value!r} is no {allowed}"
        return
    if value not in schema.get("enum", [schema.get("const", value)]):
        yield f"{at}: {value!r}"
    if isinstance(value, (int, float)) and not (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
    ):
        yield f"{at}: {value} out of range"
    if isinstance(value, dict):
        inner = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        yield from (f"{at}: no {name}" for name in schema.get("required", []) if name not in value)
        for name, item in value.items():
            if name in inner:
                yield from errors(item, inner[name], f"{at}.{name}")
            elif isinstance(rest, dict):
                yield from errors(item, rest, f"{at}.{name}")
            elif not rest:
                yield f"{at}: unknown {name}"
    if isinstance(value, list):
        least, most = schema.get("minItems", 0), schema.get("maxItems", len(value))
        if not least <= len(value) <= most:
            yield f"{at}: {len(value)} items"
        first = schema.get("prefixItems", [])
        for i, item in enumerate(value):
            rule = first[i] if i < len(first) else schema.get("items", {})
            yield from errors(item, rule, f"{at}[{i}]") if rule is not False else [f"{at}[{i}]"]


def test_document_fits_its_schema(recording: Recording) -> None:
    data = json.loads(recording.to_json())
    assert list(errors(data, schema())) == []
    data["samples"][0]["events"][0][4] = 1.5
    data["samples"][1]["events"][0].append(0)
    del data["times"]
    assert len(list(errors(data, schema()))) >= 3


def test_file_gives_the_run_back(recording: Recording, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(recording.to_json(), encoding="utf-8")
    back = read_recording(file)
    path, again = recording.trajectory, back.trajectory
    assert torch.equal(again.frames, path.frames.to(again.frames.dtype))
    assert (again.times, again.special_ids) == (path.times, path.special_ids)
    moved = path.changes() > 0
    assert torch.allclose(again.probs[moved], path.probs[moved], atol=1e-6, equal_nan=True)
    assert (back.spelling, back.details) == (recording.spelling, recording.details)
    assert back.to_json() == recording.to_json()


def test_events_are_the_changes(recording: Recording) -> None:
    path = recording.trajectory
    mask = path.special_ids[0]
    for number in range(2):
        listed = list(events(path, number))
        assert len(listed) == int((path.only(number).changes() > 0).sum())
        assert listed == sorted(listed, key=lambda event: event[:2])
        for event in listed:
            assert event.before != event.after
            assert path.frames[event.step - 1, number, event.position] == event.before
            assert path.frames[event.step, number, event.position] == event.after
            # A mask is never the idea of the model.
            assert event.after != mask or event.probability is None
        assert sum(event.probability is not None for event in listed) > len(listed) / 3


@pytest.mark.parametrize("impl", ["thinned", "dense", "gumbel", "starved"])
def test_probabilities_are_the_models(impl: str) -> None:
    """Each step's model is asked again, about all tokens at once, before temperature and nucleus."""
    from xdlm.sampling import Filter

    torch.manual_seed(0)
    vocab = Vocab(30, 7)
    model = DiT(PRESETS["nano"], vocab.size).eval()
    torch.nn.init.normal_(model.out.weight, std=0.5)
    process = Mixed(vocab, k=0.5)
    config = SamplerConfig(steps=6, impl=impl, filter=Filter(0.7, 0.9))
    path = sample(model, process, batch=4, length=20, config=config, record=True).trajectory
    assert path is not None and path.probs is not None
    checked = 0
    for i, leg in enumerate(time_grid(process, 6, torch.zeros(4))):
        before, after = path.frames[i].long(), path.frames[i + 1].long()
        with torch.no_grad():
            law = forbid(model(before, torch.full((4,), leg.t)), process.special_ids).softmax(-1)
        said = path.probs[i]
        told = ~said.isnan() & (before != after)
        assert not (told & is_special(after, process.special_ids)).any()
        expected = law.gather(-1, after[..., None])[..., 0]
        assert torch.allclose(said[told], expected[told], atol=1e-5)
        checked += int(told.sum())
    assert checked > 40


def test_probabilities_of_confidence_decoding() -> None:
    """At temperature 0 what is written has the highest probability there is."""
    model = load("pocket", device="cpu")
    path = model.sample(
        1, prompt="It was", length=16, steps=14, sampler="confidence", temperature=0.0
    ).trajectory
    assert path is not None and path.probs is not None
    written = path.changes() > 0
    assert torch.equal(~path.probs.isnan() & written, written)
    assert ((path.probs[written] > 0) & (path.probs[written] <= 1)).all()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda d: d.update(format="other"), "is not a trajectory"),
        (lambda d: d.update(version=9), "version 9"),
        (lambda d: d.pop("samples"), "damaged"),
        (lambda d: d["samples"].append({"first": [1], "events": []}), "damaged"),
        (lambda d: d["samples"][0]["events"][0].pop(), "damaged"),
        (lambda d: d["samples"][0]["events"][0].__setitem__(1, 999), "outside the run"),
        (lambda d: d["samples"][0]["events"][0].__setitem__(2, 3), "does not follow"),
        (lambda d: d.update(tokens=[]), "tokens without text"),
        (lambda d: d.update(samples=[]), "damaged"),
    ],
)
def test_damaged_files_are_told(recording: Recording, tmp_path: Path, damage, says) -> None:
    data = json.loads(recording.to_json())
    damage(data)
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(UserError, match=says):
        read_recording(tmp_path / "run.json")


def test_svg_stands_alone_and_shows_the_text(recording: Recording, tmp_path: Path) -> None:
    export(recording, tmp_path / "run.svg", title="a run")
    drawing = (tmp_path / "run.svg").read_text()
    text = "".join(ElementTree.fromstring(drawing).itertext()).replace("\xa0", " ")
    assert "step 0/7" in text and "step 7/7" in text
    addresses = set(re.findall(r"https?://[^\s\"')]+", drawing))
    assert addresses == {"http://www.w3.org/2000/svg"}
    last = recording.pieces(recording.trajectory.frames[-1, 0].tolist())
    assert any(len(piece.strip()) > 3 and piece.strip() in text for piece in last)


def test_gif_has_every_frame(recording: Recording) -> None:
    Image = pytest.importorskip("PIL.Image")
    picture = Image.open(io.BytesIO(trajectory_gif(recording.trajectory, recording)))
    assert picture.n_frames == recording.trajectory.steps + 1
    colours = []
    for frame in range(picture.n_frames):
        picture.seek(frame)
        colours.append({c for _, c in picture.convert("RGB").getcolors(1 << 16)})
    green = (0x22, 0x8B, 0x22)
    unmasked = recording.trajectory.only(0).counts()[Change.UNMASK]
    assert [green in seen for seen in colours[1:]] == [n > 0 for n in unmasked]


def test_gif_of_a_still_run_and_hostile_text() -> None:
    pytest.importorskip("PIL.Image")
    path = Trajectory(torch.tensor([[[0, 1, 2]]]), (1.0,), (2,))
    recording = Recording(path, {0: "\x1b[31m\n", 1: "long" * 400, 2: ""}, {})
    assert trajectory_gif(path, recording).startswith(b"GIF8")


def test_keys_lead_through_a_run(recording: Recording) -> None:
    place, seen = Place(0, 0), []
    for key in ("left", "right", "right", "end", "right", "down", "down", "up", "home", "play"):
        place = place.after(key, recording)
        seen.append((place.frame, place.sample))
    assert seen == [(0, 0), (1, 0), (2, 0), (7, 0), (7, 0), (7, 1), (7, 1), (7, 0), (0, 0), (0, 0)]
    while place.playing:
        place = place.tick(recording)
    assert place.frame == 7
    assert replace(place).after("play", recording) == Place(0, 0, playing=True), "from the start"


def test_sample_then_view(capsys, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    main(["sample", "--n", "2", "--steps", "3", "--length", "10", "--trajectory", str(file)])
    capsys.readouterr()
    main(["view", str(file), "--sample", "2", "--frames", "99"])
    shown = capsys.readouterr().out
    assert [int(n) for n in re.findall(r"step (\d+)/4", shown)] == [0, 1, 2, 3, 4]
    for ending in ("html", "svg", "json"):
        main(["view", str(file), "--to", str(tmp_path / f"again.{ending}")])
        assert (tmp_path / f"again.{ending}").stat().st_size > 500
    assert (tmp_path / "again.json").read_text() == file.read_text()
    with pytest.raises(SystemExit):
        main(["view", str(file), "--sample", "3"])
    assert "--sample must lie in 1..2" in capsys.readouterr().err


def test_viewer_on_a_real_terminal(recording: Recording, tmp_path: Path) -> None:
    """A pseudo-terminal of our own: arrows move, q leaves with exit code 0 and the settings restored."""
    file = tmp_path / "run.json"
    file.write_text(recording.to_json(), encoding="utf-8")
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm", COLUMNS="100", LINES="40")
        os.execv(sys.executable, [sys.executable, "-m", "xdlm.cli.main", "view", str(file)])
    seen = ""

    def wait_for(what: str) -> None:
        nonlocal seen
        until = time.monotonic() + 60
        while what not in seen and time.monotonic() < until:
            if select.select([terminal], [], [], 0.2)[0]:
                seen += os.read(terminal, 65536).decode(errors="replace")
        assert what in seen, seen[-500:]

    wait_for("step 0/7")
    os.write(terminal, b"\x1b[C")
    wait_for("step 1/7")
    os.write(terminal, b"G")
    wait_for("step 7/7")
    os.write(terminal, b"q")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(terminal)


def test_without_a_terminal_frames_are_printed(recording: Recording, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(recording.to_json(), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "xdlm.cli.main", "view", str(file)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "step 0/7" in done.stdout and "step 7/7" in done.stdout and "\x1b" not in done.stdout
