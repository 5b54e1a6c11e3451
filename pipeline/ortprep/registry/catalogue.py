"""A backend whose answers are checked, with a cache."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import FileEntry, LoaderConfig, read_loader_config
from ortprep.bundle.manifest import Manifest, read_manifest
from ortprep.errors import BundleError, IntegrityError, RegistryError, SignatureError
from ortprep.registry.alias_moves import Move, parse_move
from ortprep.registry.backend import (
    MAX_LISTING_BYTES,
    MAX_VERSIONS,
    MOVE,
    SIGNATURE,
    Backend,
    Download,
    Report,
)
from ortprep.registry.cache import Cache
from ortprep.registry.documents import Part, Version, is_alias_name, parse_part, parse_version
from ortprep.registry.part_bundle import check_part_bundle, small_files
from ortprep.registry.progress import ignore
from ortprep.registry.references import open_registry
from ortprep.registry.signatures import verify_part
from ortprep.registry.versions import ModelState, build_state

log = logging.getLogger(__name__)


class Catalogue:
    """The checked content of a registry; documents and files are kept in a cache between commands.

    Every method raises RegistryError if the registry fails.
    """

    def __init__(self, backend: Backend, cache: Cache) -> None:
        self.backend = backend
        self.cache = cache

    def read_state(self, model: str) -> ModelState:
        """Reads which versions a model has now and what names them."""
        documents = self.backend.read_versions(model, self.cache.read_document)
        if len(documents) > MAX_VERSIONS:
            raise RegistryError(f"too many versions: {model}\n  expected at most {MAX_VERSIONS}")
        versions = [version for data in documents for version in self._parse_version(model, data)]
        labels = {version.digest: version.label for version in versions}
        listed = self.backend.read_aliases(model)
        aliases = {
            alias: digest
            for alias, digest in listed.items()
            if labels.get(digest) != alias and is_alias_name(alias)
        }
        return build_state(model, versions, aliases)

    def _parse_version(self, model: str, data: bytes) -> Iterator[Version]:
        try:
            version = parse_version(data)
        except BundleError as error:
            # No version, or one of a newer ortprep: others must still be read.
            log.warning("%s: skipping a version: %s", model, error)
            return
        if version.model == model:
            self.cache.write_document(data)
            yield version

    def read_moves(self, model: str, versions: Iterable[Version]) -> dict[str, tuple[Move, ...]]:
        """Reads every recorded move of every alias to one of some versions, by alias, in order."""
        moves: list[Move] = []
        for digest, documents in self.backend.read_attached(model, list(versions), MOVE).items():
            for data in documents:
                try:
                    move = parse_move(data)
                except BundleError as error:
                    log.warning("%s: skipping a move of an alias: %s", model, error)
                    continue
                if move.version == digest:
                    moves.append(move)
        moves.sort(key=lambda move: (move.sequence, move.at, move.version))
        return {
            alias: tuple(move for move in moves if move.alias == alias)
            for alias in sorted({move.alias for move in moves})
        }

    def read_part(self, model: str, digest: str) -> Part:
        """Reads the document of a part.

        Raises:
            IntegrityError: It is not what its digest says, or not of this model.
            NotPublishedError: It is not there.
        """
        data = self.cache.read_document(digest)
        if data is None:
            data = self.backend.read_part(model, digest)
            if digest_bytes(data) != digest:
                raise IntegrityError(
                    f"a part does not match its digest: {model}\n"
                    f"  expected {digest}, got {digest_bytes(data)}"
                )
            self.cache.write_document(data)
        part = parse_part(data)
        if part.model != model:
            raise IntegrityError(f"a part of another model: {digest}\n  expected {model}, got {part.model}")
        return part

    def read_parts(self, version: Version, public_key: Path | None = None) -> tuple[Part, ...]:
        """Reads the parts of a version; those not signed with a key are left out, and nothing else is read.

        Raises:
            SignatureError: None is signed with the key.
            IntegrityError: One is of another source or spec, or not what its digest says.
            RegistryError: Together they are larger than `MAX_LISTING_BYTES`; the rest is not read.
        """
        parts: list[Part] = []
        size_bytes = 0
        for summary in version.parts:
            part = self.read_part(version.model, summary.digest)
            if (part.source, part.spec) != version.family:
                raise IntegrityError(f"a part of another source or spec: {part.digest} in {version.digest}")
            size_bytes += len(part.data)
            if size_bytes > MAX_LISTING_BYTES:
                raise RegistryError(
                    f"too many bytes in the parts of {version.model}@{version.label}\n"
                    f"  expected {MAX_LISTING_BYTES} at most, got more"
                )
            parts.append(part)
        if public_key is None:
            return tuple(parts)
        signatures = self.backend.read_attached(version.model, parts, SIGNATURE)
        verified, problems = [], []
        for part in parts:
            try:
                verify_part(part, signatures.get(part.digest, ()), public_key)
                verified.append(part)
            except SignatureError as error:
                problems.append(error)
                log.warning("skipped: %s", error.message)
        if not verified:
            raise problems[0]
        return tuple(verified)

    def read_signatures(self, part: Part) -> tuple[bytes, ...]:
        """Reads the signatures of a part, unverified."""
        return self.backend.read_attached(part.model, [part], SIGNATURE).get(part.digest, ())

    def read_records(self, part: Part) -> tuple[LoaderConfig, Manifest]:
        """Reads a part's `loader.json` and `manifest.json`.

        Raises:
            IntegrityError: The registry has other bytes than were published, or they contradict the part.
            BundleError: They are not of this form.
        """
        with tempfile.TemporaryDirectory(prefix="ortprep-") as name:
            folder = Path(name)
            for path, entry in small_files(part).items():
                shutil.copyfile(self.fetch_file(part, entry, ignore), folder / path)
            config, manifest = read_loader_config(folder), read_manifest(folder)
        check_part_bundle(part, config, manifest)
        return config, manifest

    def read_manifests(self, parts: Sequence[Part]) -> tuple[tuple[Part, Manifest], ...]:
        """Reads the manifests of parts, those prepared last first; raises as `read_records`."""
        newest = sorted(parts, key=lambda part: (part.summary.created_at, part.digest), reverse=True)
        return tuple((part, self.read_records(part)[1]) for part in newest)

    def fetch_file(self, part: Part, entry: FileEntry, report: Report) -> Path:
        """Returns one of a part's files, from the cache or by way of it.

        Raises:
            IntegrityError: The registry has other bytes than were published.
            NotPublishedError: It is not there any more.
            OSError: The disk is full.
        """

        def open_at(offset: int, _: str | None) -> AbstractContextManager[Download]:
            return self.backend.open_file(part.model, part, entry, offset)

        return self.cache.fetch_file(entry, open_at, report)


@contextlib.contextmanager
def open_catalogue(url: str, *, cache: Cache | None = None) -> Iterator[Catalogue]:
    """Yields the registry at a URL; raises what `open_registry` and `Cache` do."""
    with contextlib.closing(open_registry(url)) as backend:
        yield Catalogue(backend, cache or Cache())
