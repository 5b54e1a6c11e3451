"""Receipts: what a task depended on and what it left, written last; they alone decide what is up to date."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.bundle.atomic import write_json_atomic
from pipeline.bundle.codec import decode, encode, read_json
from pipeline.bundle.digest import digest_json
from pipeline.bundle.loader_config import FileEntry
from pipeline.bundle.verification import compare_files
from pipeline.errors import BundleError

if TYPE_CHECKING:
    from pipeline.stages.contract import TaskId  # who only reads receipts need not have what stages need

WORK_FOLDER = ".work"
"""Folder below the artifacts folder that holds intermediate files and receipts."""

RECEIPT_VERSION = "1.0"

KEPT_PREFIX = ".kept-"
"""Folders that begin so hold what a run of the same key can go on with; the key's digest is in the name."""

Digester = Callable[[Path], str]


@dataclass(frozen=True)
class Receipt:
    """Proof that a task was done.

    Attributes:
        schema_version: Of this file.
        task: The task, as `STAGE` or `STAGE/VARIANT`.
        key: Everything that decided the outcome.
        files: What the task left, relative to its folder.
        result: What it hands to later tasks.
        finished_at: ISO 8601, UTC.
        elapsed_s: How long it took.
        reasons: Why it was done, one a line.
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
    """Returns where a run that is killed leaves what the next one with an equal key goes on with."""
    return folder.parent / f"{KEPT_PREFIX}{folder.name}~{digest_json(key).removeprefix('sha256:')[:16]}"


def read_receipt(path: Path) -> Receipt | None:
    """Reads a receipt; None if there is none that this version understands, which means: do the work."""
    try:
        receipt = decode(Receipt, read_json(path))
    except BundleError:
        return None
    return receipt if receipt.schema_version == RECEIPT_VERSION else None


def write_receipt(path: Path, receipt: Receipt) -> None:
    """Writes a receipt; the caller has put the files in place before.

    Raises:
        OSError: The disk is full or read-only.
    """
    write_json_atomic(path, encode(receipt))


def outcome_key(receipt: Receipt) -> dict[str, Any]:
    """Returns what later tasks' keys say about this one: equal outcomes mean nothing to do further on."""
    return {
        "result": digest_json(encode(receipt.result)),
        "files": {entry.path: entry.sha256 for entry in receipt.files},
    }


def differences(old: Mapping[str, Any], new: Mapping[str, Any], *, prefix: str = "") -> tuple[str, ...]:
    """Returns what differs between two keys, one line each, by dotted path."""
    return tuple(_walk(old, new, prefix))


_ABSENT = object()


def _walk(old: object, new: object, path: str) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted({*old, *new}):
            yield from _walk(
                old.get(name, _ABSENT), new.get(name, _ABSENT), f"{path}.{name}" if path else name
            )
    elif old is _ABSENT:
        yield f"{path}: new, {_short(new)}"
    elif new is _ABSENT:
        yield f"{path}: gone, was {_short(old)}"
    elif old != new:
        yield f"{path}: was {_short(old)}, is {_short(new)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def changed_files(folder: Path, receipt: Receipt, digest: Digester) -> tuple[str, ...]:
    """Returns which of a task's files are not as it left them, files that were added included."""
    if not folder.is_dir():
        return ("its files are gone",) if receipt.files else ()
    recorded = {entry.path for entry in receipt.files}
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}
    added = tuple(f"{name}: added" for name in sorted(present - recorded))
    return (*(str(difference) for difference in compare_files(folder, receipt.files, digest)), *added)
