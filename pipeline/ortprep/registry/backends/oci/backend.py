"""Bundles in OCI registries: Harbor, GHCR, ECR, Artifactory, GitLab, CNCF Distribution and all the others.

A model is a repository. A part is an image manifest, a version is an image index with its label as a tag, an
alias is any other tag of an index. Tags that begin with `_` are ours:

    _v.HEX.LABEL           every version, with digits of its label's digest; found if the label was moved
    _a.KIND.SUBJECT.HEX    signatures and moves of aliases, with their subject as OCI 1.1 wants it
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from ortprep.bundle.digest import PREFIX, digest_bytes, is_digest
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import BundleError, NotPublishedError, RegistryError, RegistryUnavailableError
from ortprep.quoting import quoted
from ortprep.registry.backend import KIND_NAMES, MAX_VERSIONS, Backend, Download, Known, Report, SweepResult
from ortprep.registry.backends.oci.client import OciClient
from ortprep.registry.backends.oci.repository import Repository
from ortprep.registry.backends.oci.upload import CHUNK_BYTES, Upload
from ortprep.registry.documents import (
    EMPTY,
    INDEX,
    MANIFEST,
    VERSION_TYPE,
    Part,
    Version,
    build_manifest,
    describe_content,
    parse_document,
    parse_object,
)
from ortprep.registry.progress import ignore
from ortprep.registry.transfer import map_parallel, read_documents
from ortprep.spec.redaction import redact_url

_OWN, _VERSION, _ATTACHED = "_", "_v.", "_a."
_HEX_DIGITS = 16
_CLAIM_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.1
_MAX_REPOSITORY_LENGTH = 255
_COMPONENT = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_MODEL = re.compile(_COMPONENT)
_URL = re.compile(
    r"(?i:oci(?P<plain>\+http)?)://"
    r"(?P<host>(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(?::[0-9]{1,5})?)"
    rf"(?:/(?P<prefix>{_COMPONENT}(?:/{_COMPONENT})*))?/*"
)
_HUB = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}


class OciBackend(Backend):
    """Models in the repositories of an OCI registry; see `Backend`.

    Credentials are those of `docker login`.

    Args:
        url: `oci://HOST[:PORT]/PREFIX`, or `oci+http://…` for a registry without TLS.
        timeout_s: Longest wait for a connection, and for the next bytes of an answer.
        chunk_bytes: Size of an upload's requests; smaller files go as a whole.

    Raises:
        RegistryError: The URL is not of that form.
    """

    def __init__(
        self, url: str, *, timeout_s: tuple[float, float] = (10, 60), chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        place = _URL.fullmatch(url)
        if place is None:
            raise RegistryError(
                f"not an OCI registry's URL: {redact_url(url)[:200]}\n"
                "  expected oci://HOST[:PORT]/PREFIX, or oci+http://… without TLS, PREFIX in lower case"
            )
        self.url = url
        self._prefix = f"{place['prefix']}/" if place["prefix"] else ""
        self._chunk_bytes = chunk_bytes
        host = _HUB.get(place["host"], place["host"])
        self._client = OciClient(host, secure=not place["plain"], timeout_s=timeout_s)

    def close(self) -> None:
        self._client.close()

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models with at least one version, sorted."""
        try:
            repositories = Repository(self._client, "").list_names("_catalog?n=1000", "repositories")
        except RegistryUnavailableError:
            raise
        except RegistryError as error:
            raise type(error)(
                f"registry does not list its models: {self._client.host}\n{error.message}",
                hint=f"ortprep versions NAME --registry {quoted(self.url)}",
            ) from None
        names = [name.removeprefix(self._prefix) for name in repositories if name.startswith(self._prefix)]
        models = sorted({name for name in names if _MODEL.fullmatch(name)})
        listed = map_parallel(lambda name: self._repository(name).list_tags(), models)
        return tuple(model for model, tags in listed.items() if _list_claims(tags))

    def read_versions(self, model: str, known: Known) -> tuple[bytes, ...]:
        """Returns the documents of all versions, those that another tool copied here under a tag included."""
        repository = self._repository(model)
        tags = repository.list_tags()
        claims = _list_claims(tags)
        labels = set(claims.values())
        others = [tag for tag in tags if not tag.startswith(_OWN) and _digits(tag) not in labels]
        digests = sorted({*claims, *filter(None, map_parallel(repository.digest_of, others).values())})

        def read(digest: str) -> bytes | None:
            with suppress(NotPublishedError):  # removed since it was listed
                return known(digest) or repository.read_manifest(digest)
            return None

        documents = read_documents(read, digests[: MAX_VERSIONS + 1])  # the catalogue refuses more
        return tuple(data for data in documents.values() if VERSION_TYPE.encode() in data)

    def read_aliases(self, model: str) -> Mapping[str, str]:
        repository = self._repository(model)
        tags = repository.list_tags()
        claims, names = _list_claims(tags), [tag for tag in tags if not tag.startswith(_OWN)]
        digests = map_parallel(repository.digest_of, names)
        return {
            name: digest for name, digest in digests.items() if digest and claims.get(digest) != _digits(name)
        }

    def add_version(self, model: str, version: Version) -> bool:
        """Adds a version whose parts are there, unless another one has its label.

        OCI registries overwrite tags, so a publisher claims a label before it sets the tag. One that sees no
        other claim has the label, since later ones see its claim. Of those that see each other, all but the
        one with the lowest digest withdraw; that one waits until they have, or until one of them has the tag.
        """
        repository, digits = self._repository(model), _digits(version.label)
        claim = f"{_VERSION}{version.digest.removeprefix(PREFIX)}.{digits}"
        repository.put_manifest(claim, version.data, INDEX)
        deadline = time.monotonic() + _CLAIM_TIMEOUT_S
        while True:
            claims = _list_claims(repository.list_tags())
            rivals = [rival for rival, label in claims.items() if label == digits and rival != version.digest]
            holder = repository.digest_of(version.label)
            if not rivals and not holder:
                repository.put_manifest(version.label, version.data, INDEX)
                return True
            if holder == version.digest:
                return True
            if holder or min(rivals) < version.digest or time.monotonic() > deadline:
                repository.delete_manifest(version.digest)
                return False
            time.sleep(_POLL_INTERVAL_S)

    def delete_version(self, model: str, version: Version) -> None:
        """Removes the image index of a version, with its tags, and what is attached to it."""
        repository = self._repository(model)
        repository.delete_manifest(version.digest)
        tags = [tag for tag in repository.list_tags() if _subject_of(tag) == version.digest]
        _delete_attached(repository, tags)

    def set_alias(self, model: str, alias: str, version: Version) -> None:
        self._repository(model).put_manifest(alias, version.data, INDEX)

    def find_missing(self, model: str, part: Part) -> tuple[FileEntry, ...]:
        repository = self._repository(model)
        entries = {entry.sha256: entry for entry in part.files}
        there = map_parallel(repository.has_blob, list(entries))
        return tuple(entry for digest, entry in entries.items() if not there[digest])

    def upload_file(self, model: str, part: Part, entry: FileEntry, source: Path, report: Report) -> None:
        Upload(self._repository(model), entry, source, report, self._chunk_bytes).run()

    def _upload_document(self, model: str, data: bytes) -> None:
        repository, entry = self._repository(model), FileEntry("a document", len(data), digest_bytes(data))
        if not repository.has_blob(entry.sha256):
            with tempfile.NamedTemporaryFile(prefix="ortprep-") as file:
                file.write(data)
                file.flush()
                Upload(repository, entry, Path(file.name), ignore, self._chunk_bytes).run()

    def put_part(self, model: str, part: Part) -> None:
        """Pushes the manifest of a part, under no tag: versions list it."""
        self._upload_document(model, EMPTY)
        self._repository(model).put_manifest(part.digest, part.data, MANIFEST)

    def read_part(self, model: str, digest: str) -> bytes:
        return self._repository(model).read_manifest(digest)

    def open_file(
        self, model: str, part: Part, entry: FileEntry, offset: int
    ) -> AbstractContextManager[Download]:
        return self._repository(model).open_blob(entry, offset)

    def attach(self, model: str, subject: Part | Version, kind: str, data: bytes) -> None:
        """Pushes a manifest with a part or a version as its subject, under a tag of its own."""
        repository = self._repository(model)
        for blob in (EMPTY, data):
            self._upload_document(model, blob)
        digest = digest_bytes(data)
        subject_type = INDEX if isinstance(subject, Version) else MANIFEST
        document = build_manifest(
            kind,
            [describe_content(kind, digest, len(data))],
            subject=describe_content(subject_type, subject.digest, len(subject.data)),
        )
        tag = f"{_attached_prefix(kind, subject.digest)}{digest.removeprefix(PREFIX)[:_HEX_DIGITS]}"
        repository.put_manifest(tag, document, MANIFEST)

    def read_attached(
        self, model: str, subjects: Sequence[Part | Version], kind: str
    ) -> Mapping[str, tuple[bytes, ...]]:
        tags = self._repository(model).list_tags()
        by_prefix = {_attached_prefix(kind, subject.digest): subject.digest for subject in subjects}
        by_subject: dict[str, tuple[bytes, ...]] = {subject.digest: () for subject in subjects}
        attached = [tag for tag in tags if tag[:-_HEX_DIGITS] in by_prefix]
        for tag, data in read_documents(lambda tag: self._read_attached(model, tag, kind), attached).items():
            by_subject[by_prefix[tag[:-_HEX_DIGITS]]] += (data,)
        return by_subject

    def _read_attached(self, model: str, tag: str, kind: str) -> bytes | None:
        repository = self._repository(model)
        try:
            (layer,) = parse_document(repository.read_manifest(tag), kind).layers
            return repository.read_blob(layer.digest)
        except (NotPublishedError, BundleError, ValueError):
            return None  # removed since it was listed, or none of ours

    def sweep(self, model: str, live: Collection[Part], *, grace_s: float, dry_run: bool) -> SweepResult:
        """Removes what was attached to what is gone; what no tag leads to is left to the registry itself."""
        repository = self._repository(model)
        tags = () if dry_run else repository.list_tags()
        present = {"", *_list_claims(tags), *(part.digest for part in live)}
        attached = [(tag, subject) for tag in tags if (subject := _subject_of(tag)) not in present]
        _delete_attached(repository, [tag for tag, subject in attached if not repository.digest_of(subject)])
        return SweepResult()

    def _repository(self, model: str) -> Repository:
        repository = f"{self._prefix}{model}"
        if not _MODEL.fullmatch(model) or len(repository) > _MAX_REPOSITORY_LENGTH:
            raise RegistryError(
                f"not a name for an OCI registry: {model[:200]!r}\n"
                "  expected lower-case letters and digits with single '.', '_' or '-' between them"
            )
        return Repository(self._client, repository)


def _digits(text: str) -> str:
    return digest_bytes(text.encode()).removeprefix(PREFIX)[:_HEX_DIGITS]


def _list_claims(tags: Iterable[str]) -> dict[str, str]:
    """Returns the digests of all versions, with digits of their labels' digests."""
    claims = (tag.removeprefix(_VERSION).partition(".") for tag in tags if tag.startswith(_VERSION))
    return {PREFIX + digest: label for digest, _, label in claims if is_digest(PREFIX + digest)}


def _delete_attached(repository: Repository, tags: Iterable[str]) -> None:
    """Removes what is attached under tags, and nothing else that somebody put under such a tag."""
    for tag in tags:
        with suppress(NotPublishedError, BundleError):  # removed since it was listed, or none of ours
            data = repository.read_manifest(tag)
            kind = parse_object(data).get("artifactType")
            subject = parse_document(data, kind).subject if kind in KIND_NAMES else None
            if subject is not None and subject.digest == _subject_of(tag):
                repository.delete_manifest(digest_bytes(data))


def _subject_of(tag: str) -> str:
    """Returns the digest of what the document under a tag is attached to, "" for other tags."""
    subject = PREFIX + tag.split(".")[2] if tag.startswith(_ATTACHED) and tag.count(".") == 3 else ""
    return subject if is_digest(subject) else ""


def _attached_prefix(kind: str, subject: str) -> str:
    return f"{_ATTACHED}{KIND_NAMES[kind]}.{subject.removeprefix(PREFIX)}."
