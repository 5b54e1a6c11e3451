"""`pull`: the part of a version that fits this machine best becomes a folder, byte for byte."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ortprep.bundle.atomic import TEMP_PREFIX, new_folder, remove_stale_temporaries
from ortprep.bundle.digest import DigestCache, digest_file, is_digest
from ortprep.bundle.file_links import copy_file, link_or_copy, unlinkable_files
from ortprep.bundle.file_lock import FileLock
from ortprep.bundle.file_memory import require_cache_folder
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.verification import (
    Digester,
    check_bundle,
    compare_bundle,
    compare_files,
    describe_loss,
)
from ortprep.errors import (
    BundleError,
    NotPublishedError,
    RegistryError,
    RegistryUnavailableError,
    hint_of_os_error,
)
from ortprep.quoting import quoted
from ortprep.registry.backend import ref_name
from ortprep.registry.catalogue import Catalogue
from ortprep.registry.documents import Part, Version
from ortprep.registry.part_bundle import choose_part
from ortprep.registry.references import VersionRef
from ortprep.registry.signatures import (
    PullReceipt,
    read_pulled_part,
    read_receipt,
    verify_bundle,
    verify_part,
    write_receipt,
)
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
_LOCK_POLL_INTERVAL_S = 0.05
_ABANDONED_TIMEOUTS = 4
"""Age, in timeouts of a pull, at which unfinished work is removed where there are no locks."""


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
        fetched_bytes: Size of the files that the folder did not have.
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
        hint=f"export {TIMEOUT_VARIABLE}=SECONDS",
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

    A bundle that is there is replaced in one step; files that it has too are not fetched. `hardware` is that
    of the machine the part is for, None for this one.

    Raises:
        NotPublishedError: There is no such version.
        SignatureError: No part is signed as is required.
        IntegrityError: The registry has other bytes than were published.
        RegistryError: No part fits, something else is in the place of `out`, the disk is full, it is too
            large, takes too long, or the registry failed.
    """
    check_replaceable(out)
    digest = DigestCache().digest if request.public_key is None else digest_file
    with _in_time(request):
        version, part = _choose(request, catalogue, hardware)
        return _pull_part(request, catalogue, version, part, out, digest, observer)


def pull_cached(
    request: PullRequest, catalogue: Catalogue, *, hardware: Hardware | None = None
) -> PullResult:
    """Pulls a part into the cache, unless it is there; takes and raises what `pull` does, `out` apart.

    A signature is verified, but cached digests of the files are believed: what creates a session hashes them
    again where that is required.

    While the registry cannot be reached, or does not have the version (a folder that is not mounted), a
    version that the reference names by its digest is taken from the cache.

    Raises:
        CacheError: The cache cannot be made, or others could change what is in it.
    """
    with _in_time(request):
        folder = Path(require_cache_folder("registry"))
        with suppress(OSError):  # root's cache, or one that is read-only: what is there may do
            folder.chmod(0o700)  # files in it have what the umask asks for
        try:
            version, part = _choose(request, catalogue, hardware)
        except (RegistryUnavailableError, NotPublishedError) as error:
            found = _find_pulled(request, folder)
            if found is None:
                raise
            log.warning("%s; using what was pulled before: %s", error.message.partition("\n")[0], found.path)
            return found
        out = folder / f"{ref_name(version.digest)}-{ref_name(part.digest)[:16]}"
        return _pull_part(request, catalogue, version, part, out, DigestCache().digest, ignore)


def _find_pulled(request: PullRequest, folder: Path) -> PullResult | None:
    """Returns a bundle of the cache, of a version that is named by its digest: it never means another."""
    named = request.reference.version or ""
    for path in sorted(folder.glob(f"{ref_name(named)}-*")) if is_digest(named) else ():
        with suppress(BundleError):
            part = read_pulled_part(path)
            if _is_there(path, named, part, request.public_key, DigestCache().digest):
                return _describe(path, named, part)
    return None


def resolve_version(request: PullRequest, catalogue: Catalogue) -> tuple[Version, tuple[Part, ...]]:
    """Returns a version and those of its parts that have the signature that is required.

    Raises:
        NotPublishedError: There is no such version.
        SignatureError: No part of it is signed as is required.
        RegistryError: The registry failed.
    """
    reference = request.reference
    state = catalogue.read_state(reference.name, reference.version)
    version = resolve(state, reference.version, registry=redact_url(catalogue.backend.url))
    return version, catalogue.read_parts(version, public_key=request.public_key)


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


def _pull_part(
    request: PullRequest,
    catalogue: Catalogue,
    version: Version,
    part: Part,
    out: Path,
    digest: Digester,
    observer: Observer,
) -> PullResult:
    """Puts a part into its place, unless it is there already, by digests that may be a cache's."""
    receipt = PullReceipt(
        redact_url(catalogue.backend.url), str(request.reference), version.digest, part.digest
    )

    def is_there() -> bool:
        return _is_there(out, version.digest, part, request.public_key, digest)

    if is_there():  # a job that has its bundle waits for nobody
        return _describe(out, version.digest, part)
    if os.path.ismount(out):  # whatever is below it, nothing can take its place
        raise RegistryError(
            f"a bundle cannot replace a mount point: {out}\n  expected a folder below one",
            hint=f"--out {quoted(out / request.reference.name)}",
        )
    try:
        with _locked(out.absolute()) as is_alone:
            if is_there():
                return _describe(out, version.digest, part)
            limit_s = _ABANDONED_TIMEOUTS * read_limit(TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S)
            remove_stale_temporaries(out.absolute(), min_age_s=0.0 if is_alone else limit_s)
            files = frozenset(_first_of_each(part).values())
            kept = frozenset(entry for entry in files if _is_kept(out, entry, digest))
            fetched_bytes = sum(entry.size_bytes for entry in files - kept)
            progress = Progress("download", fetched_bytes, observer)
            _put_together(receipt, part, catalogue, out, kept, progress, request.public_key)
    except OSError as error:
        parent = next(folder for folder in out.absolute().parents if folder.exists())
        raise RegistryError(
            f"cannot write {out}\n  {error.strerror or error}", hint=hint_of_os_error(error, str(parent))
        ) from error
    return _describe(out, version.digest, part, fetched_bytes)


def _describe(path: Path, version: str, part: Part, fetched_bytes: int = 0) -> PullResult:
    variants = tuple(variant.name for variant in part.summary.variants)
    return PullResult(path, version, part.digest, variants, fetched_bytes, part.summary.size_bytes)


@contextmanager
def _locked(out: Path) -> Iterator[bool]:
    """Holds a lock against other pulls to a place, for which it waits as long as the pull may take.

    Its file is beside the place: containers that share nothing but that folder meet there. Yields False
    where there are no locks, or where another user made the file, who could keep it locked for ever.
    """
    place, lock = out.with_name(f"{TEMP_PREFIX}{out.name}~lock"), None
    with suppress(OSError):  # if nothing can be written here, the next step says so
        out.parent.mkdir(parents=True, exist_ok=True)
        while (lock := _try_lock(place)) is None:
            check_time()
            time.sleep(_LOCK_POLL_INTERVAL_S)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            place.unlink(missing_ok=True)
            lock.close()


def _try_lock(place: Path) -> FileLock | None:
    """Returns the lock, None while another process has it; raises OSError if there can be none."""
    with ExitStack() as stack:
        lock = stack.enter_context(FileLock(place))
        status = os.fstat(lock.descriptor)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user's lock", str(place))
        with suppress(FileNotFoundError):  # others have just removed it
            if lock.acquire(wait=False) and os.path.samestat(status, place.lstat()):
                stack.pop_all()
                return lock
    return None


def _is_there(out: Path, version: str, part: Part, public_key: Path | None, digest: Digester) -> bool:
    """Says whether a folder is just what would be pulled into it."""
    try:
        if read_receipt(out).version != version:
            return False
        if public_key is not None:
            return verify_bundle(out, public_key, digest) == part
        return not compare_bundle(out, digest, entries=part.files)
    except BundleError:
        return False


def _is_kept(out: Path, entry: FileEntry, digest: Digester) -> bool:
    """Says whether the bundle that is to be replaced has a file of the new one."""
    with suppress(BundleError):
        return not compare_files(out, (entry,), digest)
    return False


def _put_together(
    receipt: PullReceipt,
    part: Part,
    catalogue: Catalogue,
    out: Path,
    kept: Set[FileEntry],
    progress: Progress,
    public_key: Path | None,
) -> None:
    """Fetches what is missing, and puts the bundle together."""
    # After a power cut `load` notices by its digests what did not reach the disk; it can be pulled again.
    with new_folder(out.absolute(), durable=False) as folder:
        catalogue.fetch_records(part, folder)  # before gigabytes of weights: they say what the document says
        signatures = catalogue.read_signatures(part)[part.digest]
        if public_key is not None:
            # The valid one comes first: others may have attached more than are kept.
            signatures = (verify_part(part, signatures, public_key), *signatures)
        write_receipt(folder, receipt, part, signatures)
        first = _first_of_each(part)

        def place(entry: FileEntry) -> None:
            is_kept = entry in kept
            if is_kept and not (folder / entry.path).exists():
                copy_file(out / entry.path, folder / entry.path)
            catalogue.fetch_file(part, entry, folder, ignore if is_kept else progress.add)

        map_parallel(place, sorted(first.values(), key=lambda entry: -entry.size_bytes))
        alone = _find_alone(part, folder)
        for entry in part.files:
            same = first[entry.sha256].path
            if entry.path != same:
                put = copy_file if alone & {entry.path, same} else link_or_copy
                put(folder / same, folder / entry.path)
        check_bundle(folder, DigestCache().digest)
        check_replaceable(out)


def _first_of_each(part: Part) -> dict[str, FileEntry]:
    """Returns the first of a part's files of each content, by their digests."""
    return {entry.sha256: entry for entry in reversed(part.files)}


def _find_alone(part: Part, folder: Path) -> frozenset[str]:
    """Returns the files that ONNX Runtime takes with one link only."""
    first = _first_of_each(part)
    return frozenset(
        str(PurePosixPath(entry.path).parent / name)
        for entry in part.files
        if entry.path.endswith(".onnx")
        for name in unlinkable_files(folder / first[entry.sha256].path, check_time)
    )


def check_replaceable(out: Path) -> None:
    """Raises RegistryError if something else than a bundle would be replaced."""
    if got := describe_loss(out):
        raise RegistryError(
            f"a bundle would replace something that is not a bundle: {out}\n"
            f"  expected nothing, an empty folder or a bundle, got {got}",
            hint=quoted("mv", out, f"{out}.mine"),
        )
