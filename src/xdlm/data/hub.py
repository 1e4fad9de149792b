"""A corpus from the hub, as files: fetched once into the folder of local data, at one commit.

    <root>/<name>/hub/...             the repository's files, as they are there
    <root>/<name>/hub/revision.json   repository and commit

Only data is fetched, and only read: a repository's code is never run. The folder appears when all of it is
there; an interrupted fetch goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

from xdlm.data.specs import DatasetSpec, Split
from xdlm.errors import UserError
from xdlm.files import write_atomic
from xdlm.hub import hub_library

_FOLDER, _SCRATCH, _LOCK, _REVISION = "hub", ".hub.partial", ".hub.lock", "revision.json"


def hub_files(folder: Path, split: Split) -> list[Path]:
    """The files of a split in a folder that is laid out as on the hub; none if there are none."""
    if split.hub is None:
        return []
    names = {f.relative_to(folder).as_posix(): f for f in folder.rglob("*") if f.is_file()}
    # What a fetch has not finished is hidden.
    return [names[n] for n in sorted(names) if fnmatch(n, split.hub) and not n.startswith(".")]


def fetched_folder(folder: Path) -> Path:
    """Where what is fetched of a corpus lies, in its folder."""
    return folder / _FOLDER


def hub_revision(fetched: Path) -> str:
    """`repository@commit` of what has been fetched."""
    file = fetched / _REVISION
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return f"{found['repository']}@{found['commit']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{file.parent} was not fetched whole ({file.name} is missing or damaged); "
            "delete it and fetch it again"
        ) from error


def fetch(spec: DatasetSpec, folder: Path, absent: str) -> None:
    """Bring all splits of a corpus into its folder; `absent` begins the message if that fails. Of several
    processes one fetches and the others wait."""
    assert spec.hub is not None
    scratch, target = folder / _SCRATCH, fetched_folder(folder)
    patterns = sorted({split.hub for split in spec.splits.values() if split.hub is not None})
    with hub_library(absent, spec.hub) as hub:
        from filelock import FileLock  # comes with the library

        commit = hub.HfApi().dataset_info(spec.hub, revision=spec.hub_revision).sha
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / _LOCK):
            if target.is_dir():
                return
            hub.snapshot_download(
                spec.hub, repo_type="dataset", revision=commit, allow_patterns=patterns,
                local_dir=scratch,
            )  # fmt: skip
            shutil.rmtree(scratch / ".cache", ignore_errors=True)  # notes on the transfer
            about = {"repository": spec.hub, "commit": commit}
            write_atomic(scratch / _REVISION, json.dumps(about, indent=2) + "\n")
            scratch.rename(target)
