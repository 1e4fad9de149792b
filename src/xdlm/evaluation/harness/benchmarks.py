"""The benchmarks' rows, from the folder `benchmarks` of local data: what is asked, and what is right.

Every set comes as (examples, questions); the examples stand in front of every question and are never among
the questions.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from xdlm.data import data_root
from xdlm.errors import UserError

Row = dict[str, Any]
Examples = list[Row]
Questions = list[Row]


def folder() -> Path:
    return Path(data_root()) / "benchmarks"


def gsm8k() -> tuple[Examples, Questions]:
    """Four of the training questions, and all test questions."""
    return _lines("gsm8k/train.jsonl")[:4], _lines("gsm8k/test.jsonl")


def math() -> tuple[Examples, Questions]:
    """There is no training part among the files, so four of the test problems are the examples, and are
    left out of the 5,000: easy ones of four subjects that are not in MATH-500 either."""
    rows = _lines("math/test.jsonl")
    asked = {row["problem"] for row in _lines("math/math500_test.jsonl")}
    easy: dict[str, Row] = {}
    for row in rows:
        brief = row["level"] in ("Level 1", "Level 2") and len(row["solution"]) < 400
        if brief and row["problem"] not in asked and "[asy]" not in row["problem"]:
            easy.setdefault(row["type"], row)
    examples = [easy[subject] for subject in sorted(easy)[:4]]
    return examples, [row for row in rows if row not in examples]


def math500() -> tuple[Examples, Questions]:
    """The same examples, and all of the 500."""
    return math()[0], _lines("math/math500_test.jsonl")


def bbh() -> tuple[Examples, Questions]:
    """All 27 subtasks in turn, so that a limited number of questions is spread over them. The three worked
    examples of a subtask are in its rows, as the published prompt without its heading."""
    subtasks = []
    for file in sorted((_existing("bbh/bbh")).glob("*.json")):
        prompt = _existing(f"bbh/cot-prompts/{file.stem}.txt").read_text(encoding="utf-8")
        prompt = prompt.partition("-----\n")[2].strip()
        rows = json.loads(file.read_text(encoding="utf-8"))["examples"]
        subtasks.append([{**row, "subtask": file.stem, "prompt": prompt} for row in rows])
    in_turn = chain.from_iterable(zip_longest(*subtasks))
    return [], [row for row in in_turn if row is not None]


def humaneval() -> tuple[Examples, Questions]:
    """All 164, without examples."""
    return [], _lines("humaneval/HumanEval.jsonl.gz")


def mbpp() -> tuple[Examples, Questions]:
    """Problems 11 to 510, the 500 of the published test part; 2, 3 and 4 are the examples."""
    rows = {row["task_id"]: row for row in _lines("mbpp/mbpp.jsonl")}
    for row in rows.values():
        row["code"] = row["code"].replace("\r\n", "\n")
    return [rows[i] for i in (2, 3, 4)], [rows[i] for i in range(11, 511)]


SETS: dict[str, Callable[[], tuple[Examples, Questions]]] = {
    "gsm8k": gsm8k,
    "math": math,
    "math500": math500,
    "bbh": bbh,
    "humaneval": humaneval,
    "mbpp": mbpp,
}


def _lines(name: str) -> list[Row]:
    file = _existing(name)
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{file} is damaged: {error}") from error


def _existing(name: str) -> Path:
    place = folder() / name
    if not place.exists():
        raise UserError(f"no {place}; put the benchmarks there, or say where with XDLM_DATA")
    return place
