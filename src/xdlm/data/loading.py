"""Rows from any source: text that is tokenised now, or shards that were prepared before."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from xdlm.data.documents import open_source
from xdlm.data.packing import Rows, pack
from xdlm.data.shards import JOURNAL, MANIFEST, ShardedTokens, is_prepared
from xdlm.errors import UserError
from xdlm.tokens import TextTokenizer

#: Bytes of files, as they are stored, up to which text is tokenised when it is loaded.
IN_MEMORY = 1 << 30


def load_rows(
    source: str,
    tokenizer: TextTokenizer,
    length: int,
    *,
    bos: bool = False,
    eos: bool = True,
    frame: bool = False,
    limit: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Rows:
    """`on_progress` is told what is done of what there is: shards, or documents of nobody knows how
    many (0)."""
    if (Path(source) / JOURNAL).is_file():
        raise UserError(f"{source} is unfinished; run `xdlm prepare` again to complete it")
    if not is_prepared(source):
        found = open_source(source)
        if limit is None and found.bytes > IN_MEMORY:
            raise UserError(
                f"{source} holds {found.bytes / 1e9:.1f} GB, too much to tokenise in memory at every "
                f"start; run `xdlm prepare --data {source} --out FOLDER` once and give its folder"
            )
        return pack(
            islice(found.documents(), limit), tokenizer, length, bos=bos, eos=eos, frame=frame,
            on_document=None if on_progress is None else lambda n: on_progress(n, 0),
        )  # fmt: skip
    stream = ShardedTokens(source, on_check=on_progress)
    made = stream.manifest
    if made.tokenizer_sha256 != tokenizer.digest:
        raise UserError(
            f"{source} was prepared with another tokenizer ({made.tokenizer_size} tokens, its "
            f"{MANIFEST} says) than the one given ({tokenizer.size} tokens); use its own, "
            f"{Path(source) / 'tokenizer.json'}, or prepare it again"
        )
    for name, wanted in (("bos", bos), ("eos", eos), ("limit", limit)):
        if getattr(made, name) != wanted and not (name == "limit" and limit is None):
            raise UserError(
                f"{source} was prepared with {name} {getattr(made, name)}, not {wanted}; "
                "change the setting or prepare it again"
            )
    return Rows(stream, length, (tokenizer.bos_id, tokenizer.eos_id) if frame else None)
