"""What every kind of registry offers; the rest of the package is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ortprep.bundle.loader_config import FileEntry
from ortprep.registry.documents import Part, Version

Report = Callable[[int], None]
"""Takes a number of transferred bytes; a negative one for bytes that have to be sent again."""

Block = bytes | memoryview
"""Part of a file; valid until the next one is read."""

BLOCK_BYTES = 256 * 1024
"""Size of the blocks that are read, hashed and written."""


@dataclass(frozen=True)
class Download:
    """An open file of a registry or another source.

    Attributes:
        blocks: The file's bytes from `start` on.
        start: Offset of the first byte: what was asked for, or 0 if the source cannot or must not go on.
        size_bytes: Size of the whole file, None if the source does not say.
        version: Changes when the file does (an ETag, say), None if the source gives no such thing.
        sha256: Digest that the source gives for the whole file, None if it gives none.
    """

    blocks: Iterator[Block]
    start: int
    size_bytes: int | None = None
    version: str | None = None
    sha256: str | None = None


MAX_VERSIONS = 10_000
"""Largest number of versions of one model that is read."""

MAX_LISTING_BYTES = 64 * 1024 * 1024
"""Largest sum of all documents, in bytes, that one listing reads: 10,000 versions of 6 KB, say."""

SIGNATURE = "application/vnd.dev.sigstore.bundle.v0.3+json"
MOVE = "application/vnd.ortprep.move.v1+json"
KIND_NAMES = {SIGNATURE: "signature", MOVE: "move"}
"""Kinds of documents that are attached to parts and versions, with their names in files and tags."""

Known = Callable[[str], bytes | None]
"""Returns the document of that digest if this machine has it already."""


@dataclass(frozen=True)
class SweepResult:
    """What a collection removed, or would remove: digests of parts, and a number of files."""

    parts: tuple[str, ...] = ()
    files: int = 0
    size_bytes: int = 0


class Backend(Protocol):
    """A registry. It keeps versions, labels and aliases as that kind of registry does natively.

    Documents are returned as bytes, unchecked, and at most one byte more than `MAX_DOCUMENT_BYTES`. Methods
    may be called from several threads at once and repeated. No error and no log line has a credential in it.
    All methods raise:

        RegistryUnavailableError: The registry cannot be reached, is overloaded, or breaks off, several times.
        AccessDeniedError: It needs other credentials.
        NotPublishedError: It does not have what was asked for.
        RegistryError: It refuses for another reason.
    """

    url: str
    """Where it is, as the user wrote it; never with credentials."""

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models, sorted."""

    def read_versions(self, model: str, known: Known) -> tuple[bytes, ...]:
        """Returns the documents of all versions; none for a model that is not there.

        They include every version whose `add_version` returned before this call: publishers rely on it.
        """

    def read_aliases(self, model: str) -> Mapping[str, str]:
        """Returns the digest of the version that each alias names now, also if another tool moved it."""

    def add_version(self, model: str, version: Version) -> bool:
        """Adds a version whose parts are there, unless another has its label; says whether it is there now.

        If several publishers claim one label at the same time, exactly one version is added.
        """

    def delete_version(self, model: str, version: Version) -> None:
        """Removes a version with its label, then what is attached to it; one that is not there is fine."""

    def set_alias(self, model: str, alias: str, version: Version) -> None:
        """Makes an alias name a version."""

    def find_missing(self, model: str, part: Part) -> tuple[FileEntry, ...]:
        """Returns the files of a part that have to be uploaded, each digest once.

        The others are refreshed: their grace period begins again.
        """

    def upload_file(self, model: str, part: Part, entry: FileEntry, source: Path, report: Report) -> None:
        """Uploads a file; the registry keeps exactly the bytes that `entry` describes.

        An upload that broke off continues where it stopped if the registry supports that.

        Raises:
            IntegrityError: The file at `source` has other bytes.
        """

    def put_part(self, model: str, part: Part) -> None:
        """Writes the document of a part whose files are there; again, to refresh it."""

    def read_part(self, model: str, digest: str) -> bytes:
        """Returns the document of a part."""

    def open_file(
        self, model: str, part: Part, entry: FileEntry, offset: int
    ) -> AbstractContextManager[Download]:
        """Opens a file at `offset`, or at 0; its bytes are unchecked. Tries once: `download` goes on."""

    def attach(self, model: str, subject: Part | Version, kind: str, data: bytes) -> None:
        """Attaches a small document to a part or a version; attaching it again does nothing."""

    def read_attached(
        self, model: str, subjects: Sequence[Part | Version], kind: str
    ) -> Mapping[str, tuple[bytes, ...]]:
        """Returns what of a kind is attached to parts or versions, by their digests."""

    def sweep(self, model: str, live: Collection[Part], *, grace_s: float, dry_run: bool) -> SweepResult:
        """Removes parts and files that no part of `live` has and that are older than a grace period.

        Does nothing if the registry collects them itself.
        """

    def close(self) -> None:
        """Closes connections, if the backend has any of its own."""
        return
