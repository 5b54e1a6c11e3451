"""A web server that speaks as much of the Hugging Face Hub's API as its client asks for."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.fakes import Server

TOKEN = "hf_secretsecretsecretsecretsecret"

Files = Mapping[str, bytes]


@dataclass
class Repository:
    """A repository with its commits, by number, and what branches and tags name."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files: Files, *, branch: str = "main") -> str:
        """Adds a commit, moves a branch to it, and returns its number."""
        number = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[number] = files
        self.refs[branch] = number
        return number


@dataclass
class Hub:
    """What is served, and what was asked: method and path of every request, and its token."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    spoils: bool = False
    """Whether the next file arrives with other bytes."""
    unavailable: list[str] = field(default_factory=list)
    """Ends of paths that answer with HTTP 520, each entry once; the client retries 408, 429 and 503."""

    def add(self, name: str, files: Files, **options: Any) -> Repository:
        """Adds a repository with one commit on `main`."""
        repository = self.repositories[name] = Repository(**options)
        repository.commit(files)
        return repository


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class HubHandler(BaseHTTPRequestHandler):
    """One request."""

    hub: Hub
    timeout = 60.0

    def do_GET(self) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append((self.command, self.path, token))
        try:
            path = urlsplit(self.path).path
            for ending in filter(path.endswith, self.hub.unavailable):
                self.hub.unavailable.remove(ending)
                raise _Refused(520, "Unknown")
            parts = path.strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                self._answer_api("/".join(parts[2:4]), parts[4:], token)
            else:
                self._answer_file("/".join(parts[:2]), [unquote(part) for part in parts[2:]], token)
        except _Refused as refusal:
            self._send(refusal.status, b"{}", {"X-Error-Code": refusal.code})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _repository(self, name: str, token: str | None) -> Repository:
        found = self.hub.repositories.get(name)
        if found is None or (found.private and token != TOKEN):
            # The Hub does not tell strangers what there is.
            raise _Refused(401 if token is None else 404, "RepoNotFound")
        return found

    @staticmethod
    def _files(repository: Repository, revision: str) -> tuple[str, Files]:
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            raise _Refused(404, "RevisionNotFound")
        return commit, repository.commits[commit]

    def _answer_api(self, name: str, rest: list[str], token: str | None) -> None:
        repository = self._repository(name, token)
        revision = unquote(rest[1]) if len(rest) > 1 else "main"
        commit, files = self._files(repository, revision)
        if not rest or rest[0] == "revision":
            siblings = [{"rfilename": path} for path in files]
            self._send_json({"id": name, "sha": commit, "siblings": siblings, "private": repository.private})
        elif rest[0] == "tree":
            self._send_json(_list_folder(files, "/".join(map(unquote, rest[2:]))))
        else:
            raise _Refused(404, "EntryNotFound")

    def _answer_file(self, name: str, rest: list[str], token: str | None) -> None:
        repository = self._repository(name, token)
        if repository.gated:
            raise _Refused(401, "GatedRepo")
        _, files = self._files(repository, rest[1])
        content = files.get("/".join(rest[2:]))
        if content is None:
            raise _Refused(404, "EntryNotFound")
        if self.hub.spoils:
            self.hub.spoils = False
            content = bytes(len(content))
        wanted = self.headers.get("Range")
        if wanted is None:
            self._send(200, content)
            return
        start, _, end = wanted.removeprefix("bytes=").partition("-")
        part = content[int(start) : int(end) + 1]
        last = int(start) + len(part) - 1
        self._send(206, part, {"Content-Range": f"bytes {start}-{last}/{len(content)}"})

    def _send_json(self, data: Any) -> None:
        self._send(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _list_folder(files: Files, folder: str) -> list[dict[str, Any]]:
    """Returns what lies in a folder, as the tree of the Hub: large files are those that are not text."""
    listed: dict[str, dict[str, Any]] = {}
    for path, content in files.items():
        pure = PurePosixPath(path)
        parents = [str(parent) for parent in pure.parents]
        if (folder or ".") not in parents:
            continue
        depth = len(PurePosixPath(folder).parts)
        entry = "/".join(pure.parts[: depth + 1])
        oid = hashlib.sha1(content).hexdigest()
        if entry != path:
            listed[entry] = {"type": "directory", "path": entry, "oid": oid, "size": 0}
            continue
        listed[entry] = {"type": "file", "path": path, "oid": oid, "size": len(content)}
        if not path.endswith(".json"):
            digest = hashlib.sha256(content).hexdigest()
            listed[entry]["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
    if not listed:
        raise _Refused(404, "EntryNotFound")
    return list(listed.values())


@contextmanager
def serve_hub() -> Iterator[Hub]:
    """Runs a Hub on a free port until the block ends."""
    hub = Hub()
    handler = type("BoundHubHandler", (HubHandler,), {"hub": hub})
    server = Server(("127.0.0.1", 0), handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
