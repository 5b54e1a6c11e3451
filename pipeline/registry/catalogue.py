"""A backend whose answers are checked, with a cache."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ortprep.bundle.codec import canonical_json
from ortprep.bundle.digest import digest_bytes
from ortprep.bundle.loader_config import FileEntry, LoaderConfig, read_loader_config
from ortprep.bundle.manifest import Manifest, read_manifest
from ortprep.errors import BundleError, IntegrityError, RegistryError, SignatureError
from ortprep.registry.alias_moves import Move, parse_move
from ortprep.registry.backend import MAX_VERSIONS, MOVE, SIGNATURE, Backend, Report
from ortprep.registry.cache import Cache
from ortprep.registry.documents import Part, Version, parse_part, parse_version
from ortprep.registry.part_bundle import check_part_bundle, small_files
from ortprep.registry.progress import ignore
from ortprep.registry.references import open_registry
from ortprep.registry.retries import with_retries
from ortprep.registry.signature_methods import SignatureMethod
from ortprep.registry.signatures import SignatureSubject, move_subject, subject_of, verify_subject
from ortprep.registry.versions import ModelState, build_state

log = logging.getLogger(__name__)

T = TypeVar("T")
D = TypeVar("D", Part, Version)


class Catalogue:
    """The checked content of a registry; documents and files are kept in a cache between commands.

    Every method raises RegistryError if the registry fails.
    """

    def __init__(self, backend: Backend, cache: Cache) -> None:
        self.backend = backend
        self.cache = cache

    def read_state(self, model: str, verifier: SignatureMethod | None = None) -> ModelState:
        """Reads which versions a model has now and what names them.

        With a verifier that has `signed_names`, versions and aliases that are not signed so are left out.
        """
        documents = self.backend.read_versions(model, self.cache.read_document)
        if len(documents) > MAX_VERSIONS:
            raise RegistryError(f"too many versions: {model}\n  expected at most {MAX_VERSIONS}")
        versions = [version for data in documents for version in self._parse_version(model, data)]
        labels = {version.digest: version.label for version in versions}
        listed = self.backend.read_aliases(model)
        aliases = {alias: digest for alias, digest in listed.items() if labels.get(digest) != alias}
        if verifier is not None and verifier.signed_names:
            versions, _ = self._find_verified(model, versions, verifier)
            aliases = self._verified_aliases(model, versions, aliases, verifier)
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

    def _verified_aliases(
        self, model: str, versions: Iterable[Version], now: Mapping[str, str], verifier: SignatureMethod
    ) -> dict[str, str]:
        """Returns the aliases whose last signed move is to where they are now."""
        recorded = self.read_moves(model, versions)
        verified = {}
        for alias, version in now.items():
            moves = recorded.get(alias, ())
            signed, _ = _verify_each(
                (
                    (move, move_subject(model, move), [canonical_json(move.signature)])
                    for move in moves
                    if move.signature is not None
                ),
                verifier,
            )
            if signed and signed[-1].version == version:
                verified[alias] = version
            else:
                log.warning("%s@%s: skipping it: it was not moved there with a signature", model, alias)
        return verified

    def _find_verified(
        self, model: str, documents: Sequence[D], verifier: SignatureMethod
    ) -> tuple[list[D], list[SignatureError]]:
        """Returns the parts or versions that are signed as a verifier demands, and why others are not."""
        signatures = self.backend.read_attached(model, documents, SIGNATURE)
        return _verify_each(
            ((document, subject_of(document), signatures.get(document.digest, ())) for document in documents),
            verifier,
        )

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

    def read_parts(self, version: Version, verifier: SignatureMethod | None = None) -> tuple[Part, ...]:
        """Reads the parts of a version; those that a verifier refuses are left out, and nothing else is read.

        Raises:
            SignatureError: None is signed as the verifier demands.
            IntegrityError: One is of another source or spec, or not what its digest says.
        """
        parts = tuple(self.read_part(version.model, summary.digest) for summary in version.parts)
        for part in parts:
            if (part.source, part.spec) != version.family:
                raise IntegrityError(f"a part of another source or spec: {part.digest} in {version.digest}")
        if verifier is None:
            return parts
        verified, problems = self._find_verified(version.model, parts, verifier)
        if not verified:
            raise problems[0]
        return tuple(verified)

    def read_signatures(self, subject: Part | Version) -> tuple[bytes, ...]:
        """Reads the signatures of a part or a version, unverified."""
        model = subject.model
        return self.backend.read_attached(model, [subject], SIGNATURE).get(subject.digest, ())

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

        def open_at(offset: int) -> Any:
            return self.backend.open_file(part.model, part, entry, offset)

        return with_retries(lambda: self.cache.fetch_file(entry, open_at, report))


def _verify_each(
    claims: Iterable[tuple[T, SignatureSubject, Iterable[bytes]]], verifier: SignatureMethod
) -> tuple[list[T], list[SignatureError]]:
    verified, problems = [], []
    for claimed, subject, signatures in claims:
        try:
            verify_subject(subject, signatures, verifier)
            verified.append(claimed)
        except SignatureError as error:
            problems.append(error)
            log.warning("skipped: %s", error.message)
    return verified, problems


@contextlib.contextmanager
def open_catalogue(url: str, *, cache: Cache | None = None) -> Iterator[Catalogue]:
    """Yields the registry at a URL; raises what `open_registry` and `Cache` do."""
    with contextlib.closing(open_registry(url)) as backend:
        yield Catalogue(backend, cache or Cache())
