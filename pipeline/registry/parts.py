"""Between bundles and part records: what a machine prepared, as a registry keeps it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pipeline.bundle.digest import DigestCache
from pipeline.bundle.loader_config import (
    LOADER_FILE,
    MAX_LOADER_BYTES,
    FileEntry,
    LoaderConfig,
    listed_files,
    read_loader_config,
)
from pipeline.bundle.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, read_manifest
from pipeline.bundle.verification import check_bundle
from pipeline.errors import BundleError, IntegrityError
from pipeline.registry.composition import Part
from pipeline.registry.description import describe_part
from pipeline.registry.records import PartRecord, record_digest


def read_bundle_part(bundle: Path) -> Part:
    """Checks a bundle, every byte of it, and returns it as it is published.

    Raises:
        BundleError: There is no bundle, or none that can be read.
        IntegrityError: It is not as it was written.
    """
    cache = DigestCache()
    check_bundle(bundle, cache.digest)
    manifest, config = read_manifest(bundle), read_loader_config(bundle)
    own = bundle / MANIFEST_FILE
    files = (*manifest.files, FileEntry(MANIFEST_FILE, own.stat().st_size, cache.digest(own)))
    record = describe_part(manifest, config, files)
    return Part(record_digest(record), record, config, manifest)


def read_part(digest: str, record: PartRecord, files: Mapping[str, Path]) -> Part:
    """Reads the two records of a part that came from a registry.

    Args:
        digest: Of the part's record.
        record: The record.
        files: Where its `loader.json` and `manifest.json` lie, checked against their digests.

    Raises:
        BundleError: They are not of this form.
        IntegrityError: They contradict the part's record, or name files outside a bundle.
    """
    with tempfile.TemporaryDirectory(prefix="ortprep-") as name:
        folder = Path(name)
        for path, source in files.items():
            shutil.copyfile(source, folder / path)
        config, manifest = read_loader_config(folder), read_manifest(folder)
    problems = list(_contradictions(record, config, manifest))
    if problems:
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise IntegrityError(f"a part contradicts its record: {record.model} ({digest})\n{lines}")
    return Part(digest, record, config, manifest)


def _contradictions(record: PartRecord, config: LoaderConfig, manifest: Manifest) -> Iterator[str]:
    said = describe_part(manifest, config, record.files)
    for name in ("model", "source", "spec", "created_at"):
        expected, got = getattr(said, name), getattr(record, name)
        if expected != got:
            yield f"{name}: expected {expected!r} as in its manifest.json, got {got!r}"
    if [(one.name, one.target) for one in said.variants] != [
        (one.name, one.target) for one in record.variants
    ]:
        yield "variants: expected those of its loader.json, got others"
    stray = set(listed_files(config)) - set(record.files)
    yield from (f"{entry.path}: in loader.json, and not among its files" for entry in sorted(stray, key=str))
    differing = set(manifest.files) ^ {entry for entry in record.files if entry.path != MANIFEST_FILE}
    yield from (f"{path}: differs from manifest.json" for path in sorted({entry.path for entry in differing}))


def small_files(record: PartRecord) -> dict[str, FileEntry]:
    """Returns the entries of a part's `loader.json` and `manifest.json`.

    Raises:
        BundleError: It has none.
        IntegrityError: They are larger than readers accept.
    """
    entries = {entry.path: entry for entry in record.files}
    missing = [path for path in (LOADER_FILE, MANIFEST_FILE) if path not in entries]
    if missing:
        raise BundleError(f"a part without {' and '.join(missing)}: {record.model}")
    for path, most_bytes in ((LOADER_FILE, MAX_LOADER_BYTES), (MANIFEST_FILE, MAX_MANIFEST_BYTES)):
        if entries[path].size_bytes > most_bytes:
            raise IntegrityError(
                f"file too large: {path} of {record.model}\n"
                f"  expected at most {most_bytes} bytes, got {entries[path].size_bytes}"
            )
    return {path: entries[path] for path in (LOADER_FILE, MANIFEST_FILE)}
