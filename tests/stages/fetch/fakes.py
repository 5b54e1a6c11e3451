"""Servers that speak as much of the Hugging Face Hub's protocol as its client asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import get_type_hints
from urllib.parse import unquote, urlsplit

from ortprep.bundle.codec import decode, encode
from ortprep.children.child import Reply
from tests.fakes import FileServer, listening, serve

TOKEN = "hf_secretsecretsecretsecretsecret"

Files = Mapping[str, bytes]


@dataclass
class Repository:
    """A repository with its commits, by number, and what branches and tags name."""

    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def commit(self, files, *, branch="main"):
        """Adds a commit, moves a branch to it, and returns its number."""
        number = hashlib.sha1(f"{len(self.commits)}{sorted(files)}".encode()).hexdigest()
        self.commits[number] = files
        self.refs[branch] = number
        return number


@dataclass
class Hub:
    """What is served, and what was asked.

    Attributes:
        store: The server that large files, all but JSON, are on.
        requests: Method, path and token of every request for a file.
        unavailable: Ends of paths that answer with HTTP 520, each entry once.
    """

    store: FileServer
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    unavailable: list[str] = field(default_factory=list)

    def add(self, name, files, **options):
        """Adds a repository with one commit on `main`."""
        repository = self.repositories[name] = Repository(**options)
        repository.commit(files)
        return repository


class _Refused(Exception):
    def __init__(self, status, code):
        super().__init__(code)
        self.status, self.code = status, code


class HubHandler(BaseHTTPRequestHandler):
    """One request."""

    hub: Hub
    timeout = 60.0

    def do_GET(self):
        if "/resolve/" not in self.path:  # what the client asks for by itself
            self._send(404, b"", {})
            return
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append((self.command, self.path, token))
        try:
            path = urlsplit(self.path).path
            for ending in filter(path.endswith, self.hub.unavailable):
                self.hub.unavailable.remove(ending)
                raise _Refused(520, "Unknown")
            parts = [unquote(part) for part in path.strip("/").split("/")]
            self._answer("/".join(parts[:2]), parts[3], "/".join(parts[4:]), token)
        except _Refused as refusal:
            self._send(refusal.status, b"{}", {"X-Error-Code": refusal.code})

    def do_HEAD(self):
        self.do_GET()

    def _answer(self, name, revision, path, token):
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and token != TOKEN):
            # The Hub does not tell strangers what there is.
            raise _Refused(401 if token is None else 404, "RepoNotFound")
        if repository.gated:
            raise _Refused(401, "GatedRepo")
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            raise _Refused(404, "RevisionNotFound")
        content = repository.commits[commit].get(path)
        if content is None:
            raise _Refused(404, "EntryNotFound")
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        if path.endswith(".json"):
            self._send(200, content, headers)
            return
        digest = hashlib.sha256(content).hexdigest()
        self.hub.store.files[f"/{digest}"] = content
        headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
        self._send(302, b"", {**headers, "Location": f"{self.hub.store.url}/{digest}?Signature=secret"})

    def _send(self, status, body, headers):
        self.send_response(status)
        for key, text in headers.items():
            self.send_header(key, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@contextmanager
def serve_hub():
    """Runs a Hub and the store behind it on free ports until the block ends."""
    with serve() as store:
        hub = Hub(store)
        with listening(type("BoundHubHandler", (HubHandler,), {"hub": hub})) as hub.url:
            yield hub


def run_here(function, request, **_):
    """Does a child's work in this process: the answer is the same, without its starting."""
    kinds = get_type_hints(function)
    answer, (request_kind, *_) = kinds.pop("return"), kinds.values()
    value = function(decode(request_kind, json.loads(json.dumps(encode(request)))))
    reply = decode(answer, json.loads(json.dumps(encode(value))))
    return Reply(reply, started_s=0.0, elapsed_s=0.0, peak_rss_bytes=0)
