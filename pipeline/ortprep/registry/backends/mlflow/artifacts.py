"""Files of MLflow runs: through the tracking server's proxy, or straight in the object store."""

from __future__ import annotations

import io
import math
import posixpath
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import requests

from ortprep.bundle.codec import parse_json
from ortprep.bundle.digest import digest_file
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import AccessDeniedError, BundleError, NotPublishedError, RegistryError
from ortprep.registry.backend import BLOCK_BYTES, Download, Report
from ortprep.registry.backends.mlflow.server import MAX_ANSWER_BYTES, MlflowServer, refuse
from ortprep.registry.backends.rest import open_file, read_body, read_refusal
from ortprep.registry.fsspec_folder import FsspecFolder, StoredFile
from ortprep.registry.retries import with_retries
from ortprep.registry.transfer import check_copied, counted
from ortprep.spec.redaction import redact_url
from ortprep.spec.url_schemes import OBJECT_STORES

_API = "/api/2.0/mlflow-artifacts/artifacts"


def open_artifacts(artifact_uri: str, server: MlflowServer) -> FsspecFolder | ProxiedArtifacts:
    """Returns the files below the address that a run has for them.

    The creator of the experiment wrote that address. The server's credentials go to the server alone, and a
    server cannot make its clients read or write their own disks.

    Raises:
        AccessDeniedError: It leads elsewhere.
        MissingExtraError: The object store's filesystem is not installed.
    """
    address, server_address = urlsplit(artifact_uri), urlsplit(server.tracking_url)
    if ".." in unquote(address.path).split("/"):
        raise AccessDeniedError(
            f"artifacts at a bad address: {redact_url(artifact_uri)[:200]}\n  expected no .."
        )
    if address.scheme == "mlflow-artifacts" and address.netloc in ("", server_address.netloc):
        return ProxiedArtifacts(server, address.path)
    if (address.scheme, address.netloc) == (server_address.scheme, server_address.netloc):
        return ProxiedArtifacts(server, address.path.partition(_API)[2])
    if address.scheme not in OBJECT_STORES or "::" in artifact_uri:  # fsspec's mark of one URL in another
        raise AccessDeniedError(
            f"artifacts are stored elsewhere: {redact_url(artifact_uri)[:200]}\n"
            f"  expected {redact_url(server.tracking_url)} itself or an object store",
            hint="give the experiment another artifact location: mlflow-artifacts:/…, s3://…, gs://…",
        )
    return FsspecFolder(artifact_uri, called="MLflow store")


class ProxiedArtifacts:
    """Files of a run that the tracking server proxies; `root` is the run's folder in its API.

    MLflow's own client reads listings of any length, sends `#` and `?` of names unquoted, and has neither
    progress nor ranges.
    """

    def __init__(self, server: MlflowServer, root: str) -> None:
        self._server = server
        self._root = root.strip("/")

    def _open(
        self, method: str, path: str, doing: str, **options: Any
    ) -> AbstractContextManager[requests.Response]:
        where = f"/{quote(posixpath.join(self._root, path))}" if path else ""
        return self._server.open(method, f"{self._server.tracking_url}{_API}{where}", doing, **options)

    def find(self, folder: str) -> Mapping[str, StoredFile]:
        """Returns the files right in a folder by path; none for one that is not there."""
        return with_retries(lambda: self._find(folder))

    def _find(self, folder: str) -> Mapping[str, StoredFile]:
        doing = f"list artifacts: {folder}"
        where = {"path": posixpath.join(self._root, folder)}
        with self._open("GET", "", doing, params=where) as response:
            if response.status_code != 200:
                raise refuse(response, read_refusal(response, doing), doing)
            body = read_body(response, doing, MAX_ANSWER_BYTES)
        try:
            return {
                posixpath.join(folder, posixpath.basename(file["path"])): StoredFile(
                    int(file.get("file_size") or 0), math.inf
                )
                for file in parse_json(body, name="a listing").get("files", [])
                if not file["is_dir"]
            }
        except (BundleError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise RegistryError(f"cannot {doing}\n  expected a list of files, got something else") from error

    def read(self, path: str, *, limit_bytes: int) -> bytes:
        """Returns a small file; raises RegistryError if it is larger than `limit_bytes`."""

        def read() -> bytes:
            with self._get(path, {}) as response:
                return read_body(response, f"read artifact: {path}", limit_bytes)

        return with_retries(read)

    def open(self, path: str, offset: int, *, name: str) -> AbstractContextManager[Download]:
        """Opens a file at an offset, or at 0; messages call it `name`. Raises as `rest.open_file`."""
        return open_file(lambda headers: self._get(path, headers), f"read artifact: {name}", offset)

    @contextmanager
    def _get(self, path: str, headers: Mapping[str, str]) -> Iterator[requests.Response]:
        doing = f"read artifact: {path}"
        with self._open("GET", path, doing, extra_headers=headers) as response:
            if response.status_code not in (200, 206):
                # Servers before an object store say 500 of what is not there.
                if response.status_code == 500 and path not in self._find(posixpath.dirname(path)):
                    raise NotPublishedError(f"not in MLflow: {path}\n  expected to find it, got none")
                raise refuse(response, read_refusal(response, doing), doing)
            yield response

    def write(self, path: str, data: bytes) -> None:
        """Writes a small file."""
        with_retries(lambda: self._put(path, data))

    def upload(self, path: str, entry: FileEntry, source: Path, report: Report) -> None:
        """Uploads a file; raises IntegrityError if `source` has other bytes than `entry` describes."""

        def put() -> None:
            check_copied(entry, source.stat().st_size, digest_file(source))
            with counted(report) as count, _CountedFile(source, count) as file:
                # Of an empty file requests would not send the length.
                self._put(path, file if entry.size_bytes else b"")

        with_retries(put)

    def _put(self, path: str, body: Any) -> None:
        doing = f"write artifact: {path}"
        headers = {"Content-Type": "application/octet-stream"}
        with self._open("PUT", path, doing, extra_headers=headers, data=body) as response:
            if not 200 <= response.status_code < 300:
                raise refuse(response, read_refusal(response, doing), doing)


class _CountedFile(io.FileIO):
    """A file as the body of a request, which tells how much of it was read."""

    def __init__(self, path: Path, report: Report) -> None:
        super().__init__(path)
        self._report = report

    def read(self, size: int | None = -1, /) -> bytes:
        block = super().read(-1 if size is None else max(size, BLOCK_BYTES))
        self._report(len(block))
        return block
