"""The HTML report of bundles: reads what there is, and writes one file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import ortprep
from ortprep.build.receipts import WORK_FOLDER, read_receipt
from ortprep.bundle import LOADER_FILE
from ortprep.bundle.atomic import write_bytes_atomic
from ortprep.bundle.loader_config import read_loader_config
from ortprep.bundle.manifest import MANIFEST_FILE, read_manifest_file
from ortprep.errors import BundleError
from ortprep.report.content import ReportSubject
from ortprep.report.html_page import render_report
from ortprep.report.report_builder import build_report
from ortprep.tables import Table, fill_table, format_duration, format_instant, number_cell


def list_manifests(artifacts: Path) -> tuple[Path, ...]:
    """Returns the manifests of all bundles in a folder; raises `BundleError` if there is none."""
    found = artifacts.glob(f"*/{MANIFEST_FILE}")
    paths = tuple(sorted(path for path in found if not path.parent.name.startswith(".")))
    if not paths:
        raise BundleError(f"no bundle in {artifacts}\n  expected at least one", hint="ortprep prepare")
    return paths


def read_subjects(manifests: Iterable[Path]) -> tuple[ReportSubject, ...]:
    """Reads manifests, and what lies beside them: loader config, and receipts of the build.

    Raises:
        BundleError: One of them is not of this form.
        UnsupportedVersionError: One has a newer major version.
        IntegrityError: One was changed.
    """
    return tuple(map(_read_subject, manifests))


def _read_subject(path: Path) -> ReportSubject:
    manifest, folder = read_manifest_file(path), path.parent
    if path.name != MANIFEST_FILE:
        return ReportSubject(manifest)
    loader = read_loader_config(folder) if (folder / LOADER_FILE).is_file() else None
    return ReportSubject(manifest, loader, build_history_table(folder))


def build_history_table(bundle: Path) -> Table:
    """Returns when a bundle's tasks were last run, and why; no rows if its receipts are missing."""
    folder = bundle.absolute()
    files = sorted((folder.parent / WORK_FOLDER / folder.name / "receipts").glob("*.json"))
    receipts = [receipt for path in files if (receipt := read_receipt(path)) is not None]
    return fill_table(
        "Tasks of the build",
        sorted(receipts, key=lambda receipt: receipt.finished_at),
        (
            ("task", lambda receipt: receipt.task),
            ("last run", lambda receipt: format_instant(receipt.finished_at)),
            ("took", lambda receipt: number_cell(receipt.elapsed_s, format_duration(receipt.elapsed_s))),
            ("because", lambda receipt: "; ".join(receipt.reasons) or "not recorded"),
        ),
    )


def write_report(manifests: Sequence[Path], out: Path) -> int:
    """Writes the report of some manifests, and returns its size in bytes.

    Raises:
        BundleError: A manifest cannot be read.
        OSError: The disk is full or read-only.
    """
    report = build_report(read_subjects(manifests), version=ortprep.__version__)
    page = render_report(report).encode()
    write_bytes_atomic(out, page)
    return len(page)
