"""What the task files call: rows, prompts and verdicts."""

from __future__ import annotations

from functools import partial
from typing import Any

from xdlm.evaluation.harness import answers
from xdlm.evaluation.harness.benchmarks import SETS, Row
from xdlm.evaluation.harness.trials import tried


def _dataset(name: str, **_: Any) -> dict[str, Any]:
    from datasets import Dataset

    examples, questions = SETS[name]()
    parts = {"examples": examples, "questions": questions}
    return {part: Dataset.from_list(rows) for part, rows in parts.items()}


gsm8k, math, math500, bbh, humaneval, mbpp = (partial(_dataset, name) for name in SETS)


def score_gsm8k(row: Row, replies: list[str]) -> dict[str, float]:
    right = answers.marked_number(row["answer"])
    return {
        "exact_match": float(answers.last_number(replies[0]) == right),
        "marked_match": float(answers.marked_number(replies[0]) == right),
    }


def score_math(row: Row, replies: list[str]) -> dict[str, float]:
    right = answers.final_answer(row["solution"]) or ""
    return {"exact_match": float(answers.is_same_math(answers.final_answer(replies[0]), right))}


def score_bbh(row: Row, replies: list[str]) -> dict[str, float]:
    said = answers.reasoned_answer(replies[0])
    return {"exact_match": float(answers.is_same_choice(said, row["target"]))}


def all_replies(replies: list[list[str]], rows: list[Row]) -> list[list[str]]:
    """Every program of a problem is tried, not the first alone."""
    return replies


def program_humaneval(row: Row, reply: str) -> str:
    return f"{row['prompt']}{answers.code_of(reply)}\n{row['test']}\ncheck({row['entry_point']})\n"


def program_mbpp(row: Row, reply: str) -> str:
    """Setup uses what the solution defines, so it comes after it."""
    return "\n".join([answers.code_of(reply), row["test_setup_code"], *row["test_list"]])


def score_humaneval(row: Row, replies: list[list[str]]) -> dict[str, float]:
    return tried([program_humaneval(row, reply) for reply in replies[0]])


def score_mbpp(row: Row, replies: list[list[str]]) -> dict[str, float]:
    return tried([program_mbpp(row, reply) for reply in replies[0]])
