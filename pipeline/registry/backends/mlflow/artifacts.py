"""Files of MLflow runs: through the tracking server's proxy, or straight in the store where it has none."""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from pipeline.bundle.codec import parse_json
from pipeline.errors import (
    BundleError,
    NotPublishedError,
    RegistryError,
)
from pipeline.registry.backend import Block
from pipeline.registry.backends.mlflow.errors import translated
from pipeline.registry.backends.mlflow.http import read_body, refusal, request
from pipeline.registry.backends.mlflow.upload import Upload
from pipeline.registry.retries import with_retries
from pipeline.registry.transfer import read_blocks

MAX_LISTING_BYTES = 64 * 1024 * 1024
"""Largest list of a folder's files that is read; 100,000 records take about 15 MB."""

_API = "/mlflow-artifacts/artifacts"


@dataclass(frozen=True)
class Artifact:
    """A file or folder as a run's store lists it; `size_bytes` of a folder is 0."""

    name: str
    is_folder: bool
    size_bytes: int


class Artifacts(Protocol):
    """The files of one run. Every method raises `RegistryError` or one of its kinds."""

    def list_folder(self, folder: str) -> tuple[Artifact, ...]:
        """Returns what is in a folder; nothing for one that is not there."""

    def open(self, path: str, offset: int, size_bytes: int) -> AbstractContextManager[Iterator[Block]]:
        """Yields the blocks of a file from `offset` on, up to `size_bytes` of the whole file."""

    def put(self, path: str, upload: Upload) -> None:
        """Writes a file."""

    def delete(self, path: str) -> None:
        """Removes a file; one that is not there is fine."""


def open_artifacts(artifact_uri: str, *, tracking_uri: str, registry_uri: str | None) -> Artifacts:
    """Returns the files below the address that a run has for them.

    Raises:
        RegistryError: The client has no driver for that kind of store.
    """
    with translated("open a run's artifacts"):
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
        from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository

        try:
            repository = get_artifact_repository(artifact_uri, tracking_uri, registry_uri)
        except ImportError as error:
            raise RegistryError(
                "MLflow's client lacks a driver for the run's artifact store\n"
                f"  expected the package {error.name or 'it needs'} to be installed"
            ) from error
    if isinstance(repository, HttpArtifactRepository):
        return ProxiedArtifacts(repository.artifact_uri)
    return DirectArtifacts(repository)


def read_whole(artifacts: Artifacts, path: str, max_bytes: int) -> bytes:
    """Returns a file's bytes, never more than `max_bytes`; asks again when the answer breaks off.

    Raises:
        NotPublishedError: It is not there.
        RegistryUnavailableError: It broke off each time.
    """

    def read() -> bytes:
        with artifacts.open(path, 0, max_bytes) as blocks:
            return b"".join(blocks)

    return with_retries(read)


class ProxiedArtifacts:
    """Files behind the tracking server.

    The client's own class for them reads listings of any length, tries for minutes, sends `#` and `?` of
    names unquoted, and knows neither progress nor ranges; its way of sending a request, with its credentials
    and certificates, is used here instead.

    Args:
        artifact_uri: `http(s)://HOST/…/mlflow-artifacts/artifacts/…`.
    """

    def __init__(self, artifact_uri: str) -> None:
        self._api, _, root = artifact_uri.partition(_API)
        self._root = root.strip("/")

    def _request(self, method: str, endpoint: str, doing: str, **options: Any) -> AbstractContextManager[Any]:
        return request(self._api, endpoint, method, doing, **options)

    def _endpoint(self, path: str) -> str:
        return f"{_API}/{quote(posixpath.join(self._root, path))}"

    def list_folder(self, folder: str) -> tuple[Artifact, ...]:
        """Returns what is in a folder; nothing for one that is not there."""
        return with_retries(lambda: self._list_folder(folder))

    def _list_folder(self, folder: str) -> tuple[Artifact, ...]:
        doing = f"list artifacts: {folder}"
        where = {"path": posixpath.join(self._root, folder)}
        with self._request("GET", _API, doing, params=where) as response:
            if response.status_code != 200:
                raise refusal(response, doing)
            data = b"".join(read_body(response, doing, skip=0, left=MAX_LISTING_BYTES + 1))
        if len(data) > MAX_LISTING_BYTES:
            raise RegistryError(
                f"answer too large: cannot {doing}\n  expected {MAX_LISTING_BYTES} bytes at most"
            )
        return _parse_listing(data, doing)

    @contextmanager
    def open(self, path: str, offset: int, size_bytes: int) -> Iterator[Iterator[Block]]:
        """Yields the blocks of a file from `offset` on, up to `size_bytes` of the whole file."""
        doing = f"read artifact: {path}"
        # Compressed on the way, a range would be one of something else.
        headers = {"Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        with self._request("GET", self._endpoint(path), doing, extra_headers=headers) as response:
            if response.status_code not in (200, 206):
                raise self._missing_or(refusal(response, doing), response.status_code, path)
            skip = offset
            if response.status_code == 206:
                skip = 0
                given = str(response.headers.get("Content-Range", ""))
                if not given.startswith(f"bytes {offset}-"):
                    raise RegistryError(
                        f"cannot {doing}\n  expected bytes from {offset} on, got {given[:60]!r}"
                    )
            yield read_body(response, doing, skip=skip, left=size_bytes - offset)

    def _missing_or(self, error: RegistryError, status: int, path: str) -> RegistryError:
        """Returns the error, or a better one: servers before an object store say 500 of what is not there."""
        if status != 500:
            return error
        folder, name = posixpath.split(path)
        try:
            there = any(found.name == name for found in self._list_folder(folder))
        except RegistryError:
            return error
        return (
            error if there else NotPublishedError(f"not in MLflow: {path}\n  expected to find it, got none")
        )

    def put(self, path: str, upload: Upload) -> None:
        """Writes a file."""
        with_retries(lambda: self._put(path, upload))

    def _put(self, path: str, upload: Upload) -> None:
        doing = f"write artifact: {path}"
        headers = {"Content-Type": "application/octet-stream"}
        try:
            options = {"extra_headers": headers, "data": upload.body()}
            with self._request("PUT", self._endpoint(path), doing, **options) as response:
                if not 200 <= response.status_code < 300:
                    raise refusal(response, doing)
        except RegistryError:
            upload.take_back()
            raise

    def delete(self, path: str) -> None:
        """Removes a file; one that is not there is fine."""
        with_retries(lambda: self._delete(path))

    def _delete(self, path: str) -> None:
        doing = f"delete artifact: {path}"
        with self._request("DELETE", self._endpoint(path), doing) as response:
            if response.status_code in (405, 501):
                raise RegistryError(f"MLflow's artifact store cannot delete: {path}\n  expected it to do so")
            if response.status_code not in (404, 410) and not 200 <= response.status_code < 300:
                raise refusal(response, doing)


def _parse_listing(data: bytes, doing: str) -> tuple[Artifact, ...]:
    try:
        files = parse_json(data, name="listing").get("files", [])
        return tuple(
            Artifact(posixpath.basename(file["path"]), bool(file["is_dir"]), int(file.get("file_size") or 0))
            for file in files
        )
    except (BundleError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise RegistryError(f"cannot {doing}\n  expected a list of files, got something else") from error


class DirectArtifacts:
    """Files that the client reaches without the tracking server, by a driver of its own.

    Args:
        repository: MLflow's driver.
    """

    def __init__(self, repository: Any) -> None:
        self._repository = repository

    def list_folder(self, folder: str) -> tuple[Artifact, ...]:
        """Returns what is in a folder; nothing for one that is not there."""
        with translated(f"list artifacts: {folder}"):
            found = self._repository.list_artifacts(folder)
        return tuple(
            Artifact(posixpath.basename(file.path), bool(file.is_dir), int(file.file_size or 0))
            for file in found
        )

    @contextmanager
    def open(self, path: str, offset: int, size_bytes: int) -> Iterator[Iterator[Block]]:
        """Yields the blocks of a file from `offset` on, up to `size_bytes` of the whole file."""
        folder, name = posixpath.split(path)
        there = [found for found in self.list_folder(folder) if found.name == name and not found.is_folder]
        if not there:
            raise NotPublishedError(f"not in MLflow: {path}\n  expected to find it, got none")
        if there[0].size_bytes > size_bytes:
            raise RegistryError(
                f"file too large in MLflow: {path}\n  expected {size_bytes} bytes, got {there[0].size_bytes}"
            )
        with tempfile.TemporaryDirectory(prefix="ortprep-") as temporary:
            with translated(f"read artifact: {path}"):
                local = Path(self._repository.download_artifacts(path, temporary))
            yield read_blocks(local, offset)

    def put(self, path: str, upload: Upload) -> None:
        """Writes a file."""
        upload.check()
        folder, name = posixpath.split(path)
        with tempfile.TemporaryDirectory(prefix="ortprep-") as temporary:
            # The driver takes the name from the file it is given.
            local = Path(temporary) / name
            upload.link(local)
            with translated(f"write artifact: {path}"):
                self._repository.log_artifact(str(local), folder)
        upload.report_rest()

    def delete(self, path: str) -> None:
        """Removes a file; one that is not there is fine."""
        try:
            with translated(f"delete artifact: {path}"):
                self._repository.delete_artifacts(path)
        except NotPublishedError:
            return
        except NotImplementedError as error:
            raise RegistryError(
                f"MLflow's artifact store cannot delete: {path}\n  expected it to do so"
            ) from error
