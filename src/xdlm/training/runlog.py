"""The log of a run: one JSON object per line, and a progress bar or plain lines on the terminal."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from xdlm.files import explained, write_atomic
from xdlm.training.curves import Curves

FILE_NAME = "log.jsonl"
#: Without a terminal a bar is useless: print a line now and then.
_SECONDS_BETWEEN_LINES = 15.0


class RunLog:
    """Appends records to `log.jsonl`, draws them as curves and shows how a run is going."""

    def __init__(
        self,
        folder: Path,
        *,
        total: int,
        start: int,
        console: Console,
        curves: Sequence[Curves] = (),
    ) -> None:
        self._curves = curves
        self.file = folder / FILE_NAME
        self._forget_after(start)
        self._stream = self.file.open("a", encoding="utf-8")
        self.console, self.total = console, total
        self._last_line = 0.0
        self._bar = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[info]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=total, completed=start, info="")

    def __enter__(self) -> RunLog:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
        self._stream.close()
        for curves in self._curves:
            curves.close()

    def record(self, *, step: int, **values: float) -> None:
        with explained(self.file):
            self._stream.write(json.dumps({"step": step, **values}) + "\n")
            self._stream.flush()
        for curves in self._curves:
            curves.add(step, values)

    def show(self, step: int, info: str) -> None:
        self._bar.update(self._task, completed=step, info=info)
        if self.console.is_terminal:
            return
        if time.monotonic() - self._last_line > _SECONDS_BETWEEN_LINES or step == self.total:
            self._last_line = time.monotonic()
            self.say(f"step {step}/{self.total}  {info}")

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _forget_after(self, step: int) -> None:
        """Drop what a killed run logged beyond the checkpoint that we go on from."""
        kept = [r for r in read_log(self.file) if r["step"] <= step] if self.file.exists() else []
        write_atomic(self.file, "".join(json.dumps(r) + "\n" for r in kept))


class SilentLog:
    """The log of a process that keeps none: another one writes for all."""

    def __enter__(self) -> SilentLog:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def record(self, *, step: int, **values: float) -> None:
        return None

    def show(self, step: int, info: str) -> None:
        return None

    def say(self, text: str) -> None:
        return None


def read_log(file: Path) -> list[dict[str, Any]]:
    """All complete records; a last line cut short by a kill is left out."""
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records
