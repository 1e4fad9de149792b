"""What the README and the guides say is what happens: their commands and Python examples are run from their
text, options of commands that are too large to run exist, and links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from xdlm.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
}
#: Their examples speak to a server, and have tests of their own.
OF_A_SERVER = "docs/serving.md"
#: Flags that make a command short enough for a test; the command itself stays as printed.
SHORTER = {
    "demo": ["--train-steps", "6", "--rows", "4", "--steps", "4", "--texts", "2"],
    "sample": ["--steps", "4"],
    "train": ["--train.steps", "4", "--train.eval-every", "4", "--train.eval-rows", "4"],
    "train recipes/cpu-tiny.yaml": ["--data.limit", "2"],
    "bench": ["--repeats", "1", "--warmup", "1", "--sample-repeats", "1", "--steps", "2"],
    "eval ppl": ["--max-rows", "4", "--draws", "1"],
    "eval gen": ["--length", "16"],
    "eval dynamics": ["--steps", "2", "--draws", "1", "--judge", "pocket-judge"],
}  # fmt: skip


def blocks(page: str, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    return [block for its_language, block in fenced if its_language == language]


def commands(page: str, language: str) -> list[str]:
    lines = "".join(blocks(page, language)).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.startswith("xdlm ")]


RUN = {name: commands(page, "bash") for name, page in PAGES.items()}
SHOWN = [command for page in PAGES.values() for command in commands(page, "")]
EXAMPLES = [
    (name, example)
    for name, page in PAGES.items() if name != OF_A_SERVER
    for example in blocks(page, "python")
]  # fmt: skip


def test_the_two_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert f"\n{command}:" in makefile
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, found in RUN.items() if found])
def test_commands_run(name: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """In order and in one folder, since later ones use what earlier ones made."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "my-texts").mkdir()
    words = " ".join(f"Sentence number {i} is not like the others." for i in range(3000))
    (tmp_path / "my-texts" / "a.txt").write_text(words)
    for command in RUN[name]:
        words = shlex.split(command)[1:]
        more = [SHORTER.get(" ".join(words[:n]), []) for n in (1, 2)]
        if "prepared/" in command:  # shards hold all of a text
            more.pop()
        if "--resume" in command:  # it goes on
            more = [["--train.steps", "6", *more[0][2:]]]
        main([*words, *more[0], *(more[1] if len(more) > 1 else [])])
    if name == "README.md":
        assert {shlex.split(c)[1] for c in RUN[name]} >= {"sample", "train", "eval", "demo"}
        assert (tmp_path / "xdlm-demo" / "trajectory.html").stat().st_size > 1000
        assert (tmp_path / "xdlm-demo" / "overview.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name, example", EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_python_examples_run(name: str, example: str, capsys) -> None:
    exec(compile(example, name, "exec"), {"__name__": name})


@pytest.mark.parametrize("command", sorted(set(SHOWN)))
def test_options_of_commands_that_are_only_shown_exist(command: str, capsys) -> None:
    words = shlex.split(command)[1:]
    grouped = words[0] == "eval" or words[:2] == ["prepare", "imagenet"]
    with pytest.raises(SystemExit):
        main([*words[: 2 if grouped else 1], "--help"])
    known = set(re.findall(r"--[a-z][\w.-]*", capsys.readouterr().out))
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known
    for word in words:
        if word.startswith("recipes/"):
            assert (ROOT / word).is_file()


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", PAGES[name])
    for target in ("".join(pair) for pair in targets):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target


def anchors(page: str) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
