"""The HTML report of bundles: reads what there is, and writes one file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import ortprep
from ortprep.build.receipts import WORK_FOLDER, read_receipt
from ortprep.bundle import LOADER_FILE
from ortprep.bundle.atomic import write_bytes_atomic
from ortprep.report.html_page import read_vega, render_report
from ortprep.report.report_builder import build_report
from ortprep.report.report_subjects import ReportSubject, TaskHistory, digest_inputs, read_subjects

_INPUTS = re.compile(rb'<meta name="ortprep-inputs" content="([^"]*)">')
_HEAD_BYTES = 4096
"""Where the digest of a report's inputs ends at the latest."""


def read_history(bundle: Path) -> tuple[TaskHistory, ...]:
    """Returns when a bundle's tasks were last run, and why; nothing if its receipts are missing."""
    receipts = [read_receipt(path) for path in _receipt_files(bundle)]
    return tuple(
        TaskHistory(receipt.task, receipt.finished_at, receipt.elapsed_s, receipt.reasons)
        for receipt in receipts
        if receipt is not None
    )


def _receipt_files(bundle: Path) -> list[Path]:
    folder = bundle.absolute()
    return sorted((folder.parent / WORK_FOLDER / folder.name / "receipts").glob("*.json"))


def write_report(manifests: Sequence[Path], out: Path, *, others: Sequence[ReportSubject] = ()) -> int:
    """Writes the report of some manifests, and returns its size in bytes.

    Raises:
        MissingExtraError: The packages of the extra `report` are not installed.
        BundleError: A manifest cannot be read.
        OSError: The disk is full or read-only.
    """
    inputs = _digest(manifests)
    subjects = (*read_subjects(manifests, read_history), *others)
    report = build_report(subjects, version=ortprep.__version__)
    page = render_report(report, library=read_vega(), inputs=inputs).encode()
    write_bytes_atomic(out, page)
    return len(page)


def is_report_current(manifests: Sequence[Path], out: Path) -> bool:
    """Returns whether a report was made of exactly these files, by this version."""
    try:
        with out.open("rb") as file:
            match = _INPUTS.search(file.read(_HEAD_BYTES))
        return match is not None and match.group(1).decode() == _digest(manifests)
    except OSError:
        return False


def _digest(manifests: Sequence[Path]) -> str:
    return digest_inputs(_inputs(manifests), version=ortprep.__version__)


def _inputs(manifests: Iterable[Path]) -> list[Path]:
    beside = [
        path
        for manifest in manifests
        for path in (manifest.parent / LOADER_FILE, *_receipt_files(manifest.parent))
    ]
    return [*manifests, *(path for path in beside if path.is_file())]
