"""A model hub on this machine: the routes that huggingface_hub uses, over folders of a test.

    def test_something(fake_hub: FakeHub) -> None:
        fake_hub.add("owner/name", {"config.json": b"{}"})
        ...                                     # whatever asks the hub asks this one
        assert fake_hub.downloads == ["config.json"]

The cache is empty and of this test alone. Other processes take `fake_hub.environment()`.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class Repository:
    """Files of every revision: a branch or tag and its commit mean the same."""

    revisions: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: bool = False

    def commit(self, revision: str) -> str:
        content = sorted((k, hashlib.sha1(v).hexdigest()) for k, v in self.files(revision).items())
        return hashlib.sha1(repr(content).encode()).hexdigest()

    def files(self, revision: str) -> dict[str, bytes]:
        if revision in self.revisions:
            return self.revisions[revision]
        return next(f for name, f in self.revisions.items() if self.commit(name) == revision)


class FakeHub:
    """Large files (weights) come from another host name, as from the real hub's storage."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.repositories: dict[str, Repository] = {}
        self.downloads: list[str] = []  # files whose content was asked for
        self.ranges: list[tuple[str, str]] = []  # (file, Range) of requests to resume
        self.num_requests = 0
        self.cut_after: int | None = None  # the next large file ends after so many bytes
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def add(
        self, name: str, files: Mapping[str, bytes] | Path, revision: str = "main"
    ) -> Repository:
        """Publishes files, or those of a folder, as a revision of a repository."""
        if isinstance(files, Path):
            found = (path for path in files.rglob("*") if path.is_file())
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in found}
        repository = self.repositories.setdefault(name, Repository())
        repository.revisions[revision] = dict(files)
        return repository

    def environment(self) -> dict[str, str]:
        """What another process needs in its environment to ask this hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_CACHE": str(self.cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def close(self) -> None:
        """From now on there is no network."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.num_requests += 1
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            return self._api("/".join(parts[2:4]), parts[4:])
        if len(parts) >= 5 and parts[2] == "resolve":
            return self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        if len(parts) >= 5 and parts[0] == "storage":
            name, revision, file = "/".join(parts[1:3]), parts[3], "/".join(parts[4:])
            return self._send_file(file, self.hub.repositories[name].files(revision)[file])
        return self._fail(404, "EntryNotFound")

    def _open(self, name: str, revision: str) -> tuple[Repository, dict[str, bytes]] | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._fail(401, "RepoNotFound")
            return None
        try:
            return repository, repository.files(revision)
        except StopIteration:
            self._fail(404, "RevisionNotFound")
            return None

    def _api(self, name: str, rest: list[str]) -> None:
        found = self._open(name, rest[1] if len(rest) > 1 else "main")
        if found is None:
            return
        repository, files = found
        if rest[:1] == ["tree"]:
            return self._json(
                [
                    {"type": "file", "path": path, "size": len(data), "oid": _etag(data)}
                    for path, data in files.items()
                ]
            )
        return self._json(
            {
                "id": name,
                "modelId": name,
                "sha": repository.commit(rest[1] if len(rest) > 1 else "main"),
                "private": False,
                "gated": "manual" if repository.gated else False,
                "tags": [],
                "downloads": 0,
                "siblings": [{"rfilename": path} for path in files],
            }
        )

    def _resolve(self, name: str, revision: str, file: str) -> None:
        found = self._open(name, revision)
        if found is None:
            return
        repository, files = found
        if repository.gated and "Authorization" not in self.headers:
            return self._fail(403, "GatedRepo")
        if file not in files:
            return self._fail(404, "EntryNotFound")
        data, commit = files[file], repository.commit(revision)
        known = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit}
        if not file.endswith((".safetensors", ".gguf", ".bin")):
            return self._send_file(file, data, known)
        port = self.hub.url.rpartition(":")[2]
        return self._reply(
            302,
            b"",
            known
            | {
                "Location": f"http://localhost:{port}/storage/{name}/{commit}/{file}",
                "X-Linked-Size": str(len(data)),
                "X-Linked-ETag": f'"{_etag(data)}"',
            },
        )

    def _send_file(self, file: str, data: bytes, headers: Mapping[str, str] = {}) -> None:
        first, wanted = 0, self.headers.get("Range")
        if self.command == "GET":
            self.hub.downloads.append(file)
        if wanted is not None:
            self.hub.ranges.append((file, wanted))
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            headers = {**headers, "Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}
        self._reply(200 if wanted is None else 206, data[first:], headers)

    def _json(self, value: Any) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str) -> None:
        self._reply(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

    def _reply(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        cut, large = self.hub.cut_after, self.path.startswith("/storage/")
        if large and cut is not None and cut < len(data):
            self.hub.cut_after, data, self.close_connection = None, data[:cut], True
        self.wfile.write(data)


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that this process and, with `environment()`, others ask instead of the real one."""
    from huggingface_hub import constants

    hub = FakeHub(tmp_path / "hub-cache")
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(hub.cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield hub
    hub.close()
