"""Bundles in OCI registries: Harbor, GHCR, ECR, Artifactory, GitLab, CNCF Distribution and all the others.

A model is a repository. Its records are small artifacts with tags of their own, its files are blobs. Beside
them stand artifacts that other tools understand: a manifest for every target of a part, an image index for
every version, which has the version's labels and aliases as its tags.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipeline.bundle.loader_config import FileEntry
from pipeline.errors import AccessDeniedError, MissingExtraError, RegistryError, RegistryUnavailableError
from pipeline.registry.backend import Report, StoredFile
from pipeline.registry.backends.oci import documents
from pipeline.registry.backends.oci.documents import Document
from pipeline.registry.backends.oci.download import open_blob
from pipeline.registry.backends.oci.manifests import Manifests
from pipeline.registry.backends.oci.names import MAX_REPOSITORY_LENGTH, is_repository, parse_url
from pipeline.registry.backends.oci.requests import Request
from pipeline.registry.backends.oci.upload import CHUNK_BYTES, has_blob, put_blob, put_file
from pipeline.registry.records import MAX_RECORD_BYTES, MAX_RECORDS, PartRecord, RecordName, encode_record
from pipeline.registry.state import State, Version

if TYPE_CHECKING:
    from pipeline.registry.backends.oci.client import OciClient

T = TypeVar("T")
R = TypeVar("R")

_PARALLEL_REQUESTS = 8


class OciBackend:
    """Models in the repositories of an OCI registry; see `Backend`.

    Credentials are those of `docker login`.

    Args:
        url: `oci://HOST[:PORT]/PREFIX`, or `oci+http://…` for a registry without TLS.
        connect_timeout_s: Longest wait for a connection.
        read_timeout_s: Longest wait for the next bytes of an answer.
        chunk_bytes: What is uploaded in one request; smaller files go as a whole.

    Raises:
        RegistryError: The URL is not of that form, or has credentials in it.
        MissingExtraError: oras is not installed.
    """

    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 60.0,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        place = parse_url(url)
        try:
            from pipeline.registry.backends.oci.client import OciClient
        except ImportError as error:
            raise MissingExtraError(
                f"cannot use OCI registries\n  expected oras to be installed, got: {error}",
                hint="pip install 'ortprep[oci]'",
            ) from error
        self._url = url
        self._prefix = place.prefix
        self._chunk_bytes = chunk_bytes
        self._client: OciClient = OciClient(
            place.host,
            secure=place.secure,
            connect_timeout_s=connect_timeout_s,
            read_timeout_s=read_timeout_s,
        )

    @property
    def url(self) -> str:
        """Where it is, as the user wrote it."""
        return self._url

    def close(self) -> None:
        """Lets go of connections."""
        self._client.close()

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models with at least one record, sorted.

        Raises:
            RegistryError: The registry does not list its repositories, or fails.
        """
        request = Request("GET", "_catalog?n=1000", "list the repositories")
        try:
            repositories = set(self._client.list_names(request, "repositories"))
        except RegistryUnavailableError:
            raise
        except RegistryError as error:
            kind = AccessDeniedError if isinstance(error, AccessDeniedError) else RegistryError
            raise kind(
                f"registry does not list its models: {self._client.host}\n{error.message}",
                hint=f"ortprep versions NAME --registry {self._url}",
            ) from None
        start = f"{self._prefix}/" if self._prefix else ""
        names = sorted(one.removeprefix(start) for one in repositories if one.startswith(start))
        models = [name for name in names if is_repository(name) and "/" not in name]
        counts = _parallel(lambda name: len(self.list_records(name)), models)
        return tuple(name for name, count in zip(models, counts, strict=True) if count)

    def list_records(self, model: str) -> tuple[RecordName, ...]:
        """Returns the names of a model's records.

        Raises:
            RegistryError: There are too many, or the registry fails.
        """
        tags = self._manifests(model).list_tags()
        own = {tag.removeprefix(documents.RESERVED) for tag in tags if tag.startswith(documents.RESERVED)}
        names = sorted(name for name in map(RecordName.parse, own) if name is not None)
        if len(names) > MAX_RECORDS:
            raise RegistryError(
                f"too many records: {model} in {self._url}\n"
                f"  expected at most {MAX_RECORDS}, got {len(names)}"
            )
        return tuple(names)

    def read_record(self, model: str, name: RecordName) -> bytes:
        """Returns a record's bytes.

        Raises:
            NotPublishedError: It is not there.
            IntegrityError: What has its tag is no manifest.
            RegistryError: The registry fails.
        """
        manifest = self._manifests(model).read(documents.record_tag(name))
        data = documents.inline_record(name, manifest)
        if data is not None:
            return data
        request = Request(
            "GET",
            f"blobs/{name.digest}",
            "read a record",
            self._repository(model),
            limit_bytes=MAX_RECORD_BYTES,
        )
        return self._client.fetch(request).body

    def write_record(self, model: str, name: RecordName, data: bytes) -> None:
        """Writes a record; its tag comes last, so it is listed once it is there whole.

        Raises:
            RegistryError: The registry fails.
        """
        repository, manifests = self._repository(model), self._manifests(model)
        document, tag = documents.record_document(name, data), documents.record_tag(name)
        if manifests.digest_of(tag) != document.digest:
            put_blob(self._client, repository, documents.EMPTY)
            put_blob(self._client, repository, data)
            manifests.put(tag, document)

    def delete_record(self, model: str, name: RecordName) -> None:
        """Removes a record.

        Raises:
            RegistryError: Deletion is switched off there, or the registry fails.
        """
        manifests = self._manifests(model)
        digest = manifests.digest_of(documents.record_tag(name))
        if digest:
            manifests.delete(digest)

    def find_missing(self, model: str, part: PartRecord) -> tuple[FileEntry, ...]:
        """Returns those of a part's files that have to be uploaded, each digest once.

        Raises:
            RegistryError: The registry fails.
        """
        repository = self._repository(model)
        entries = list({entry.sha256: entry for entry in part.files}.values())
        there = _parallel(lambda entry: has_blob(self._client, repository, entry.sha256), entries)
        return tuple(entry for entry, is_there in zip(entries, there, strict=True) if not is_there)

    def upload_file(
        self,
        model: str,
        part: PartRecord,  # noqa: ARG002
        entry: FileEntry,
        source: Path,
        report: Report,
    ) -> None:
        """Uploads a file.

        Raises:
            IntegrityError: The file at `source` has other bytes.
            RegistryError: The registry fails.
            OSError: The file cannot be read.
        """
        put_file(self._client, self._repository(model), entry, source, report, chunk_bytes=self._chunk_bytes)

    def finish_part(self, model: str, part: PartRecord) -> None:
        """Pushes a manifest for every target of the part, for tools that know nothing of records.

        Raises:
            RegistryError: The registry fails.
        """
        put_blob(self._client, self._repository(model), encode_record(part)[1])
        for tag, document in documents.target_documents(part).items():
            self._manifests(model).put(tag, document)

    def open_file(
        self,
        model: str,
        part: PartRecord,  # noqa: ARG002
        entry: FileEntry,
        offset: int,
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Yields the blocks of a file from `offset` on.

        Raises:
            NotPublishedError: It is not there.
            IntegrityError: There are more bytes than `entry` says.
            RegistryError: The registry fails.
        """
        return open_blob(self._client, self._repository(model), entry, offset)

    def list_files(self, model: str) -> tuple[StoredFile, ...]:  # noqa: ARG002
        """Returns nothing: a registry collects blobs by itself."""
        return ()

    def delete_files(self, model: str, digests: Sequence[str]) -> None:
        """Does nothing: a registry collects blobs by itself."""

    def delete_part(self, model: str, digest: str) -> None:
        """Removes the manifests of a part's targets, and before them every index that lists one.

        Raises:
            RegistryError: Deletion is switched off there, or the registry fails.
        """
        manifests = self._manifests(model)
        tags, prefix = manifests.list_tags(), documents.target_prefix(digest)
        found = _parallel(manifests.digest_of, [tag for tag in tags if tag.startswith(prefix)])
        targets = {one for one in found if one}
        if not targets:
            return
        views = [tag for tag in tags if not tag.startswith(documents.RESERVED)]
        listed = _parallel(manifests.read_index, views)
        indexes = {index for index, children in listed if children & targets}
        for one in (*sorted(indexes), *sorted(targets)):
            manifests.delete(one)

    def delete_version(self, model: str, version: Version) -> None:
        """Removes the image index of a version, and with it its tags.

        Raises:
            RegistryError: Deletion is switched off there, or the registry fails.
        """
        manifests = self._manifests(model)
        for tag in version.labels:
            digest = "" if tag.startswith(documents.RESERVED) else manifests.digest_of(tag)
            if digest:
                manifests.delete(digest)

    def mirror(self, model: str, state: State) -> None:
        """Pushes an image index for every version under each of its labels and aliases.

        Raises:
            RegistryError: The registry fails.
        """
        # An alias hides a label of its name, here as everywhere.
        aliases = {name: alias.version for name, alias in state.aliases.items() if alias.version}
        wanted = {**state.labels, **aliases}
        tags = [tag for tag in wanted if not tag.startswith(documents.RESERVED)]
        views = {
            digest: documents.version_document(state.versions[digest], state.parts)
            for digest in sorted({wanted[tag] for tag in tags})
        }
        _parallel(lambda tag: self._show(model, tag, state.versions[wanted[tag]], views, state.parts), tags)

    def _show(
        self,
        model: str,
        tag: str,
        version: Version,
        views: Mapping[str, Document],
        parts: Mapping[str, PartRecord],
    ) -> None:
        manifests = self._manifests(model)
        try:
            manifests.put(tag, views[version.digest])
        except (RegistryUnavailableError, AccessDeniedError):
            raise
        except RegistryError:
            # Another release of ortprep may have pushed other manifests for the same parts.
            for part in version.record.parts:
                self.finish_part(model, parts[part])
            manifests.put(tag, views[version.digest])

    def _manifests(self, model: str) -> Manifests:
        return Manifests(self._client, self._repository(model))

    def _repository(self, model: str) -> str:
        repository = f"{self._prefix}/{model}" if self._prefix else model
        if not is_repository(model) or "/" in model or len(repository) > MAX_REPOSITORY_LENGTH:
            raise RegistryError(
                f"not a name for an OCI registry: {model[:200]!r}\n"
                "  expected lower-case letters and digits with single '.', '_' or '-' between them"
            )
        return repository


def _parallel(action: Callable[[T], R], items: Iterable[T]) -> list[R]:
    with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="ortprep-oci") as pool:
        return list(pool.map(action, items))
