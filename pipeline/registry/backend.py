"""What every kind of registry offers; the rest of the package is the same for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pipeline.bundle.loader_config import FileEntry
from pipeline.registry.records import PartRecord, RecordName
from pipeline.registry.state import State, Version

Report = Callable[[int], None]
"""Told how many more bytes went over; a negative number takes back what has to go again."""

Block = bytes | memoryview
"""Part of a file; valid until the next is asked for."""

BLOCK_BYTES = 256 * 1024
"""How much is read, hashed and written at a time."""


@dataclass(frozen=True)
class StoredFile:
    """A file in a registry that can be removed by itself.

    Attributes:
        digest: `sha256:<hex>`.
        size_bytes: Its size.
    """

    digest: str
    size_bytes: int


class Backend(Protocol):
    """One place where versions of models are kept.

    A backend keeps records and files, both by digest, and knows nothing of what they mean. Methods may be
    called from several threads at once. All of them raise:

        RegistryUnavailableError: The registry cannot be reached, is overloaded, or breaks off (after a few
            tries of the backend's own). What was asked may be asked again.
        AccessDeniedError: It wants other credentials.
        RegistryError: It refuses for another reason.

    No message, log line or exception contains a credential.
    """

    @property
    def url(self) -> str:
        """Where it is, as the user wrote it; never with credentials."""

    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models, sorted; there may be some without a version."""

    def list_records(self, model: str) -> tuple[RecordName, ...]:
        """Returns the names of a model's records; none for a model that is not there.

        Whatever `write_record` had finished writing before this call began is listed: the registry's
        promises under concurrency rest on this alone.
        """

    def read_record(self, model: str, name: RecordName) -> bytes:
        """Returns a record's bytes, unchecked; never reads more than `MAX_RECORD_BYTES` + 1.

        Raises:
            NotPublishedError: It is not there (any more).
        """

    def write_record(self, model: str, name: RecordName, data: bytes) -> None:
        """Writes a record; it is listed once it is there whole. Writing it again does nothing."""

    def delete_record(self, model: str, name: RecordName) -> None:
        """Removes a record; one that is not there is fine."""

    def find_missing(self, model: str, part: PartRecord) -> tuple[FileEntry, ...]:
        """Returns those of a part's files that have to be uploaded, each digest once."""

    def upload_file(
        self, model: str, part: PartRecord, entry: FileEntry, source: Path, report: Report
    ) -> None:
        """Uploads a file; what is kept is exactly the bytes that `entry` describes.

        A file that was cut off before goes on where it stopped, where the registry can do that.

        Raises:
            IntegrityError: The file at `source` has other bytes.
        """

    def finish_part(self, model: str, part: PartRecord) -> None:
        """Called when all of a part's files are there, before its record is written."""

    def open_file(
        self, model: str, part: PartRecord, entry: FileEntry, offset: int
    ) -> AbstractContextManager[Iterator[Block]]:
        """Yields the blocks of a file from `offset` on, unchecked.

        Raises:
            NotPublishedError: It is not there (any more).
        """

    def list_files(self, model: str) -> tuple[StoredFile, ...]:
        """Returns the files that `delete_files` can remove; none where the registry does that by itself."""

    def delete_files(self, model: str, digests: Sequence[str]) -> None:
        """Removes files; those that are not there are fine.

        Of no files: removes what uploads left that broke off more than a day ago.
        """

    def delete_part(self, model: str, digest: str) -> None:
        """Removes what `finish_part` made for the part of that digest, if anything."""

    def delete_version(self, model: str, version: Version) -> None:
        """Removes what `mirror` showed of a version that is gone."""

    def mirror(self, model: str, state: State) -> None:
        """Shows versions, labels and aliases the way the registry's other users look for them.

        Called after every change with what the records now mean; may be called with the same again, and by
        several at once. Only a view: nothing is ever read back from it, but a difference may be logged.

        Args:
            model: The model.
            state: What the records mean.
        """

    def close(self) -> None:
        """Lets go of connections."""
