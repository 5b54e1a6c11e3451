"""The bundle that is exported, and its files in a second place, shared with it where that can be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ortprep.bundle.digest import DigestCache
from ortprep.bundle.file_links import copy_file, link_or_copy, unlinkable_files
from ortprep.bundle.loader_config import FileEntry, LoaderConfig, Variant, read_loader_config
from ortprep.bundle.manifest import Manifest, read_manifest
from ortprep.bundle.paths import is_safe_path, resolve_inside
from ortprep.bundle.verification import check_bundle, compare_files, raise_differences
from ortprep.errors import ExportError


@dataclass(frozen=True)
class SourceBundle:
    """A bundle's folder, free of links, with its loader config and manifest."""

    root: Path
    config: LoaderConfig
    manifest: Manifest

    @property
    def prepared_with(self) -> str:
        """Version of ONNX Runtime that prepared it, "" if that is not recorded."""
        return str(self.manifest.environment.get("onnxruntime", ""))


def read_source(bundle: Path) -> SourceBundle:
    """Reads a bundle after every file of it was compared with its record.

    Raises:
        BundleError: The bundle cannot be read.
        IntegrityError: Something differs from what was written.
    """
    root = Path(os.path.realpath(bundle))
    check_bundle(root, DigestCache().digest)
    return SourceBundle(root, read_loader_config(root), read_manifest(root))


@dataclass(frozen=True)
class PlannedFile:
    """A file of the bundle, and its relative POSIX path in the export."""

    source: FileEntry
    path: str

    @property
    def entry(self) -> FileEntry:
        """The record of the file in its new place."""
        return FileEntry(self.path, self.source.size_bytes, self.source.sha256)


def plan_files(variant: Variant, folder: str, *, model: str) -> tuple[PlannedFile, ...]:
    """Returns where a variant's files go; what lies beside the model keeps its name, which the model says.

    The files of a first phase, which exports leave out, are passed over where it has any of its own.
    """
    home = PurePosixPath(variant.model).parent
    first = variant.first_phase
    others = None if first is None or first.model is None else PurePosixPath(first.model).parent
    placed = []
    for entry in variant.files:
        path = PurePosixPath(entry.path)
        if others not in (None, home) and path.is_relative_to(others):
            continue
        if not path.is_relative_to(home):
            raise ExportError(
                f"cannot lay out variant {variant.name!r}\n  expected its files in {home}, got {entry.path}"
            )
        inside = model if entry.path == variant.model else str(path.relative_to(home))
        placed.append(PlannedFile(entry, f"{folder}/{inside}"))
    names = [one.path for one in placed]
    if len(set(names)) != len(names) or not all(map(is_safe_path, names)):
        raise ExportError(
            f"cannot lay out variant {variant.name!r}\n  expected other file names than {names}"
        )
    return tuple(placed)


def place_files(root: Path, variant: Variant, placed: tuple[PlannedFile, ...], destination: Path) -> None:
    """Puts files where they go, as hard links where that works, and checks them."""
    model = resolve_inside(root, variant.model)
    alone = {model.parent / name for name in unlinkable_files(model)}
    for one in placed:
        source = resolve_inside(root, one.source.path)
        place = copy_file if source in alone else link_or_copy
        place(source, destination / one.path)
    entries = tuple(one.entry for one in placed)
    raise_differences(destination, compare_files(destination, entries, DigestCache().digest))
