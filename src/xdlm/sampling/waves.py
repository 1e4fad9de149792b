"""Rows and heads of either sampler, and rows that take a step together."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Unpack

from xdlm.models import Denoiser
from xdlm.noise import NoiseProcess
from xdlm.sampling.ancestral_rows import AncestralHead, AncestralRow
from xdlm.sampling.confidence import ConfidenceConfig
from xdlm.sampling.confidence_rows import ConfidenceRow
from xdlm.sampling.predictions import PredictingHead
from xdlm.sampling.rows import HeadKey, Row, RowArgs, Wave
from xdlm.sampling.writing import Config

Head = AncestralHead | PredictingHead


def make_row(
    process: NoiseProcess, ids: Sequence[int | None], config: Config, **args: Unpack[RowArgs]
) -> Row:
    if isinstance(config, ConfidenceConfig):
        return ConfidenceRow(process, ids, config, **args)
    return AncestralRow(process, ids, config, **args)


def make_head(denoiser: Denoiser, process: NoiseProcess, key: HeadKey) -> Head:
    """What rows of these settings ask."""
    config, special = key.config, (*process.special_ids, *key.banned)
    if isinstance(config, ConfidenceConfig):
        return PredictingHead(
            denoiser, special, config.filter, guidance=config.guidance,
            confidence=config.confidence,
        )  # fmt: skip
    return AncestralHead(denoiser, special, config.filter)


def alike(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows of one kind, together."""
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.kind, []).append(row)
    return list(groups.values())


def wave_of(rows: Sequence[Row]) -> Wave:
    """The next step of rows of one kind."""
    return rows[0].wave(rows[1:])
