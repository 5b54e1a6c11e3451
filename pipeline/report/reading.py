"""From names to what a report is about: models, folders of bundles, manifests by themselves."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pipeline.bundle.digest import digest_bytes, digest_json
from pipeline.bundle.loader_config import LOADER_FILE, LoaderConfig, check_file_entries, read_loader_config
from pipeline.bundle.manifest import (
    MANIFEST_FILE,
    MANIFEST_SCHEMA_VERSION,
    MAX_MANIFEST_BYTES,
    Manifest,
    read_manifest,
)
from pipeline.bundle.record import read_record
from pipeline.errors import BundleError
from pipeline.report.subject import Built, Subject

ReadHistory = Callable[[Path], tuple[Built, ...]]
"""Takes a bundle's folder and returns how it was built."""


def find_manifests(names: Sequence[str], artifacts: Path) -> tuple[Path, ...]:
    """Returns where the manifests are that names stand for, each once.

    Args:
        names: Models, folders of bundles, or manifests; every bundle below `artifacts` if empty.
        artifacts: Folder of bundles.

    Raises:
        BundleError: There is no such manifest, or none at all.
    """
    if names:
        found = [_find_manifest(name, artifacts) for name in names]
    else:
        found = sorted(path for path in artifacts.glob(f"*/{MANIFEST_FILE}") if not _is_hidden(path.parent))
        if not found:
            raise BundleError(f"no bundle in {artifacts}\n  expected some", hint="ortprep prepare")
    return tuple({path.resolve(): path for path in found}.values())


def _is_hidden(folder: Path) -> bool:
    return folder.name.startswith(".")


def _find_manifest(name: str, artifacts: Path) -> Path:
    for path in (Path(name), artifacts / name):
        if path.is_file():
            return path
        if (path / MANIFEST_FILE).is_file():
            return path / MANIFEST_FILE
    raise BundleError(
        f"no such bundle or manifest: {shlex.quote(name)}\n"
        f"  expected a manifest, or {MANIFEST_FILE} in {Path(name)} or in {artifacts / name}, got none",
        hint=shlex.join(["ortprep", "prepare", *([Path(name).name] if Path(name).name else [])]),
    )


def read_subjects(manifests: Iterable[Path], read_history: ReadHistory = lambda _: ()) -> tuple[Subject, ...]:
    """Reads manifests, and what lies beside them.

    Raises:
        BundleError: One of them is not of this form.
        UnsupportedVersionError: One has a newer major version.
        IntegrityError: One was changed.
    """
    return tuple(_read_subject(path, read_history) for path in manifests)


def _read_subject(path: Path, read_history: ReadHistory) -> Subject:
    if path.name != MANIFEST_FILE:
        return Subject(_read_manifest_file(path))
    return Subject(read_manifest(path.parent), _read_loader(path.parent), read_history(path.parent))


def _read_manifest_file(path: Path) -> Manifest:
    manifest = read_record(Manifest, path, supported=MANIFEST_SCHEMA_VERSION, max_bytes=MAX_MANIFEST_BYTES)
    check_file_entries(manifest.files, name=str(path))
    return manifest


def _read_loader(folder: Path) -> LoaderConfig | None:
    return read_loader_config(folder) if (folder / LOADER_FILE).is_file() else None


def digest_inputs(files: Iterable[Path], *, version: str) -> str:
    """Returns the digest of everything a report is made of: files, and the version that makes it."""
    digests = {str(index): digest_bytes(path.read_bytes()) for index, path in enumerate(files)}
    return digest_json({"version": version, "files": digests})
