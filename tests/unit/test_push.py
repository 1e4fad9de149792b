"""Pushing to the hub, against a small one of our own on this machine."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_cli import complaint

from xdlm import UserError, hub

huggingface_hub = pytest.importorskip("huggingface_hub")


class Hub(ThreadingHTTPServer):
    """Holds one repository: what was committed to it, and who asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}
        self.made: list[dict[str, object]] = []
        self.tokens: set[str | None] = set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, content: object, code: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        self.server.stored[self.path.rsplit("/", 1)[1]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body, hub_ = self._body(), self.server
        hub_.tokens.add(self.headers.get("Authorization"))
        if self.headers.get("Authorization") != "Bearer hf_good":
            return self._answer({"error": "Invalid user token."}, 401)
        if self.path == "/api/repos/create":
            hub_.made.append(json.loads(body))
            return self._answer({"url": f"{hub_.url}/me/small", "name": "me/small"})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            modes = [
                {"path": file["path"], "shouldIgnore": False,
                 "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular"}
                for file in json.loads(body)["files"]
            ]  # fmt: skip
            return self._answer({"files": modes})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub_.url}/put/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects})
        assert "/commit/" in self.path, self.path
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub_.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub_.files[value["path"]] = hub_.stored[value["oid"]]
        return self._answer({"commitUrl": f"{hub_.url}/me/small/commit/1", "commitOid": "1" * 40})


@pytest.fixture
def there() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def export(
    url: str, *arguments: str, token: str | None = "hf_good"
) -> subprocess.CompletedProcess[str]:
    """In a process of its own, since the library reads its environment when it is imported."""
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    surroundings |= {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": "/nonexistent"}
    surroundings |= {} if token is None else {"HF_TOKEN": token}
    command = [sys.executable, "-m", "xdlm.cli.main", "export", "--model", "pocket", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=surroundings, timeout=100)


def test_a_folder_is_pushed_whole(there: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = export(
        there.url, "--format", "hub", "--out", str(out), "--push", "me/small", "--private"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == f"pushed to {there.url}/me/small"
    assert there.tokens == {"Bearer hf_good"}
    (made,) = there.made
    assert made["name"] == "small" and made["organization"] == "me"
    assert made.get("private", made.get("visibility") == "private")
    assert there.files == {file.name: file.read_bytes() for file in out.iterdir()}
    assert {"README.md", "config.json", "model.safetensors"} <= there.files.keys()
    assert there.files["README.md"].startswith(b"---\nlibrary_name: xdlm\n")


def test_what_goes_wrong_is_one_line(there: Hub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused = export(there.url, "--out", str(out), "--push", "me/small", token="hf_bad")
    assert refused.returncode == 2
    *_, line = refused.stderr.splitlines()
    assert line.startswith(f"xdlm: {out} is written, and me/small cannot be pushed to: ")
    assert "401" in line and (out / "model.safetensors").is_file() and not there.files
    missing = export(there.url, "--out", str(tmp_path / "b"), "--push", "me/small", token=None)
    assert missing.returncode == 2 and not (tmp_path / "b").exists()
    (line,) = missing.stderr.splitlines()
    assert line.startswith("xdlm: the hub wants a token: set HF_TOKEN")


def test_without_a_network(tmp_path: Path) -> None:
    done = export("http://127.0.0.1:9", "--out", str(tmp_path / "out"), "--push", "me/small")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        f"xdlm: {tmp_path / 'out'} is written, and me/small cannot be pushed to: "
    )


def test_what_can_be_known_before(monkeypatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    command = ("export", "--model", "pocket", "--out", str(tmp_path / "out"))
    assert "a repository is owner/name" in complaint(capsys, *command, "--push", "small")
    assert "cannot be pushed to" in complaint(capsys, *command, "--push", "me/sm all")
    assert "--private has no meaning without --push" in complaint(capsys, *command, "--private")
    assert not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"to push it to the hub install xdlm\[hub\]"):
        hub.check_push("me/small")
