"""A backend whose answers are checked."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ortprep.bundle.digest import PREFIX, DigestCache, digest_bytes
from ortprep.bundle.loader_config import FileEntry, LoaderConfig, read_loader_config
from ortprep.bundle.manifest import Manifest, read_manifest
from ortprep.bundle.scratch_folder import scratch_folder
from ortprep.errors import BundleError, IntegrityError, NotPublishedError, RegistryError, SignatureError
from ortprep.registry.backend import (
    MAX_LISTING_BYTES,
    Backend,
    Kind,
    check_count,
    check_listing,
    digest_of,
    ref_name,
    subject_digits,
)
from ortprep.registry.documents import (
    MAX_DOCUMENT_BYTES,
    Part,
    Version,
    build_signature,
    parse_part,
    parse_signature,
    parse_version,
)
from ortprep.registry.part_bundle import check_part_bundle, small_files
from ortprep.registry.references import open_registry
from ortprep.registry.signatures import verify_part
from ortprep.registry.versions import ModelState, build_state, is_alias_name
from ortprep.transport.time_limit import limit_time
from ortprep.transport.transfer import Report, download, ignore, map_parallel, with_retries

log = logging.getLogger(__name__)

MAX_TOTAL_VARIANTS = 4096
"""Largest number of variants of a version whose figures are read, over all of its parts."""

LISTING_TIMEOUT_S = 1800.0
"""Longest time, in seconds, to list models, or what a model has."""


@contextlib.contextmanager
def _in_time() -> Iterator[None]:
    """Limits the time of a listing; in a pull, no more than what is left of its time."""
    text = f"a registry's list does not come to an end\n  expected it within {LISTING_TIMEOUT_S:.0f} s"
    with limit_time(LISTING_TIMEOUT_S, RegistryError(text)):
        yield


class Catalogue:
    """The checked content of a registry; documents are asked for once.

    Every method raises RegistryError if the registry fails.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._documents: dict[str, bytes] = {}

    @_in_time()
    def list_models(self) -> tuple[str, ...]:
        """Returns the names of all models, sorted."""
        return self.backend.list_models()

    @_in_time()
    def read_state(self, model: str, named: str | None = None) -> ModelState:
        """Reads which versions a model has now and what names them.

        Where an alias, a label or a whole digest is `named`, only the versions of that name are read; all of
        them if none has it.
        """
        refs, pointers = self.list_refs(model, Kind.VERSION), self.list_refs(model, Kind.ALIAS)
        if named is not None:
            digests = {pointers.get(named, ""), PREFIX + named.removeprefix(PREFIX)}
            refs = {
                name: digest
                for name, digest in refs.items()
                if digest in digests or name.partition(".")[2] == named
            } or refs
        versions = []
        for data in self._read_documents(model, Kind.VERSION, refs):
            with _skipped(f"a version of {model}"):
                version = parse_version(data)
                if version.model == model:
                    versions.append(version)
        labels = {version.digest: version.label for version in versions}
        aliases = {
            alias: digest
            for alias, digest in pointers.items()
            if labels.get(digest) != alias and is_alias_name(alias)
        }
        return build_state(model, versions, aliases)

    @_in_time()
    def list_refs(self, model: str, kind: Kind) -> Mapping[str, str]:
        """Returns the names of all refs of a kind, with the digests of their documents."""
        refs = self.backend.list_refs(model, kind)
        check_count(len(refs), f"{kind} of {model}")
        return refs

    def _read_documents(self, model: str, kind: Kind, refs: Mapping[str, str]) -> Iterator[bytes]:
        """Yields the documents of refs, without those that are gone or that are not what the ref says.

        Raises:
            RegistryError: Together they are larger than `MAX_LISTING_BYTES`; the rest is not read.
        """
        lock, total = threading.Lock(), 0

        def fetch(ref: str) -> bytes | None:
            nonlocal total
            data = None
            with contextlib.suppress(NotPublishedError):  # removed since it was listed
                if total <= MAX_LISTING_BYTES:
                    data = self._fetch_document(model, kind, ref)
            with lock:
                total += len(data or b"")
            return data

        found = map_parallel(fetch, refs)
        check_listing(total, f"the {kind} of {model}")
        for ref, data in found.items():
            checked = b""
            with _skipped(f"one of the {kind} of {model}"):
                checked = self._keep_document(model, kind, ref, data) if data else b""
            if checked:
                yield checked

    def _fetch_document(self, model: str, kind: Kind, name: str) -> bytes:
        """Returns the document of a ref, unchecked and of at most one byte more than it may have."""
        if known := self._documents.get(digest_of(name)):
            return known

        def fetch() -> bytes:
            data = bytearray()
            with self.backend.open_ref(model, kind, name) as opened:
                for block in opened.blocks:
                    data += block
                    if len(data) > MAX_DOCUMENT_BYTES:
                        break
            return bytes(data[: MAX_DOCUMENT_BYTES + 1])

        return with_retries(fetch)

    def _keep_document(self, model: str, kind: Kind, name: str, data: bytes) -> bytes:
        """Returns a document, and keeps it; raises IntegrityError if it has another digest."""
        if len(data) > MAX_DOCUMENT_BYTES or digest_bytes(data) != digest_of(name):
            raise IntegrityError(
                f"a document does not match its digest: {kind}/{name} of {model}\n"
                f"  expected {digest_of(name)}, got other bytes"
            )
        self._documents[digest_of(name)] = data
        return data

    def attach_signature(self, part: Part, data: bytes) -> None:
        """Attaches a signature to a part; attaching it again does nothing."""
        document = build_signature(part, data)
        name = ref_name(digest_bytes(document), subject_digits(part.digest))
        self.backend.put_ref(part.model, Kind.SIGNATURE, name, document)

    @_in_time()
    def read_signatures(self, *parts: Part) -> dict[str, tuple[bytes, ...]]:
        """Returns the signatures of parts of one model, by the parts' digests, unverified."""
        model = parts[0].model
        digits = {subject_digits(part.digest) for part in parts}
        listed = self.list_refs(model, Kind.SIGNATURE)
        refs = {name: digest for name, digest in listed.items() if name.partition(".")[2] in digits}
        found: dict[str, tuple[bytes, ...]] = {part.digest: () for part in parts}
        for data in self._read_documents(model, Kind.SIGNATURE, refs):
            with _skipped(f"one of the signatures of {model}"):
                subject, signature = parse_signature(data)
                if subject in found:
                    found[subject] += (signature,)
        return found

    def read_part(self, model: str, digest: str) -> Part:
        """Reads the document of a part.

        Raises:
            IntegrityError: It is not what its digest says, or not of this model.
            NotPublishedError: It is not there.
        """
        name = ref_name(digest)
        data = self._fetch_document(model, Kind.PART, name)
        part = parse_part(self._keep_document(model, Kind.PART, name, data))
        if part.model != model:
            raise IntegrityError(f"a part of another model: {digest}\n  expected {model}, got {part.model}")
        return part

    @_in_time()
    def read_parts(
        self, *versions: Version, public_key: Path | None = None, skips_lost: bool = False
    ) -> tuple[Part, ...]:
        """Reads the parts of versions; those not signed with a key are left out, and nothing else is read.

        Raises:
            NotPublishedError: One is gone, and `skips_lost` is not set.
            SignatureError: None is signed with the key.
            IntegrityError: One is of another source or spec, or not what its digest says.
            RegistryError: Together they are larger than `MAX_LISTING_BYTES`; the rest is not read.
        """
        found: dict[str, Part] = {}
        size_bytes = 0
        for version in versions:
            for digest in (summary.digest for summary in version.parts):
                if digest not in found:
                    try:
                        found[digest] = self.read_part(version.model, digest)
                    except NotPublishedError:
                        if not skips_lost:
                            raise
                        log.warning("skipping a part of %s that is gone: %s", version.label, digest)
                        continue
                    size_bytes += len(found[digest].data)
                check_listing(size_bytes, f"the parts of {version.model}, up to {version.label}")
                if (found[digest].source, found[digest].spec) != version.family:
                    raise IntegrityError(f"a part of another source or spec: {digest} in {version.digest}")
        if public_key is None or not found:
            return tuple(found.values())
        signatures = self.read_signatures(*found.values())
        verified, problems = [], []
        for part in found.values():
            try:
                verify_part(part, signatures[part.digest], public_key)
                verified.append(part)
            except SignatureError as error:
                problems.append(error)
                log.warning("skipped: %s", error.message)
        if not verified:
            raise problems[0]
        return tuple(verified)

    def fetch_records(self, part: Part, folder: Path) -> tuple[LoaderConfig, Manifest]:
        """Reads a part's `loader.json` and `manifest.json`, which it puts into a folder.

        Raises:
            IntegrityError: The registry has other bytes than were published, or they contradict the part.
            BundleError: They are not of this form.
        """
        for entry in small_files(part).values():
            self.fetch_file(part, entry, folder)
        config, manifest = read_loader_config(folder), read_manifest(folder)
        check_part_bundle(part, config, manifest)
        return config, manifest

    def read_manifests(self, parts: Sequence[Part]) -> tuple[tuple[Part, Manifest], ...]:
        """Reads the manifests of parts, those prepared last first; raises as `fetch_records`.

        Raises:
            RegistryError: Together they are larger than `MAX_LISTING_BYTES`, and none is read; or they have
                more than `MAX_TOTAL_VARIANTS`.
        """
        size_bytes = sum(entry.size_bytes for part in parts for entry in small_files(part).values())
        check_listing(size_bytes, f"the records of {len(parts)} parts")
        newest = sorted(parts, key=lambda part: (part.summary.created_at, part.digest), reverse=True)
        found = tuple((part, self._read_manifest(part)) for part in newest)
        if sum(len(manifest.variants) for _, manifest in found) > MAX_TOTAL_VARIANTS:
            raise RegistryError(
                f"too many variants in {len(parts)} parts\n  expected at most {MAX_TOTAL_VARIANTS}, got more"
            )
        return found

    def _read_manifest(self, part: Part) -> Manifest:
        with scratch_folder("ortprep-manifest-") as folder:
            return self.fetch_records(part, folder)[1]

    def fetch_file(self, part: Part, entry: FileEntry, folder: Path, report: Report = ignore) -> None:
        """Puts one of a part's files into a folder, unless it is there already.

        Raises:
            IntegrityError: The registry has other bytes than were published, or they are there.
            NotPublishedError: It is not there any more.
            OSError: The disk is full.
        """
        path = folder / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        download(lambda offset: self.backend.open_file(part, entry, offset), path, entry, report)
        DigestCache().record(path, entry.sha256)


@contextlib.contextmanager
def _skipped(what: str) -> Iterator[None]:
    """Logs what is no document, or one of a newer ortprep: others must still be read."""
    try:
        yield
    except BundleError as error:
        log.warning("skipping %s: %s", what, error)


@contextlib.contextmanager
def open_catalogue(url: str) -> Iterator[Catalogue]:
    """Yields the registry at a URL; raises what `open_registry` does."""
    with contextlib.closing(open_registry(url)) as backend:
        yield Catalogue(backend)
