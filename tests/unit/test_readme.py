"""What the README says is what happens: its commands and its Python example are run from its text."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from xdlm.cli.main import main

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("  #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)
    for line in block.splitlines()
    if line.startswith("xdlm ")
]
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


def test_the_two_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ("demo", "test"):
        assert f"make {command}" in README
        assert f"\n{command}:" in makefile
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.slow
def test_commands_run(tmp_path: Path, monkeypatch, capsys) -> None:
    """In order and in one folder, since later ones use what earlier ones made."""
    assert {shlex.split(c)[1] for c in COMMANDS} >= {"sample", "train", "eval", "tokenizer", "demo"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "my-texts").mkdir()
    words = " ".join(f"Sentence number {i} is not like the others." for i in range(3000))
    (tmp_path / "my-texts" / "a.txt").write_text(words)
    for command in COMMANDS:
        words = shlex.split(command)[1:]
        more = [SHORTER.get(" ".join(words[:n]), []) for n in (1, 2)]
        if "prepared/" in command:  # shards hold all of a text
            more.pop()
        main([*words, *more[0], *(more[1] if len(more) > 1 else [])])
    assert (tmp_path / "xdlm-demo" / "trajectory.html").stat().st_size > 1000
    assert (tmp_path / "xdlm-demo" / "overview.png").read_bytes()[:4] == b"\x89PNG"


def test_python_example_runs(capsys) -> None:
    assert EXAMPLES
    for example in EXAMPLES:
        exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_pictures_exist() -> None:
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", README)
    assert pictures
    for picture in pictures:
        assert (ROOT / picture).is_file()
