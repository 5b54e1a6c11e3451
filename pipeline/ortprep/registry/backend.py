"""The interface of every kind of registry: files by digest, and refs, which are names of small documents."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from ortprep.bundle.digest import PREFIX, is_digest
from ortprep.bundle.loader_config import FileEntry
from ortprep.errors import RegistryError
from ortprep.registry.documents import Part
from ortprep.transport.transfer import Download

MAX_REFS = 10_000
"""Largest number of refs of one kind and model that is read."""

MAX_LISTING_BYTES = 64 * 1024 * 1024
"""Largest sum of all documents, in bytes, that one listing reads: 10,000 versions of 6 KB, say."""


def check_count(count: int, what: str) -> None:
    """Raises RegistryError for more than `MAX_REFS`: what is left out of a listing would count as unused."""
    if count > MAX_REFS:
        raise RegistryError(f"too many {what}\n  expected at most {MAX_REFS}, got {count}")


def check_listing(size_bytes: int, what: str) -> None:
    """Raises RegistryError if one listing would read more than `MAX_LISTING_BYTES`."""
    if size_bytes > MAX_LISTING_BYTES:
        raise RegistryError(f"too many bytes in {what}\n  expected {MAX_LISTING_BYTES} at most, got more")


class Kind(StrEnum):
    """The kinds of refs.

    Versions, parts and signatures are named `HEX.REST` after the digest of their document, and never change.
    REST is the label of a version, and of a signature the `subject_digits` of its part. The others are called
    as an alias is, and are pointers that move: to the version that the alias names, and to the one that it
    named before. Their document is that of the version.
    """

    VERSION = "versions"
    PART = "parts"
    SIGNATURE = "signatures"
    ALIAS = "aliases"
    PREVIOUS = "previous"


POINTERS = frozenset({Kind.ALIAS, Kind.PREVIOUS})
"""The kinds of refs that move."""


def ref_name(digest: str, rest: str = "") -> str:
    """Returns the name of a ref: digits of its document's digest, and a label or digits of a subject."""
    return digest.removeprefix(PREFIX) + (f".{rest}" if rest else "")


def subject_digits(digest: str) -> str:
    """Returns the digits that stand for a subject: tags of OCI registries have no place for all."""
    return digest.removeprefix(PREFIX)[:32]


def digest_of(name: str) -> str:
    """Returns what the name of a ref has in place of the digest of its document."""
    return PREFIX + name.partition(".")[0]


def digests_of(names: Iterable[str]) -> dict[str, str]:
    """Returns the names of refs with the digests in them, without those that have none."""
    digests = {name: digest_of(name) for name in names}
    return {name: digest for name, digest in digests.items() if is_digest(digest)}


@dataclass(frozen=True)
class SweepResult:
    """Parts by digest, and the number of files, that a collection removed or would remove."""

    parts: tuple[str, ...] = ()
    files: int = 0
    size_bytes: int = 0


class Backend(Protocol):
    """A registry: three methods for files, five for refs, and three that are the registry's own affair.

    Bytes are returned unchecked. Methods may be called from several threads at once and repeated. No error
    and no log line has a credential in it. All methods raise:

        RegistryUnavailableError: The registry cannot be reached, is overloaded, or breaks off, several times.
        AccessDeniedError: It needs other credentials.
        NotPublishedError: It does not have what was asked for.
        RegistryError: It refuses for another reason.
    """

    url: str
    """Where it is, in full; never with credentials."""

    def has_file(self, part: Part, entry: FileEntry) -> bool:
        """Says whether a file of a part is there, with its size; its grace period begins again then."""

    def open_file(self, part: Part, entry: FileEntry, offset: int = 0) -> AbstractContextManager[Download]:
        """Opens a file of a part, at `offset` or at 0. Tries once: `download` goes on."""

    def put_file(self, part: Part, entry: FileEntry, source: Path) -> None:
        """Uploads a file of a part; the registry keeps exactly the bytes that its entry describes.

        Raises:
            IntegrityError: The file at `source` has other bytes.
        """

    def open_ref(self, model: str, kind: Kind, name: str) -> AbstractContextManager[Download]:
        """Opens the document of a ref that is no pointer. Tries once."""

    def list_refs(self, model: str, kind: Kind) -> Mapping[str, str]:
        """Returns the names of all refs of a kind, with the digests of their documents.

        They include every ref whose `put_ref` returned before this call: publishers rely on it. Refs to parts
        need not be listed.
        """

    def put_ref(self, model: str, kind: Kind, name: str, data: bytes) -> None:
        """Stores a document under a name; a document that is there already is refreshed."""

    def put_label(self, model: str, label: str, data: bytes) -> None:  # noqa: ARG002
        """Sets the tag by which other tools find a version; a registry without such tags does nothing."""
        return

    def delete_version(self, model: str, name: str) -> None:
        """Removes the ref of a version and its document; one that is not there is fine."""

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models, sorted."""

    def sweep(self, model: str, live: Collection[Part], *, grace_s: float, dry_run: bool) -> SweepResult:
        """Removes parts and files that no part of `live` has and that are older than a grace period.

        Does nothing if the registry collects them itself.
        """

    def close(self) -> None:
        """Closes connections, if the backend has any of its own."""
        return
