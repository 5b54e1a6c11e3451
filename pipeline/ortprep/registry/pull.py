"""`pull`: the part of a version that fits this machine best becomes a folder, byte for byte."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from ortprep.bundle.atomic import new_folder, remove_stale_temporaries
from ortprep.bundle.digest import DigestCache, digest_file, is_digest
from ortprep.bundle.file_links import copy_file, link_or_copy, unlinkable_files
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.verification import check_bundle, compare_bundle, describe_loss
from ortprep.errors import (
    BundleError,
    RegistryError,
    RegistryUnavailableError,
    SignatureError,
    hint_of_os_error,
)
from ortprep.quoting import quoted
from ortprep.registry.backend import ref_name
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.documents import Part, Version, parse_part, parse_version
from ortprep.registry.part_bundle import choose_part
from ortprep.registry.references import VersionRef
from ortprep.registry.signatures import PullReceipt, verify_bundle, verify_part, write_receipt
from ortprep.registry.versions import resolve
from ortprep.runtime.machine.hardware import Hardware, read_hardware
from ortprep.spec.urls import redact_url
from ortprep.transport.time_limit import check_time, limit_time
from ortprep.transport.transfer import Observer, Progress, ignore, map_parallel, read_limit
from ortprep.versions import installed_onnxruntime

log = logging.getLogger(__name__)

MAX_BYTES_VARIABLE, TIMEOUT_VARIABLE = "ORTPREP_MAX_PULL_BYTES", "ORTPREP_PULL_TIMEOUT_S"
DEFAULT_MAX_BYTES = 2**40
DEFAULT_TIMEOUT_S = 6 * 3600


@dataclass(frozen=True)
class PullRequest:
    """A version, or a part of it, to pull.

    Attributes:
        part: Digest of the part, for another machine; None for the one that fits this machine best.
        public_key: Key that a part must be signed with to be looked at; None for none.
    """

    reference: VersionRef
    part: str | None = None
    public_key: Path | None = None


@dataclass(frozen=True)
class PullResult:
    """The outcome of pulling.

    Attributes:
        fetched_bytes: Size of the files that were not on this machine.
    """

    path: Path
    version: str
    part: str
    variants: tuple[str, ...]
    fetched_bytes: int
    total_bytes: int


@contextmanager
def _in_time(request: PullRequest) -> Iterator[None]:
    """Limits all that a pull asks of a registry, and waits for, from the first list on."""
    timeout_s = read_limit(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)
    late = RegistryError(
        f"pull took too long: {request.reference}\n  expected {timeout_s} s at most",
        hint=f"export {TIMEOUT_VARIABLE}=SECONDS   (what was fetched is kept)",
    )
    with limit_time(timeout_s, late):
        yield


def pull(
    request: PullRequest,
    catalogue: Catalogue,
    out: Path,
    *,
    observer: Observer = ignore,
    hardware: Hardware | None = None,
) -> PullResult:
    """Pulls a part of a version into a folder, which appears whole or not at all.

    A bundle that is there is replaced in one step. `hardware` is that of the machine the part is for, None
    for this one.

    Raises:
        NotPublishedError: There is no such version.
        SignatureError: No part is signed as is required.
        IntegrityError: The registry has other bytes than were published.
        RegistryError: No part fits, something else is in the place of `out`, the disk is full, it is too
            large, takes too long, or the registry failed.
    """
    check_replaceable(out)
    with _in_time(request):
        version, part = _choose(request, catalogue, hardware)
        return _write(request, catalogue, version, part, out, observer, is_there=lambda: False)


def pull_cached(
    request: PullRequest,
    catalogue: Catalogue,
    *,
    hardware: Hardware | None = None,
) -> PullResult:
    """Pulls a part into the cache, unless it is there; takes and raises what `pull` does, `out` apart.

    The bundle stays there until this process ends.
    """
    with _in_time(request):
        version, part = _choose(request, catalogue, hardware)
        path = catalogue.cache.bundle_path(f"{ref_name(version.digest)}-{ref_name(part.digest)[:16]}")

        def is_there() -> bool:
            catalogue.cache.keep(path)
            digest = DigestCache().digest
            try:
                if request.public_key is not None:
                    return verify_bundle(path, request.public_key, digest) == part
                return not compare_bundle(path, digest, entries=part.files)
            except BundleError:
                return False

        return _write(request, catalogue, version, part, path, ignore, is_there=is_there)


def resolve_version(request: PullRequest, catalogue: Catalogue) -> tuple[Version, tuple[Part, ...]]:
    """Returns a version and those of its parts that have the signature that is required.

    They come from the registry or, while it cannot be reached, are what they were last time.

    Raises:
        NotPublishedError: There is no such version.
        SignatureError: No part of it is signed as is required.
        RegistryUnavailableError: The registry cannot be reached, and the reference was never resolved here.
        RegistryError: The registry failed in another way.
    """
    reference = request.reference
    if request.public_key is None and reference.version is not None and is_digest(reference.version):
        remembered = _recall(request, catalogue)
        if remembered is not None:
            return remembered[0]  # a digest never comes to mean anything else
    try:
        state = catalogue.read_state(reference.name)
        version = resolve(state, reference.version, registry=redact_url(catalogue.backend.url))
        parts = catalogue.read_parts(version, public_key=request.public_key)
    except RegistryUnavailableError as error:
        remembered = _recall(request, catalogue)
        if remembered is None:
            raise
        resolved, at_s = remembered
        at = datetime.datetime.fromtimestamp(at_s, datetime.UTC).isoformat(timespec="minutes")
        reason = error.message.partition("\n")[0]
        log.warning(
            "%s; using the version that %s named at %s: %s", reason, reference, at, resolved[0].digest
        )
        return resolved
    for name in (reference, VersionRef(reference.name, version.digest)):
        key = _memory_key(replace(request, reference=name), catalogue)
        catalogue.cache.remember(key, [version.digest, *(part.digest for part in parts)])
    return version, parts


def _memory_key(request: PullRequest, catalogue: Catalogue) -> list[Any]:
    """Returns what a reference is remembered under: what was verified with one key is not for another.

    A key is known by its bytes: its file may have been replaced. A digest means the same on any server.
    """
    try:
        key = None if request.public_key is None else digest_file(request.public_key)
    except OSError as error:
        raise SignatureError(
            f"cannot read the public key: {request.public_key}\n  {error.strerror}"
        ) from error
    is_fixed = request.reference.version is not None and is_digest(request.reference.version)
    server = "" if is_fixed else catalogue.backend.read_server()
    return [catalogue.backend.url, server, str(request.reference), key]


def _recall(
    request: PullRequest, catalogue: Catalogue
) -> tuple[tuple[Version, tuple[Part, ...]], float] | None:
    """Returns what a reference named last, and when; None if any document of it is gone."""
    digests, at_s = catalogue.cache.recall(_memory_key(request, catalogue))
    documents = [data for data in map(catalogue.cache.read_document, digests) if data is not None]
    if not documents or len(documents) < len(digests):
        return None
    try:
        return (parse_version(documents[0]), tuple(map(parse_part, documents[1:]))), at_s
    except BundleError:
        return None  # of another release of ortprep; the registry has it


def _choose(request: PullRequest, catalogue: Catalogue, hardware: Hardware | None) -> tuple[Version, Part]:
    """Decides all that can be decided before the first weight is fetched."""
    reference = request.reference
    version, candidates = resolve_version(request, catalogue)
    candidates = tuple(part for part in candidates if part.digest == request.part) or candidates
    limit = read_limit(MAX_BYTES_VARIABLE, DEFAULT_MAX_BYTES)
    parts = [part for part in candidates if part.summary.size_bytes <= limit]
    if skipped := len(candidates) - len(parts):
        log.warning("%s: skipping %d parts of more than %d bytes", reference, skipped, limit)
    if not parts:
        size_bytes = min(part.summary.size_bytes for part in candidates)
        raise RegistryError(
            f"too large: {reference}\n  expected at most {limit} bytes, got {size_bytes}",
            hint=f"export {MAX_BYTES_VARIABLE}={size_bytes:d}",
        )
    part = choose_part(
        parts,
        reference,
        hardware or read_hardware(),
        onnxruntime=installed_onnxruntime(),
        digest=request.part,
    )
    return version, part


def _write(
    request: PullRequest,
    catalogue: Catalogue,
    version: Version,
    part: Part,
    out: Path,
    observer: Observer,
    *,
    is_there: Callable[[], bool],
) -> PullResult:
    """Puts a part into its place, unless it is there already; see `pull`."""
    cache, fetched_bytes = catalogue.cache, 0
    receipt = PullReceipt(
        redact_url(catalogue.backend.url), str(request.reference), version.digest, part.digest
    )
    try:
        with cache.lock_folder(out):
            if not is_there():
                unique = {entry.sha256: entry for entry in part.files}.values()
                fetched_bytes = sum(entry.size_bytes for entry in unique if not cache.has_file(entry))
                progress = Progress("download", sum(entry.size_bytes for entry in unique), observer)
                _fetch(receipt, part, catalogue, out, progress, request.public_key)
    except OSError as error:
        parent = next(folder for folder in out.absolute().parents if folder.exists())
        raise RegistryError(
            f"cannot write {out}, or the cache in {cache.root}\n  {error.strerror or error}",
            hint=hint_of_os_error(error, str(parent), str(cache.root)),
        ) from error
    cache.trim()
    variants = tuple(variant.name for variant in part.summary.variants)
    size_bytes = part.summary.size_bytes
    return PullResult(out, version.digest, part.digest, variants, fetched_bytes, size_bytes)


def _fetch(
    receipt: PullReceipt,
    part: Part,
    catalogue: Catalogue,
    out: Path,
    progress: Progress,
    public_key: Path | None,
) -> None:
    """Fetches what is missing, and puts the bundle together."""
    catalogue.read_records(part)  # before gigabytes of weights: they must say what the document says
    remove_stale_temporaries(out.absolute().parent, out.name)
    signatures = catalogue.read_signatures(part)[part.digest]
    if public_key is not None:
        # Also where the parts are remembered ones: what is kept with the bundle must be valid by itself. The
        # valid one comes first: others may have attached more than are kept.
        signatures = (verify_part(part, signatures, public_key), *signatures)
    first_paths = {entry.sha256: entry.path for entry in reversed(part.files)}
    # After a power cut `load` notices by its digests what did not reach the disk; it can be pulled again.
    with new_folder(out.absolute(), durable=False) as folder:

        def place(entry: FileEntry, alone: Collection[str] = ()) -> None:
            """Puts a file into the bundle at once, so that the cache may forget it again."""
            report = progress.add if first_paths[entry.sha256] == entry.path else ignore
            source = catalogue.fetch_file(part, entry, report)
            (copy_file if entry.path in alone else link_or_copy)(source, folder / entry.path)

        write_receipt(folder, receipt, part, signatures)
        largest_first = sorted(part.files, key=lambda entry: -entry.size_bytes)
        graphs = [entry for entry in largest_first if entry.path.endswith(".onnx")]
        map_parallel(place, graphs)
        # The graphs say which of the other files must be copies.
        alone = _find_alone(graphs, folder)
        others = [entry for entry in largest_first if entry not in graphs]
        map_parallel(lambda entry: place(entry, alone), others)
        check_bundle(folder, DigestCache().digest)
        check_replaceable(out)


def _find_alone(graphs: Sequence[FileEntry], folder: Path) -> frozenset[str]:
    """Returns the files that ONNX Runtime takes with one link only."""
    return frozenset(
        str(PurePosixPath(entry.path).parent / name)
        for entry in graphs
        for name in unlinkable_files(folder / entry.path, check_time)
    )


def check_replaceable(out: Path) -> None:
    """Raises RegistryError if something else than a bundle would be replaced."""
    if got := describe_loss(out):
        raise RegistryError(
            f"a bundle would replace something that is not a bundle: {out}\n"
            f"  expected nothing, an empty folder or a bundle, got {got}",
            hint=quoted("mv", out, f"{out}.mine"),
        )
