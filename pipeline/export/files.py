"""A variant's files in a second place: the bytes of the bundle, shared with it where that can be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pipeline.bundle.digest import DigestCache
from pipeline.bundle.linking import copy_file, link_or_copy, unlinkable_files
from pipeline.bundle.loader_config import FileEntry, Variant
from pipeline.bundle.paths import is_safe_path, resolve_inside
from pipeline.bundle.verification import compare_files, raise_differences
from pipeline.errors import ExportError


@dataclass(frozen=True)
class Placed:
    """A file of the bundle and where it goes.

    Attributes:
        source: As the bundle records it.
        path: Relative POSIX path in the export.
    """

    source: FileEntry
    path: str

    @property
    def entry(self) -> FileEntry:
        """The record of the file in its new place."""
        return FileEntry(self.path, self.source.size_bytes, self.source.sha256)


def plan_files(variant: Variant, folder: str, *, model: str) -> tuple[Placed, ...]:
    """Returns where a variant's files go; what lies beside the model keeps its name, which the model says.

    The files of a first phase, which exports leave out, are passed over where it has any of its own.

    Args:
        variant: The variant.
        folder: Relative POSIX path of the new folder.
        model: New name of the model file.

    Raises:
        ExportError: A file does not lie beside the model, or has the model's new name.
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
        placed.append(Placed(entry, f"{folder}/{inside}"))
    names = [one.path for one in placed]
    if len(set(names)) != len(names) or not all(map(is_safe_path, names)):
        raise ExportError(
            f"cannot lay out variant {variant.name!r}\n  expected other file names than {names}"
        )
    return tuple(placed)


def place_files(root: Path, variant: Variant, placed: tuple[Placed, ...], destination: Path) -> None:
    """Puts files where they go, as hard links where file system and ONNX Runtime take them, and checks them.

    Args:
        root: The bundle's folder, already checked.
        variant: The variant they are of.
        placed: What `plan_files` returned.
        destination: The export's folder.

    Raises:
        IntegrityError: What is there now is not what the bundle records.
        OSError: The disk is full or read-only.
    """
    model = resolve_inside(root, variant.model)
    alone = {model.parent / name for name in unlinkable_files(model)}
    for one in placed:
        source = resolve_inside(root, one.source.path)
        place = copy_file if source in alone else link_or_copy
        place(source, destination / one.path)
    entries = tuple(one.entry for one in placed)
    raise_differences(destination, compare_files(destination, entries, DigestCache().digest))
