"""Receipts: inputs and files of a task, written last; they alone decide what is up to date.

A clone of somebody else's project can bring an artifacts folder along. Receipts are therefore authenticated
with a key of this user, and what a build writes to is never reached by a link.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ortprep.bundle.atomic import write_json_atomic
from ortprep.bundle.codec import decode, encode, read_json
from ortprep.bundle.digest import digest_json
from ortprep.bundle.loader_config import FileEntry
from ortprep.bundle.paths import walk_folders
from ortprep.bundle.user_key import authenticate
from ortprep.bundle.verification import Digester, compare_files
from ortprep.errors import BundleError

if TYPE_CHECKING:
    from ortprep.stages.core.contract import TaskId  # who only reads receipts need not have what stages need

WORK_FOLDER = ".work"
"""Folder below the artifacts folder that holds intermediate files and receipts."""

RECEIPT_VERSION = "1.0"

NEVER_DONE = "never done"
"""Reason of a task without a receipt."""

NOT_OURS = "its receipt was not written by this user on this machine"
"""Reason of a task whose receipt came with a clone, or whose user's key is gone."""

_MAC = "mac"


@dataclass(frozen=True)
class TaskReceipt:
    """Proof that a task was done.

    Attributes:
        task: The task, as `STAGE` or `STAGE/VARIANT`.
        files: The task's files, relative to its folder.
    """

    schema_version: str
    task: str
    key: Mapping[str, Any]
    files: tuple[FileEntry, ...]
    result: Mapping[str, Any]


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


def written_paths(artifacts: Path, models: Iterable[str]) -> Iterator[Path]:
    """Yields what a build of these models writes or removes in an artifacts folder, for `refuse_links`."""
    yield from (artifacts, artifacts / WORK_FOLDER)
    for model in models:
        yield from (artifacts / model, model_folder(artifacts, model))
        for root, folders, files in walk_folders(model_folder(artifacts, model)):
            yield from (Path(root, name) for name in (*folders, *files))


def find_receipt(path: Path) -> TaskReceipt | str:
    """Reads a receipt that this user wrote with this version; else returns why the task has to run."""
    try:
        fields = read_json(path)
        mac = fields.pop(_MAC, "")
        receipt = decode(TaskReceipt, fields)
        if receipt.schema_version != RECEIPT_VERSION:
            return NEVER_DONE
        is_ours = isinstance(mac, str) and hmac.compare_digest(mac.encode(), authenticate(fields).encode())
    except (BundleError, ValueError, RecursionError):  # what is no JSON of ours may not be written as such
        return NEVER_DONE
    return receipt if is_ours else NOT_OURS


def read_receipt(path: Path) -> TaskReceipt | None:
    """Reads a receipt as `find_receipt` does; None if there is none that counts, so that the task runs."""
    receipt = find_receipt(path)
    return None if isinstance(receipt, str) else receipt


def write_receipt(path: Path, receipt: TaskReceipt) -> None:
    """Writes a receipt; the caller has put the files in place before.

    Raises:
        OSError: The disk is full or read-only.
    """
    fields = encode(receipt)
    write_json_atomic(path, {**fields, _MAC: authenticate(fields)})


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
