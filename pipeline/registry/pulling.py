"""`pull`: a version, or what this machine can use of it, becomes a folder that `load` opens."""

from __future__ import annotations

import logging
import os
import shlex
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeline.bundle.atomic import new_folder, remove_stale_temporaries
from pipeline.bundle.digest import DigestCache, digest_json
from pipeline.bundle.linking import copy_file, link_or_copy, unlinkable_files
from pipeline.bundle.loader_config import LOADER_FILE
from pipeline.bundle.verification import check_bundle, find_added
from pipeline.errors import (
    BundleError,
    RegistryError,
    hint_of_os_error,
)
from pipeline.registry.backend import Report
from pipeline.registry.catalogue import Catalogue
from pipeline.registry.choosing import Wanted, choose
from pipeline.registry.composition import Composition, Placement, compose, list_candidates
from pipeline.registry.progress import Meter, Observer, Say, ignore
from pipeline.registry.receipt import Receipt, has_receipt, read_receipt, write_receipt
from pipeline.registry.records import RecordName
from pipeline.registry.resolving import records_of, resolve_online_or_last
from pipeline.registry.signatures import verify_part
from pipeline.registry.state import Version
from pipeline.registry.transfer import run_parallel
from pipeline.runtime.hardware import Hardware, read_hardware
from pipeline.spec.redaction import redact_url
from pipeline.versions import installed_onnxruntime

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pulled:
    """What came of pulling.

    Attributes:
        path: The bundle's folder.
        version: Digest of the version.
        variants: Names of its variants, in order.
        left_out: Why the version's other variants were not pulled, by name.
        fetched_bytes: What was not on this machine.
        total_bytes: What the bundle takes.
    """

    path: Path
    version: str
    variants: tuple[str, ...]
    left_out: dict[str, str]
    fetched_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class _Plan:
    """All that is decided before the first weight is fetched."""

    catalogue: Catalogue
    version: Version
    small: dict[str, dict[str, Path]]
    composition: Composition
    left_out: dict[str, str]
    receipt: Receipt
    records: dict[RecordName, bytes]


def pull(
    wanted: Wanted,
    catalogue: Catalogue,
    out: Path,
    *,
    observer: Observer = ignore,
    say: Say = ignore,
    hardware: Hardware | None = None,
) -> Pulled:
    """Pulls a version into a folder, which appears whole or not at all.

    Args:
        wanted: What.
        catalogue: Where from.
        out: The folder; a bundle that stands there is replaced in one step.
        observer: Told how it goes.
        say: Told what is noteworthy.
        hardware: The machine it is for; None for this one.

    Raises:
        NotPublishedError: There is no such version.
        SignatureError: A part is not signed as is required.
        IntegrityError: The registry has other bytes than were published.
        RegistryError: No variant fits, something else is in the place of `out`, the disk is full, or the
            registry failed.
    """
    check_replaceable(out)
    plan = _plan(wanted, catalogue, hardware or read_hardware(), say)
    with _translated(catalogue, out), catalogue.cache.making(out):
        remove_stale_temporaries(out.absolute().parent, out.name)
        fetched = _write(plan, out, observer)
    catalogue.cache.trim()
    return _describe(plan, out, fetched)


@contextmanager
def _translated(catalogue: Catalogue, out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        parent = next(folder for folder in out.absolute().parents if folder.exists())
        root = catalogue.cache.root
        raise RegistryError(
            f"cannot write {out}, or the cache in {root}\n  {error.strerror or error}",
            hint=hint_of_os_error(error, str(parent), str(root)),
        ) from error


def check_replaceable(out: Path) -> None:
    """Checks that nothing is lost when a bundle takes the place of what stands there.

    Raises:
        RegistryError: Something else than a bundle does.
    """
    try:
        added = find_added(out) if os.path.lexists(out) and not _is_empty(out) else frozenset()
    except BundleError as error:
        raise _no_bundle(out, "something else") from error
    if out.is_symlink():
        raise _no_bundle(out, "a link; name the folder it leads to")
    if added:
        raise _no_bundle(out, f"one with files of somebody's own: {', '.join(sorted(added)[:5])}")


def _is_empty(folder: Path) -> bool:
    return folder.is_dir() and not any(folder.iterdir())


def _no_bundle(out: Path, got: str) -> RegistryError:
    return RegistryError(
        f"a bundle would replace what is no bundle: {out}\n"
        f"  expected nothing, an empty folder or a bundle as it was written, got {got}",
        hint=shlex.join(["mv", str(out), f"{out}.mine"]),
    )


def pull_cached(
    wanted: Wanted,
    catalogue: Catalogue,
    *,
    observer: Observer = ignore,
    say: Say = ignore,
    hardware: Hardware | None = None,
) -> Pulled:
    """Pulls a version into the cache, unless it is there; takes and raises what `pull` does, `out` apart.

    The bundle stays there as long as this process lives.
    """
    plan = _plan(wanted, catalogue, hardware or read_hardware(), say)
    text = plan.version.digest.partition(":")[2]
    key = f"{text}-{digest_json(plan.receipt.variants).partition(':')[2][:16]}"
    path = catalogue.cache.bundle_path(key)
    fetched = 0
    with _translated(catalogue, path), catalogue.cache.making(path):
        catalogue.cache.keep(path)
        if not _is_complete(path, plan):
            fetched = _write(plan, path, observer)
    catalogue.cache.trim()
    return _describe(plan, path, fetched)


def _is_complete(path: Path, plan: _Plan) -> bool:
    # The loader compares digests; here it counts that nobody removed a file, or signed it since.
    if not has_receipt(path) or read_receipt(path).records != plan.receipt.records:
        return False
    files = [name for name, _, _ in plan.composition.files] + list(plan.composition.written)
    return all((path / name).is_file() for name in (LOADER_FILE, *files))


def _describe(plan: _Plan, path: Path, fetched_bytes: int) -> Pulled:
    return Pulled(
        path=path,
        version=plan.version.digest,
        variants=plan.receipt.variants,
        left_out=plan.left_out,
        fetched_bytes=fetched_bytes,
        total_bytes=sum(entry.size_bytes for _, _, entry in plan.composition.files),
    )


def _plan(wanted: Wanted, catalogue: Catalogue, hardware: Hardware, say: Say) -> _Plan:
    state, version = resolve_online_or_last(wanted, catalogue, say)
    parts = catalogue.read_parts(state, version)
    candidates = list_candidates(parts)
    chosen, left_out = choose(candidates, wanted, hardware, onnxruntime=installed_onnxruntime())
    used = {candidate.part.digest for candidate in chosen}
    if wanted.verifier is not None:
        for digest in sorted(used):
            signatures = state.signatures.get(digest, {}).values()
            verify_part(state.parts[digest], digest, signatures, wanted.verifier)
    kept = {name: catalogue.read_record(state.model, name) for name in records_of(state, version)}
    receipt = Receipt(
        registry=redact_url(catalogue.backend.url),
        reference=str(wanted.reference),
        version=version.digest,
        variants=tuple(candidate.name for candidate in chosen),
        records=tuple(str(name) for name in kept),
    )
    small = {part.digest: catalogue.fetch_small(part.record) for part in parts}
    return _Plan(catalogue, version, small, compose(chosen), left_out, receipt, kept)


def _write(plan: _Plan, out: Path, observer: Observer) -> int:
    """Fetches what is missing and puts the bundle together; returns the number of bytes fetched."""
    cache = plan.catalogue.cache
    wanted = {entry.sha256: (part, entry) for _, part, entry in plan.composition.files}
    absent = sum(entry.size_bytes for _, entry in wanted.values() if not cache.has_file(entry))
    meter = Meter("download", sum(entry.size_bytes for _, entry in wanted.values()), observer)
    # After a power cut `load` notices by its digests what did not reach the disk, and it can be pulled again.
    with new_folder(out.absolute(), durable=False) as folder:
        write_receipt(folder, plan.receipt, plan.records, plan.small)
        for path, data in plan.composition.written.items():
            (folder / path).write_bytes(data)
        graphs, others = _split(plan.composition)
        _place_files(plan, graphs, folder, meter.add, alone=frozenset())
        _place_files(plan, others, folder, meter.add, alone=_find_alone(graphs, folder))
        check_bundle(folder, DigestCache().digest)
        check_replaceable(out)
    return absent


def _split(composition: Composition) -> tuple[list[Placement], list[Placement]]:
    """Returns the graphs, and all other files: the graphs say which of those must be copies."""
    graphs = [placement for placement in composition.files if placement[0].endswith(".onnx")]
    return graphs, [placement for placement in composition.files if placement not in graphs]


def _place_files(
    plan: _Plan, files: Sequence[Placement], folder: Path, report: Report, *, alone: frozenset[str]
) -> None:
    """Fetches files and puts each into the bundle at once, so that the cache may forget it again."""
    reported = threading.Lock()
    first: dict[str, str] = {}

    def place(placement: Placement) -> None:
        path, part, entry = placement
        with reported:
            is_first = first.setdefault(entry.sha256, path) == path
        source = plan.catalogue.fetch_file(part.record, entry, report if is_first else ignore)
        (copy_file if path in alone else link_or_copy)(source, folder / path)

    run_parallel(place, sorted(files, key=lambda placement: -placement[2].size_bytes))


def _find_alone(graphs: Sequence[Placement], folder: Path) -> frozenset[str]:
    """Returns the files that ONNX Runtime takes with one link only."""
    return frozenset(
        str(PurePosixPath(path).parent / name)
        for path, _, _ in graphs
        for name in unlinkable_files(folder / path)
    )
