"""`ortprep-export.json`: what an export was made of, and what of it is not there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ortprep
from ortprep.bundle.digest import DigestCache
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.record import read_record, write_record
from ortprep.bundle.verification import compare_files, describe_files
from ortprep.errors import BundleError, ExportError
from ortprep.export.export_result import ExportedModel, describe_model

EXPORT_FILE = "ortprep-export.json"
LISTING_FILE = "ortprep-export.txt"
EXPORT_SCHEMA_VERSION = "1.0"
_MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class ExportRecord:
    """The content of `ortprep-export.json`.

    Attributes:
        schema_version: Of this file, "MAJOR.MINOR".
        layout: `triton` or `ort-package`.
        pipeline_version: Of ortprep.
        models: What is in it.
        files: Every other file, as it was written.
    """

    schema_version: str
    layout: str
    pipeline_version: str
    models: tuple[ExportedModel, ...]
    files: tuple[FileEntry, ...]


def write_export_record(folder: Path, layout: str, models: tuple[ExportedModel, ...]) -> None:
    """Writes the record with its own digest, and the plain list."""
    lines = [line for model in models for line in describe_model(model)]
    (folder / LISTING_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = describe_files(folder, DigestCache().digest)
    record = ExportRecord(EXPORT_SCHEMA_VERSION, layout, ortprep.__version__, models, files)
    write_record(folder / EXPORT_FILE, record, max_bytes=_MAX_BYTES)


def read_export_record(folder: Path) -> ExportRecord:
    """Reads the record of an export."""
    path = folder / EXPORT_FILE
    return read_record(ExportRecord, path, supported=EXPORT_SCHEMA_VERSION, max_bytes=_MAX_BYTES)


def resolve_destination(out: Path, bundles: Sequence[Path]) -> Path:
    """Returns where an export goes, links followed."""
    place = Path(os.path.realpath(out))
    for bundle in bundles:
        if place.is_relative_to(os.path.realpath(bundle)):
            raise ExportError(
                f"will not export into a bundle\n  expected a folder outside {bundle}, got {out}",
                hint="choose another --out",
            )
    if place.exists() and not place.is_dir():
        raise ExportError(
            f"will not overwrite {out}\n  expected a folder, got a file", hint="choose another --out"
        )
    return place


def check_replaceable(folder: Path, *, layout: str) -> None:
    """Raises unless nothing is lost with a folder: it is absent, empty, or an export as it was written."""
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    content = _describe(folder)
    if content != layout:
        raise ExportError(
            f"will not overwrite {folder}\n"
            f"  expected no such folder, or an export of ortprep ({layout}) as it was written, got {content}",
            hint="choose another --out, or remove it yourself",
        )


def _describe(folder: Path) -> str:
    """Returns the layout of an export that is as it was written, else what there is instead."""
    try:
        record = read_export_record(folder)
        changed = [str(one) for one in compare_files(folder, record.files, DigestCache().digest)]
    except (BundleError, NotADirectoryError):
        return "something else"
    known = {EXPORT_FILE, *(entry.path for entry in record.files)}
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    changed += [f"{name}: added" for name in sorted(names - known)]
    return ", ".join(changed[:3]) or record.layout
