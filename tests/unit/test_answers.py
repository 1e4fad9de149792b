"""What an answer says in the end, in the spellings that models use."""

from __future__ import annotations

import pytest

from xdlm.evaluation.harness import answers


@pytest.mark.parametrize(("text", "number"), [
    ("She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18", "18"), ("so $1,018.00.", "1018"),
    ("it is -3", "-3"), ("about 2.50 each", "2.5"), ("I do not know", None), ("in 1990.", "1990"),
])  # fmt: skip
def test_last_number(text: str, number: str | None) -> None:
    assert answers.last_number(text) == number


def test_marked_number_asks_for_the_mark() -> None:
    assert answers.marked_number("so\n#### 1,200\n") == "1200"
    assert answers.marked_number("so 1200") is None


@pytest.mark.parametrize(("text", "content"), [
    (r"so $\boxed{2}$ and $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"), (r"$\boxed 7$ is it", "7"),
    (r"\fbox{x}", "x"), (r"\boxed{unfinished", None), ("nothing", None),
])  # fmt: skip
def test_boxed(text: str, content: str | None) -> None:
    assert answers.boxed(text) == content


SAME = [
    (r"\frac12", r"\dfrac{1}{2}", "1/2", r"\frac{1}{2}"), (".5", "0.50", "0.5"), ("1,000", "1000"),
    ("x = 5", "5", r"5\text{ cm}", "5.", "$5$"), (r"\text{(A)}", "(A)", r"\text{A}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"), (r"\frac{-1}{2}", r"-\frac{1}{2}"),
    (r"\sqrt2", r"\sqrt{2}"), (r"90^\circ", "90"), (r"10\%", "10"), (r"\text{neither}", "neither"),
]  # fmt: skip


def test_one_spelling_of_the_same_and_others_of_others() -> None:
    groups = [{answers.plain_math(spelling) for spelling in same} for same in SAME]
    assert all(len(group) == 1 for group in groups)
    assert len(set.union(*groups)) == len(groups)
    assert not answers.is_same_math(None, "5")


def test_final_answer_prefers_the_box() -> None:
    assert answers.final_answer(r"the answer is 3. So $\boxed{4}$") == "4"
    assert answers.final_answer("The answer is: $12$. I hope so.") == "$12$"
    assert answers.final_answer("no idea") is None


@pytest.mark.parametrize(("text", "right", "counts"), [
    ("So the answer is (B).", "(B)", True), ("So the answer is (B) 12/14/2026.", "(B)", True),
    ("So the answer is B.", "(B)", True), ("So the answer is (C).", "(B)", False),
    ("So the answer is False.", "False", True), ("So the answer is not False.", "False", False),
    ("So the answer is ] > ).", "] > )", True), ("Thus (B).", "(B)", False),
])  # fmt: skip
def test_reasoned_answers(text: str, right: str, counts: bool) -> None:
    assert answers.is_same_choice(answers.reasoned_answer(text), right) is counts


@pytest.mark.parametrize(("text", "code"), [
    ("def f():\n  return 1\n[DONE]\nmore", "def f():\n  return 1"),
    ("Here:\n```python\nx = 1\n```\nDone", "x = 1"), ("x = 1\n```\nwords", "x = 1"),
    ("    return 1\n", "    return 1"), ("```\nx = 2", "x = 2"),
])  # fmt: skip
def test_code_of(text: str, code: str) -> None:
    assert answers.code_of(text) == code
