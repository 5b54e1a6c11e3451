"""The REST API of an MLflow server, with the credentials that MLflow's own client takes; files of runs.

MLflow's client is not used: it reads and unpacks answers of any length, follows an experiment's location with
the token, and has neither progress nor ranges.
"""

from __future__ import annotations

import base64
import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import requests

from ortprep.bundle.codec import canonical_json, parse_json
from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import (
    AccessDeniedError,
    BundleError,
    NotPublishedError,
    RegistryError,
    RegistryUnavailableError,
)
from ortprep.registry.backend import check_listing
from ortprep.registry.backends.http_client import ANY_STATUS, OCTETS, HttpClient
from ortprep.spec.urls import redact_url
from ortprep.transport.http_answers import ANSWER_TIMEOUT_S, open_file, read_body, read_refusal
from ortprep.transport.transfer import Download, check_copied, with_retries

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Longest answer that is read; a list of 100,000 files takes about 15 MB."""

MISSING, EXISTS = "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS"
"""Error codes of MLflow."""

_TIMEOUT_S = (20, ANSWER_TIMEOUT_S)
_API = "/api/2.0/mlflow-artifacts/artifacts"
_PAGE = 50
"""Objects asked for at once: versions carry their documents of up to 100,000 characters."""

_MAX_PAGES = 400
_NAMES = ("name", "experiment_name", "run_id", "filter")
"""What says in a message which one a request is about."""

_CODE = re.compile("[A-Z_]{1,64}")

_CREDENTIALS_HINT = (
    "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, for that server; "
    "or add the host name in the URL to its --allowed-hosts"
)


class MlflowServer(HttpClient):
    """A tracking server and its model registry, by `mlflow+` and a URL.

    `mlflow://` stands for the one in `$MLFLOW_TRACKING_URI`.

    Raises:
        RegistryError: The URL is malformed, has credentials in it, or names no server.
    """

    def __init__(self, url: str) -> None:
        server_url = url.partition("+")[2]
        if url in ("mlflow:", "mlflow://"):
            server_url = os.environ.get("MLFLOW_TRACKING_URI", "")
            if not server_url:
                raise RegistryError(
                    "no tracking URI for mlflow://\n  expected one in MLFLOW_TRACKING_URI, got none",
                    hint="export MLFLOW_TRACKING_URI=http://HOST:PORT",
                )
        _check_url(server_url)
        self.url = server_url.rstrip("/")
        super().__init__(f"{self.url}/", timeout_s=_TIMEOUT_S, login_hint=_CREDENTIALS_HINT)

    def authorize(self, request: requests.PreparedRequest) -> None:
        """Adds what MLflow's environment variables have."""
        user, password, token = (
            os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD", "TOKEN")
        )
        if user and password:
            login = base64.b64encode(f"{user}:{password}".encode()).decode()
            request.headers["Authorization"] = f"Basic {login}"
        elif token:
            request.headers["Authorization"] = f"Bearer {token}"

    @staticmethod
    def read_reason(refusal: Mapping[str, Any]) -> str:
        """Returns a refusal's code; its text may repeat the login."""
        code = str(refusal.get("error_code", ""))
        return code if _CODE.fullmatch(code) else ""

    def call(self, method: str, endpoint: str, *, tolerated: str = "", **fields: Any) -> dict[str, Any]:
        """Returns the answer of the REST API; an empty one if it refuses with the error code `tolerated`.

        The endpoint is below `/api/2.0/mlflow/`; what is sent are the fields.

        Raises:
            RegistryError: It refuses, or is no MLflow server; by kind.
        """
        which = next((fields[name] for name in _NAMES if name in fields), "")
        doing = f"call {endpoint} for {which} at {redact_url(self.url)}"
        options: dict[str, Any] = {"params" if method == "GET" else "json": fields, "expected": ANY_STATUS}

        def ask() -> dict[str, Any]:
            with self.open(method, f"api/2.0/mlflow/{endpoint}", doing, **options) as response:
                if response.status_code == 200:
                    return _parse(read_body(response, doing, MAX_ANSWER_BYTES), doing)
                refusal = read_refusal(response, doing)
            code = str(refusal.get("error_code", ""))
            if response.status_code == 404 and code != MISSING:
                raise _no_server(doing, "status 404")
            if tolerated and code == tolerated:
                return {}
            if "IntegrityError" in str(refusal.get("message", "")):
                # Another publisher wrote the same row between MLflow's look and its write; asked again,
                # MLflow finds the row.
                raise RegistryUnavailableError(
                    f"cannot {doing}: another publisher wrote the same at that moment"
                )
            raise self.refuse(response, refusal, doing)

        return with_retries(ask)

    def list_all(self, method: str, endpoint: str, field: str, **fields: Any) -> list[dict[str, Any]]:
        """Returns the objects in a field of all pages of an answer; raises as `call`."""
        objects: list[dict[str, Any]] = []
        token: dict[str, Any] = {}
        total = 0
        for _ in range(_MAX_PAGES):
            answer = self.call(method, endpoint, max_results=_PAGE, **fields, **token)
            total += len(repr(answer))
            check_listing(total, f"{field} in MLflow")
            objects += objects_in(answer, field)
            token = {"page_token": answer.get("next_page_token")}
            if not token["page_token"]:
                return objects
        raise RegistryError(f"too many {field} in MLflow\n  expected at most {_MAX_PAGES * _PAGE}")


def _check_url(url: str) -> None:
    """Raises RegistryError if a URL is no server's, or has credentials."""
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise AccessDeniedError(
            "credentials in the URL of an MLflow server\n  expected mlflow+https://HOST",
            hint=_CREDENTIALS_HINT,
        )
    if parts.scheme not in ("http", "https") or not parts.netloc or parts.query or parts.fragment:
        raise RegistryError(
            "not the URL of an MLflow server\n  expected mlflow+https://HOST:PORT, or mlflow://",
            hint="mlflow server   (for a store without one), or use a folder as the registry",
        )


def tags_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tags in an answer of MLflow."""
    return {str(tag.get("key", "")): str(tag.get("value", "")) for tag in objects_in(fields, "tags")}


def as_pairs(tags: Mapping[str, str]) -> list[dict[str, str]]:
    """Returns tags or parameters as MLflow takes them."""
    return [{"key": key, "value": value} for key, value in tags.items()]


def objects_in(fields: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the objects in a list that an answer has in a field, whatever else it may have there."""
    value = fields.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _parse(body: bytes, doing: str) -> dict[str, Any]:
    try:
        content = parse_json(body, name="an answer")
        canonical_json(content)  # raises for half a character
        return content
    except (BundleError, ValueError):
        raise _no_server(doing, "something else") from None


def _no_server(doing: str, got: str) -> RegistryError:
    return RegistryError(f"no MLflow server there: cannot {doing}\n  expected its REST API, got {got}")


class ProxiedArtifacts:
    """Files of a run, which the tracking server proxies.

    Args:
        artifact_uri: Address of the run's files. The creator of the experiment wrote it, so it is followed to
            the server alone: a server cannot make its clients read or write their own disks, and its
            credentials go nowhere else.
        server: Tracking server of the run.

    Raises:
        AccessDeniedError: The address leads elsewhere.
    """

    def __init__(self, artifact_uri: str, server: MlflowServer) -> None:
        try:
            address, server_address = urlsplit(artifact_uri), urlsplit(server.url)
        except ValueError as error:
            raise AccessDeniedError(f"artifacts at a bad address\n  expected a URL: {error}") from None
        if ".." in unquote(address.path).split("/"):
            raise AccessDeniedError(
                f"artifacts at a bad address: {redact_url(artifact_uri)[:200]}\n  expected no .."
            )
        if address.scheme == "mlflow-artifacts" and address.netloc in ("", server_address.netloc):
            root = address.path
        elif (address.scheme, address.netloc) == (server_address.scheme, server_address.netloc):
            root = address.path.partition(_API)[2]
        else:
            raise AccessDeniedError(
                f"artifacts are stored elsewhere: {redact_url(artifact_uri)[:200]}\n"
                f"  expected {redact_url(server.url)} itself",
                hint="mlflow server --serve-artifacts   (it then proxies its object store)",
            )
        self._server, self._root = server, root.strip("/")

    def _open(
        self, method: str, path: str, doing: str, *, tolerated: int = 0, **options: Any
    ) -> requests.Response:
        """Returns an answer of success, or of the status `tolerated`, as `HttpClient.open` does."""
        expected = (*range(200, 300), tolerated)
        return self._server.open(method, self._locate(path), doing, expected=expected, **options)

    def _locate(self, path: str) -> str:
        """Returns the URL of a file, or of the list of all."""
        where = f"/{quote(posixpath.join(self._root, path))}" if path else ""
        return f"{self._server.url}{_API}{where}"

    def find(self, folder: str) -> Mapping[str, int]:
        """Returns the sizes in bytes of the files right in a folder, by path; none if it is not there."""
        return with_retries(lambda: self._find(folder))

    def _find(self, folder: str) -> Mapping[str, int]:
        """Lists a folder once; see `find`."""
        doing = f"list artifacts: {folder}"
        where = {"path": posixpath.join(self._root, folder)}
        with self._open("GET", "", doing, params=where) as response:
            body = read_body(response, doing, MAX_ANSWER_BYTES)
        try:
            return {
                posixpath.join(folder, posixpath.basename(file["path"])): int(file.get("file_size") or 0)
                for file in parse_json(body, name="a listing").get("files", [])
                if not file["is_dir"]
            }
        except (BundleError, OverflowError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RegistryError(f"cannot {doing}\n  expected a list of files, got something else") from error

    def open(self, path: str, offset: int, *, name: str) -> AbstractContextManager[Download]:
        """Opens a file at an offset, or at 0; messages call it `name`. Raises as `http_answers.open_file`."""
        return open_file(lambda headers: self._get(path, headers), f"read artifact: {name}", offset)

    @contextmanager
    def _get(self, path: str, headers: Mapping[str, str]) -> Iterator[requests.Response]:
        """Yields the answer with a file, unread; raises NotPublishedError if there is none."""
        doing = f"read artifact: {path}"
        with self._open("GET", path, doing, headers=headers, tolerated=500) as response:
            if response.status_code == 500:
                # Servers before an object store say so of what is not there.
                if path not in self._find(posixpath.dirname(path)):
                    raise NotPublishedError(f"not in MLflow: {path}\n  expected to find it, got none")
                raise self._server.refuse(response, read_refusal(response, doing), doing)
            yield response

    def write(self, path: str, data: bytes) -> None:
        """Writes a small file."""
        with_retries(
            lambda: self._open("PUT", path, f"write artifact: {path}", headers=OCTETS, data=data).close()
        )

    def upload(self, path: str, entry: FileEntry, source: Path) -> None:
        """Uploads a file; raises IntegrityError if `source` has other bytes than `entry` describes."""

        def put() -> None:
            check_copied(entry, source.stat().st_size, digest_file(source))
            url, doing = self._locate(path), f"write artifact: {path}"
            self._server.put_file(url, doing, source, expected=range(200, 300))

        with_retries(put)
