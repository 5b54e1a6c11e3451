"""The HTML report of bundles: reads what there is, and writes one file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import ortprep
from ortprep.build.receipts import WORK_FOLDER, read_receipt
from ortprep.bundle.atomic import write_bytes_atomic
from ortprep.report.html_page import render_report
from ortprep.report.report_builder import build_report
from ortprep.report.report_subjects import ReportSubject, read_subjects
from ortprep.tables import Table, fill_table, format_duration, format_instant, number_cell


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


def write_report(manifests: Sequence[Path], out: Path, *, others: Sequence[ReportSubject] = ()) -> int:
    """Writes the report of some manifests, and returns its size in bytes.

    Raises:
        MissingExtraError: The packages of the extra `report` are not installed.
        BundleError: A manifest cannot be read.
        OSError: The disk is full or read-only.
    """
    subjects = (*read_subjects(manifests, build_history_table), *others)
    report = build_report(subjects, version=ortprep.__version__)
    page = render_report(report).encode()
    write_bytes_atomic(out, page)
    return len(page)
