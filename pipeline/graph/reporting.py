"""The HTML report of bundles: reads what there is, and writes one file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pipeline
from pipeline.bundle.atomic import write_bytes_atomic
from pipeline.bundle.loader_config import LOADER_FILE
from pipeline.bundle.manifest import MANIFEST_FILE
from pipeline.graph.receipts import WORK_FOLDER, read_receipt
from pipeline.report.building import build_report
from pipeline.report.library import bundled_library
from pipeline.report.reading import digest_inputs, read_subjects
from pipeline.report.rendering import render_report
from pipeline.report.subject import Built, Subject

if TYPE_CHECKING:
    from pipeline.graph.execution import Task

REPORT_FILE = "report.html"
"""Where the report of all bundles is, below the folder of artifacts."""

_INPUTS = re.compile(rb'<meta name="ortprep-inputs" content="([^"]*)">')
_HEAD_BYTES = 4096
"""Where the digest of a report's inputs ends at the latest."""


def read_history(bundle: Path) -> tuple[Built, ...]:
    """Returns when a bundle's tasks were last run, and why; nothing where its receipts are not at hand."""
    receipts = [read_receipt(path) for path in _receipt_files(bundle)]
    return tuple(
        Built(receipt.task, receipt.finished_at, receipt.elapsed_s, receipt.reasons)
        for receipt in receipts
        if receipt is not None
    )


def _receipt_files(bundle: Path) -> list[Path]:
    folder = bundle.absolute()
    return sorted((folder.parent / WORK_FOLDER / folder.name / "receipts").glob("*.json"))


def write_report(manifests: Sequence[Path], out: Path, *, others: Sequence[Subject] = ()) -> int:
    """Writes the report of some manifests, and returns its size in bytes.

    Args:
        manifests: Files; several of one model are its versions.
        out: The file; what was there is replaced in one instant.
        others: What else it is of, read already.

    Raises:
        MissingExtraError: The packages of the extra `report` are not installed.
        BundleError: A manifest cannot be read.
        OSError: The disk is full or read-only.
    """
    inputs = _digest(manifests)
    with bundled_library() as library:
        subjects = (*read_subjects(manifests, read_history), *others)
        report = build_report(subjects, version=pipeline.__version__)
        page = render_report(report, library=library.result(), inputs=inputs).encode()
    write_bytes_atomic(out, page)
    return len(page)


def is_report_current(manifests: Sequence[Path], out: Path) -> bool:
    """Says whether a report was made of exactly these files, by this version."""
    try:
        with out.open("rb") as file:
            found = _INPUTS.search(file.read(_HEAD_BYTES))
        return found is not None and found.group(1).decode() == _digest(manifests)
    except OSError:
        return False


def report_tasks(packages: Sequence[Task], say: Callable[[str], None]) -> None:
    """Writes the report of all bundles of a build beside them.

    Args:
        packages: The last task of every model, which is done.
        say: Told where it is.

    Raises:
        PipelineError: As `write_report`.
        OSError: The disk is full or read-only.
    """
    if packages:
        size_bytes = write_report(_manifests(packages), report_file(packages))
        say(f"{report_file(packages)}: {size_bytes / 2**20:.1f} MB")


def is_report_of_tasks_current(packages: Sequence[Task]) -> bool:
    """Says whether the report of a build's bundles is of exactly these, by this version."""
    return not packages or is_report_current(_manifests(packages), report_file(packages))


def report_file(packages: Sequence[Task]) -> Path:
    """Returns where the report of a build's bundles is; there is at least one."""
    return packages[0].artifacts / REPORT_FILE


def _manifests(packages: Sequence[Task]) -> list[Path]:
    return [task.folder / MANIFEST_FILE for task in packages]


def _digest(manifests: Sequence[Path]) -> str:
    return digest_inputs(_inputs(manifests), version=pipeline.__version__)


def _inputs(manifests: Iterable[Path]) -> list[Path]:
    beside = [path for one in manifests for path in (one.parent / LOADER_FILE, *_receipt_files(one.parent))]
    return [*manifests, *(path for path in beside if path.is_file())]
