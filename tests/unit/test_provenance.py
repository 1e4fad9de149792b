"""The commit that a result names: that of the library, and of nobody else's repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from xdlm.evaluation.provenance import commit, commit_of


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    done = subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    for name in ("module.py", "other.py"):
        (tmp_path / name).write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "First")
    git(tmp_path, "tag", "v9")
    commit_of.cache_clear()
    return tmp_path


def test_the_commit_is_that_of_the_checkout(repository: Path) -> None:
    found = commit_of(repository / "module.py")
    assert found and git(repository, "rev-parse", "HEAD").startswith(found)


def test_changes_since_are_said(repository: Path) -> None:
    clean = git(repository, "rev-parse", "--short", "HEAD")
    (repository / "other.py").write_text("x = 2\n")
    assert commit_of(repository / "module.py") == f"{clean}-dirty"


@pytest.mark.parametrize("ignored", [False, True])
def test_a_package_in_somebody_elses_repository_has_no_commit(
    repository: Path, ignored: bool
) -> None:
    """As in an environment that lies inside a project."""
    if ignored:
        (repository / ".gitignore").write_text(".venv/\n")
    module = repository / ".venv" / "xdlm" / "module.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1\n")
    assert commit_of(module) is None


def test_no_repository_and_no_git(tmp_path: Path, monkeypatch) -> None:
    commit_of.cache_clear()
    (tmp_path / "module.py").touch()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path / "module.py") is None
    commit_of.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_of(tmp_path / "module.py") is None


def test_a_copy_without_history_may_be_told(monkeypatch) -> None:
    monkeypatch.setenv("XDLM_COMMIT", "abc1234")
    assert commit() == "abc1234"
    monkeypatch.setenv("XDLM_COMMIT", "")
    monkeypatch.setattr("xdlm.evaluation.provenance.commit_of", lambda file: None)
    assert commit() == "unknown"
