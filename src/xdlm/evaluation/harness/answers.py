"""What an answer says in the end, and whether that is right."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")


def last_number(text: str) -> str | None:
    """`... so she makes $1,018.00.` -> `1018`"""
    found = _NUMBER.findall(text)
    return _plain(found[-1]) if found else None


def marked_number(text: str) -> str | None:
    """The number behind `####`, as the training answers of GSM8K end."""
    _, mark, after = text.partition("####")
    found = _NUMBER.match(after.strip()) if mark else None
    return _plain(found[0]) if found else None


def _plain(number: str) -> str:
    number = number.replace("$", "").replace(",", "")
    return number.rstrip("0").rstrip(".") if "." in number else number


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`, braces matched; `\boxed 7` too."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("d" if text[start:].startswith(r"\boxed") else "x")[2]
    if not rest.startswith("{"):
        return rest.split("$")[0].strip() or None
    depth = 0
    for at, character in enumerate(rest):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return rest[1:at]
    return None


def final_answer(text: str) -> str | None:
    """Of a solution in mathematics: what is boxed last, or else what `the answer is` names."""
    found = boxed(text)
    if found is None:
        said = re.findall(r"answer is:?\s*(.+?)(?:\.\s|\.?$|\n)", text, flags=re.IGNORECASE)
        found = said[-1] if said else None
    return found


_DROPPED = (r"\left", r"\right", r"\!", r"\,", r"\;", r"\ ", r"\$", "$", r"\%", "%", r"^\circ",
            r"^{\circ}", r"\cdot ", "dollars", "cents")  # fmt: skip
_ONE = r"(?:\{([^{}]*)\}|([^{}\\\s]))"


def plain_math(answer: str) -> str:
    r"""One spelling of what may be written in several: spaces, sizes of brackets, units in `\text`,
    `x = 3` for `3`, `\frac12`, `\dfrac{1}{2}` and `1/2`, `.5` and `0.50`, `1,000`."""
    text = answer.strip().rstrip(".")
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm)\s*\{\s*\(?([A-Za-z])\)?\s*\}", r"\1", text)
    text = re.sub(r"(?<=[\d}])\s*\\(?:text|mbox)\s*\{[^{}]*\}(?:\^\{?\d\}?)?$", "", text)
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm)\s*\{([^{}]*)\}", r"\1", text)
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\frac\s*" + _ONE + r"\s*" + _ONE, _over, text)
    text = re.sub(r"\\sqrt\s*([^{}\[\\\s])", r"\\sqrt{\1}", text)
    text = re.sub(r"\s+", "", text)
    if text.count("=") == 1 and len(text.split("=")[0]) <= 2:
        text = text.split("=")[1]
    if re.fullmatch(r"-?\d{1,3}(,\d{3})+(\.\d+)?", text):
        text = text.replace(",", "")
    if re.fullmatch(r"\([A-Z]\)", text):
        text = text[1]
    if re.fullmatch(r"-?\d+/\d+", text):
        text = _over_of(*text.split("/"))
    text = re.sub(r"(?<!\d)\.(?=\d)", "0.", text)
    return _plain(text) if re.fullmatch(r"-?\d+\.\d+", text) else text


def _over(match: re.Match[str]) -> str:
    above, below = (match[1] or match[2] or "", match[3] or match[4] or "")
    return _over_of(above, below)


def _over_of(above: str, below: str) -> str:
    sign = "-" if above.startswith("-") else ""
    return rf"{sign}\frac{{{above.removeprefix('-')}}}{{{below}}}"


def is_same_math(said: str | None, right: str) -> bool:
    return said is not None and plain_math(said) == plain_math(right)


def reasoned_answer(text: str) -> str | None:
    """Of a chain of thought that ends in `So the answer is X.`"""
    found = re.search(r"answer is\s*:?\s*(.*)", text)
    return found[1].strip().rstrip(".").strip() if found else None


def is_same_choice(said: str | None, right: str) -> bool:
    """`(B)` counts however much of the option is said with it; anything else is compared as it is."""
    if said is None:
        return False
    if re.fullmatch(r"\([A-Z]\)", right):
        letter = re.search(r"\(([A-Z])\)", said)
        return (letter[0] if letter else f"({said})") == right
    return said == right


#: A fence that is closed, one that says what it holds, one that stands first.
_FENCED = (
    r"```(?:[Pp]ython)?[ \t]*\n(.*?)```",
    r"```[Pp]ython[ \t]*\n(.*)",
    r"\A\s*```[ \t]*\n(.*)",
)


def code_of(text: str) -> str:
    """A program in an answer: what a fence encloses, or what comes before one, up to the mark of its end.
    Blanks in front stay: they may belong to the body of a function."""
    matches = (re.search(fence, text, flags=re.DOTALL) for fence in _FENCED)
    fenced = next((match[1] for match in matches if match), None)
    code = text.split("```")[0] if fenced is None else fenced
    return code.split("[DONE]")[0].rstrip()
