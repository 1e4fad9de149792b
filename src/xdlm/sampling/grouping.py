"""Which rows go through a model together."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

#: Rows join longer ones if they have this share of their length: more padding costs more than it saves.
_FILLED = 0.75


def group_rows(
    lengths: Sequence[int],
    batch_tokens: int,
    *,
    padded: bool,
    kinds: Sequence[Hashable] | None = None,
) -> list[list[int]]:
    """Groups of rows, by number, of one kind: of similar lengths if they may be padded, else of equal ones,
    and of at most `batch_tokens` tokens with their padding, but at least one row. The longest come first,
    so that running out of memory shows at once."""
    least = _FILLED if padded else 1.0
    of_kind: dict[Hashable, list[int]] = {}
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        of_kind.setdefault(None if kinds is None else kinds[row], []).append(row)
    groups: list[list[int]] = []
    for rows in of_kind.values():
        group: list[int] = []
        for row in rows:
            longest = lengths[group[0]] if group else 0
            fits = (len(group) + 1) * longest <= batch_tokens
            if group and not (fits and lengths[row] >= least * longest):
                groups.append(group)
                group = []
            group.append(row)
        groups.append(group)
    return sorted(groups, key=lambda group: lengths[group[0]], reverse=True)
