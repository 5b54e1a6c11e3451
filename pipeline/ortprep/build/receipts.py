"""Receipts: inputs and files of a task, written last; they alone decide what is up to date."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.atomic import write_json_atomic
from ortprep.bundle.codec import decode, encode, read_json
from ortprep.bundle.digest import digest_json
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.verification import compare_files
from ortprep.errors import BundleError, SpecError
from ortprep.quoting import quoted

if TYPE_CHECKING:
    from ortprep.stages.core.contract import TaskId  # who only reads receipts need not have what stages need

WORK_FOLDER = ".work"
"""Folder below the artifacts folder that holds intermediate files and receipts."""

REPORT_FILE = "report.html"
"""Name of the report of all bundles, below the artifacts folder."""

RECEIPT_VERSION = "1.0"

KEPT_PREFIX = ".kept-"
"""Folders that begin so hold what a run of the same key can go on with; the key's digest is in the name."""

Digester = Callable[[Path], str]


@dataclass(frozen=True)
class TaskReceipt:
    """Proof that a task was done.

    Attributes:
        task: The task, as `STAGE` or `STAGE/VARIANT`.
        files: The task's files, relative to its folder.
        finished_at: ISO 8601, UTC.
        reasons: Why it ran, one a line.
    """

    schema_version: str
    task: str
    key: Mapping[str, Any]
    files: tuple[FileEntry, ...]
    result: Mapping[str, Any]
    finished_at: str
    elapsed_s: float
    reasons: tuple[str, ...] = ()


def model_folder(artifacts: Path, model: str) -> Path:
    """Returns where a model's intermediate files are."""
    return artifacts / WORK_FOLDER / model


def task_folder(artifacts: Path, model: str, task: TaskId) -> Path:
    """Returns where a task's files are; `package` writes the bundle itself."""
    if task.stage == "package":
        return artifacts / model
    return model_folder(artifacts, model) / str(task).replace("/", "-")


def receipt_path(artifacts: Path, model: str, task: TaskId) -> Path:
    """Returns where a task's receipt is."""
    return model_folder(artifacts, model) / "receipts" / f"{str(task).replace('/', '-')}.json"


def kept_folder(folder: Path, key: Mapping[str, Any]) -> Path:
    """Returns the folder that a killed run leaves to the next one with an equal key."""
    return folder.parent / f"{KEPT_PREFIX}{folder.name}~{digest_json(key).removeprefix('sha256:')[:16]}"


def refuse_links(artifacts: Path, models: Iterable[str]) -> None:
    """Refuses an artifacts folder with links where a build of these models writes or removes.

    Raises:
        SpecError: It is a link itself, or has one; a clone can bring them, and they lead anywhere.
    """
    link = next(_find_links(artifacts, models), None)
    if link is not None:
        raise SpecError(
            f"link in the artifacts folder: {link}\n  expected folders and files, which a build replaces",
            hint=quoted("rm", link),
        )


def _find_links(artifacts: Path, models: Iterable[str]) -> Iterator[Path]:
    for folder in (artifacts, artifacts / WORK_FOLDER):
        if folder.is_symlink():
            yield folder
            return  # what it leads to is not looked at
    for model in models:
        for folder in (artifacts / model, model_folder(artifacts, model)):
            if folder.is_symlink():
                yield folder
        yield from _links_below(model_folder(artifacts, model))


def _links_below(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        yield from (path for name in (*folders, *files) if (path := Path(root, name)).is_symlink())


def read_receipt(path: Path) -> TaskReceipt | None:
    """Reads a receipt; None if this version understands none, so that the task runs."""
    try:
        receipt = decode(TaskReceipt, read_json(path))
    except BundleError:
        return None
    return receipt if receipt.schema_version == RECEIPT_VERSION else None


def write_receipt(path: Path, receipt: TaskReceipt) -> None:
    """Writes a receipt; the caller has put the files in place before.

    Raises:
        OSError: The disk is full or read-only.
    """
    write_json_atomic(path, encode(receipt))


def outcome_key(receipt: TaskReceipt) -> dict[str, Any]:
    """Returns this task's part of later tasks' keys."""
    return {
        "result": digest_json(encode(receipt.result)),
        "files": {entry.path: entry.sha256 for entry in receipt.files},
    }


_ABSENT = object()


def differences(old: object, new: object, path: str = "") -> Iterator[str]:
    """Yields what differs between two keys, one line each, by dotted path."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            inner = f"{path}.{name}" if path else name
            yield from differences(old.get(name, _ABSENT), new.get(name, _ABSENT), inner)
    elif old is _ABSENT:
        yield f"{path}: new, {_short(new)}"
    elif new is _ABSENT:
        yield f"{path}: gone, was {_short(old)}"
    elif old != new:
        yield f"{path}: was {_short(old)}, is {_short(new)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def changed_files(folder: Path, receipt: TaskReceipt, digest: Digester) -> tuple[str, ...]:
    """Returns the files that were changed, removed or added since the task left them."""
    if not folder.is_dir():
        return ("its files are gone",) if receipt.files else ()
    recorded = {entry.path for entry in receipt.files}
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    added = tuple(f"{name}: added" for name in sorted(present - recorded))
    return (*(str(difference) for difference in compare_files(folder, receipt.files, digest)), *added)
