"""A variant's files in an export, shared with the bundle where that can be, and tried there."""

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
from ortprep.export.option_mapping import MappedOptions
from ortprep.export.result import ExportedModel
from ortprep.export.trial import TrialResult, try_model
from ortprep.export.variant_selection import describe_needs


@dataclass(frozen=True)
class SourceBundle:
    """A bundle's folder, free of links, with its loader config and manifest."""

    root: Path
    config: LoaderConfig
    manifest: Manifest


def read_source(bundle: Path) -> SourceBundle:
    """Reads a bundle after every file of it was compared with its record.

    Raises:
        BundleError: The bundle cannot be read.
        IntegrityError: Something differs from what was written.
    """
    root = Path(os.path.realpath(bundle))
    check_bundle(root, DigestCache().digest)
    return SourceBundle(root, read_loader_config(root), read_manifest(root))


def place_variant(
    source: SourceBundle, variant: Variant, export: Path, folder: str, model: str, options: MappedOptions
) -> tuple[ExportedModel, TrialResult]:
    """Places a variant's files in an export, and runs the model there.

    Args:
        source: The bundle.
        variant: The variant.
        export: The export's folder.
        folder: Relative POSIX path of the variant's folder in it.
        model: File name of the model in that folder.
        options: The options that remain.

    Raises:
        ExportError: A file is not beside the model, or has a name that the layout cannot have.
        IntegrityError: A file is not what the bundle records.
        LoadError: The model does not load, or does not answer as recorded.
    """
    placed = plan_files(variant, folder, model=model)
    original = resolve_inside(source.root, variant.model)
    unlinkable = {original.parent / name for name in unlinkable_files(original)}
    for path, entry in placed.items():
        file = resolve_inside(source.root, entry.path)
        place = copy_file if file in unlinkable else link_or_copy
        place(file, export / path)
    files = tuple(FileEntry(path, one.size_bytes, one.sha256) for path, one in placed.items())
    raise_differences(export, compare_files(export, files, DigestCache().digest))
    trial = try_model(source.root, variant, options, export / folder / model)
    exported = ExportedModel(
        name=f"{source.config.name}/{variant.name}",
        bundle=source.config.name,
        variant=variant.name,
        source_sha256=source.manifest.source.sha256,
        prepared_with=str(source.manifest.environment.get("onnxruntime", "")),
        files=files,
        carried=options.carried,
        left_out=options.left_out,
        needs=tuple(describe_needs(variant)),
        trial=str(trial),
    )
    return exported, trial


def plan_files(variant: Variant, folder: str, *, model: str) -> dict[str, FileEntry]:
    """Returns a variant's files by their relative POSIX path in the export.

    Files beside the model keep their names, since the model refers to them. Files that only a first phase
    reads are left out, as exports leave out first phases.
    """
    home = PurePosixPath(variant.model).parent
    first = variant.first_phase
    others = None if first is None or first.model is None else PurePosixPath(first.model).parent
    placed: dict[str, FileEntry] = {}
    for entry in variant.files:
        path = PurePosixPath(entry.path)
        if others not in (None, home) and path.is_relative_to(others):
            continue
        if not path.is_relative_to(home):
            raise ExportError(
                f"cannot lay out variant {variant.name!r}\n  expected its files in {home}, got {entry.path}"
            )
        name = f"{folder}/{model if entry.path == variant.model else path.relative_to(home)}"
        if name in placed or not is_safe_path(name):
            raise ExportError(
                f"cannot lay out variant {variant.name!r}\n  expected other file names than {name}"
            )
        placed[name] = entry
    return placed
