"""Results that a file of records holds already: they are not measured again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from xdlm.cli.measures.common import keep
from xdlm.evaluation.records import EvalRecord, measurement, resume_records


class Held:
    """What a file holds, and what is added to it; without a file, nothing is kept."""

    def __init__(self, file: str | None) -> None:
        self._file = file
        found = [] if file is None else resume_records(Path(file))
        self._records = {measurement(record): record for record in found}
        self.taken = self.made = 0

    def once(
        self, plans: Sequence[EvalRecord], measure: Callable[[], list[EvalRecord]]
    ) -> list[EvalRecord]:
        """What the file holds of the planned results, or else what a measurement gives."""
        keys = [measurement(plan) for plan in plans]
        if all(key in self._records for key in keys):
            self.taken += len(keys)
            return [self._records[key] for key in keys]
        records = measure()
        self.add(records)
        return records

    def add(self, records: Sequence[EvalRecord]) -> None:
        """Keep those that are new, at once."""
        new = {measurement(record): record for record in records}
        new = {key: record for key, record in new.items() if key not in self._records}
        keep(self._file, *new.values())
        self._records |= new
        self.made += len(new)

    def story(self) -> str:
        return f"{self.made} results measured, {self.taken} taken from {self._file}"
