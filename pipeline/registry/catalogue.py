"""A registry as the commands see it: a backend, read through what never changes."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from pipeline.bundle.digest import digest_bytes
from pipeline.bundle.loader_config import FileEntry
from pipeline.errors import BundleError, NotPublishedError, RegistryError
from pipeline.registry.backend import Backend, Block, Report
from pipeline.registry.cache import Cache
from pipeline.registry.composition import Part
from pipeline.registry.parts import read_part, small_files
from pipeline.registry.progress import ignore
from pipeline.registry.records import (
    MAX_ALL_RECORDS_BYTES,
    PartRecord,
    Record,
    RecordName,
    decode_record,
    encode_record,
)
from pipeline.registry.references import open_registry
from pipeline.registry.retries import with_retries
from pipeline.registry.state import State, Version, fold

log = logging.getLogger(__name__)

_READERS = 8
_TRIES = 3
_MIRRORINGS = 5


class Catalogue:
    """What a registry has.

    Args:
        backend: The registry.
        cache: Where records are kept between commands.
    """

    def __init__(self, backend: Backend, cache: Cache) -> None:
        self.backend = backend
        self.cache = cache

    def read_state(self, model: str) -> State:
        """Reads what a model's records mean now.

        Raises:
            IntegrityError: A record is not what its name says.
            RegistryError: The registry failed; as every method here may.
        """
        return fold(model, self.read_records(model))

    def read_records(self, model: str, *, only: str | None = None) -> dict[RecordName, Record]:
        """Reads all records of a model, or all of one kind."""
        listed = self.backend.list_records(model)
        names = [name for name in listed if only is None or name.kind == only]
        left = _Allowance(model)
        with ThreadPoolExecutor(_READERS, thread_name_prefix="ortprep-records") as pool:
            records = pool.map(lambda name: self._read_record(model, name, left), names)
            return {name: record for name, record in zip(names, records, strict=True) if record is not None}

    def _read_record(self, model: str, name: RecordName, left: _Allowance) -> Record | None:
        """Returns a record, None for one that is gone, or that this version cannot read."""
        cached = self.cache.read_record(name)
        if cached is not None and digest_bytes(cached) == name.digest:
            return self._decode(model, name, cached)
        for attempt in range(_TRIES):
            try:
                data = self.backend.read_record(model, name)
            except NotPublishedError:
                return None  # collected since it was listed
            left.take(len(data))
            if digest_bytes(data) == name.digest:
                self.cache.write_record(name, data)
                return self._decode(model, name, data)
            if attempt < _TRIES - 1:
                time.sleep(0.2)  # where records do not appear in one instant, it may be half there
        return decode_record(name, data)  # which says what is wrong

    def _decode(self, model: str, name: RecordName, data: bytes) -> Record | None:
        try:
            return decode_record(name, data)
        except BundleError as error:
            # As it was written, and no record, or one of a newer ortprep: others must still be read.
            log.warning("%s: a record is left out: %s", model, error)
            return None

    def fetch_file(self, part: PartRecord, entry: FileEntry, report: Report) -> Path:
        """Returns one of a part's files, from the cache or by way of it.

        Raises:
            IntegrityError: The registry has other bytes than were published.
            NotPublishedError: It is not there any more.
            OSError: The disk is full.
        """

        def open_at(offset: int) -> AbstractContextManager[Iterator[Block]]:
            return self.backend.open_file(part.model, part, entry, offset)

        return with_retries(lambda: self.cache.fetch_file(entry, open_at, report))

    def fetch_small(self, part: PartRecord) -> dict[str, Path]:
        """Returns where a part's `loader.json` and `manifest.json` lie; raises what `fetch_file` does."""
        return {path: self.fetch_file(part, entry, ignore) for path, entry in small_files(part).items()}

    def read_parts(self, state: State, version: Version) -> tuple[Part, ...]:
        """Reads the parts of a version, without their models.

        Raises:
            IntegrityError: The registry has other bytes than were published.
            BundleError: They are not of this form.
        """
        records = {digest: state.parts[digest] for digest in version.record.parts}
        return tuple(read_part(digest, part, self.fetch_small(part)) for digest, part in records.items())

    def read_record(self, model: str, name: RecordName) -> bytes:
        """Returns a record's bytes, as they were written.

        Raises:
            NotPublishedError: It is not there any more.
        """
        cached = self.cache.read_record(name)
        if cached is not None and digest_bytes(cached) == name.digest:
            return cached
        return self.backend.read_record(model, name)

    def write_record(self, model: str, record: Record) -> RecordName:
        """Writes a record and returns its name."""
        name, data = encode_record(record)
        self.backend.write_record(model, name, data)
        return name

    def delete_record(self, model: str, name: RecordName) -> None:
        """Removes a record."""
        self.backend.delete_record(model, name)

    def mirror(self, model: str) -> State:
        """Shows what the records mean to the registry's other users, and returns it."""
        state = self.read_state(model)
        for _ in range(_MIRRORINGS):
            self.backend.mirror(model, state)
            # Who showed an older state at the same time may have been the last; so may we.
            shown, state = state, self.read_state(model)
            if state == shown:
                break
        return state


class _Allowance:
    """How much may still be read of a model's records."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._left_bytes = MAX_ALL_RECORDS_BYTES
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        with self._lock:
            self._left_bytes -= size_bytes
            if self._left_bytes < 0:
                raise RegistryError(
                    f"too many records: {self._model}\n"
                    f"  expected at most {MAX_ALL_RECORDS_BYTES >> 20} MB of them together"
                )


@contextlib.contextmanager
def open_catalogue(url: str, *, cache: Cache | None = None) -> Iterator[Catalogue]:
    """Yields the registry at a URL; see `references.open_registry`.

    Raises:
        RegistryError: The URL is malformed or carries credentials, or there can be no cache.
        MissingExtraError: The backend's package is not installed.
    """
    backend = open_registry(url)
    try:
        yield Catalogue(backend, cache or Cache())
    finally:
        backend.close()
