"""`ortprep-export.json`: what an export was made of, and what of it is not there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pipeline
from pipeline.bundle.record import read_record, write_record
from pipeline.errors import BundleError, ExportError
from pipeline.export.exported import ExportedModel
from pipeline.export.listing import LISTING_FILE, format_listing

EXPORT_FILE = "ortprep-export.json"
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
    """

    schema_version: str
    layout: str
    pipeline_version: str
    models: tuple[ExportedModel, ...]


def write_export_record(folder: Path, layout: str, models: tuple[ExportedModel, ...]) -> None:
    """Writes the record with its own digest, and the plain list.

    Args:
        folder: The export's folder.
        layout: `triton` or `ort-package`.
        models: What is in it.

    Raises:
        BundleError: It is larger than readers accept.
        OSError: The folder is read-only or full.
    """
    record = ExportRecord(EXPORT_SCHEMA_VERSION, layout, pipeline.__version__, models)
    write_record(folder / EXPORT_FILE, record, max_bytes=_MAX_BYTES)
    (folder / LISTING_FILE).write_text(format_listing(models), encoding="utf-8")


def read_export_record(folder: Path) -> ExportRecord:
    """Reads the record of an export.

    Raises:
        BundleError: It is missing, too large, not of this form, or was changed.
    """
    path = folder / EXPORT_FILE
    return read_record(ExportRecord, path, supported=EXPORT_SCHEMA_VERSION, max_bytes=_MAX_BYTES)


def check_replaceable(folder: Path, *, layout: str) -> None:
    """Raises unless nothing is lost with a folder: it is absent, empty, or an export of the same layout.

    Args:
        folder: Where an export is to go.
        layout: Of that export.

    Raises:
        ExportError: Something else is there.
    """
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        found = read_export_record(folder).layout
    except (BundleError, NotADirectoryError):
        found = "something else"
    if found != layout:
        raise ExportError(
            f"will not overwrite {folder}\n"
            f"  expected no such folder, or an export of ortprep ({layout}), got {found}",
            hint="choose another --out, or remove it yourself",
        )
