"""The common form of `loader.json` and `manifest.json`: version, largest size, own digest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ortprep.bundle.codec import check_json_values, decode, encode, format_json, read_json
from ortprep.bundle.digest import digest_json
from ortprep.errors import BundleError, IntegrityError
from ortprep.quoting import quoted

if TYPE_CHECKING:
    from pathlib import Path

    from ortprep.bundle.file_memory import StrPath

T = TypeVar("T")

_SELF_DIGEST = "self_digest"
_MAX_DIGITS = 9


def write_record(path: Path, record: object, *, max_bytes: int) -> None:
    """Writes a dataclass as a JSON file with its own digest, so that one changed byte in it is noticed.

    Raises:
        BundleError: It is larger than readers accept.
        OSError: The folder is read-only or full.
    """
    data = encode(record)
    text = format_json(data | {_SELF_DIGEST: digest_json(data)})
    if len(text) > max_bytes:
        raise BundleError(f"file too large: {path}\n  expected at most {max_bytes} bytes, got {len(text)}")
    check_json_values(text, name=str(path))
    from ortprep.bundle.atomic import write_bytes_atomic  # a job reads records only

    write_bytes_atomic(path, text)


def read_record(
    kind: type[T], path: StrPath, *, supported: str, max_bytes: int, sha256: str | None = None
) -> T:
    """Reads a file that `write_record` wrote, here or by another version; `sha256` as for `read_json`.

    Raises:
        BundleError: The file is missing, too large, not of this form, or of a newer major version.
        IntegrityError: It was changed.
    """
    if not os.path.lexists(path):
        raise _no_bundle(*os.path.split(path))
    data = read_json(path, max_bytes=max_bytes, sha256=sha256)
    _check_schema_version(data, supported=supported, path=path)
    _check_self_digest(data, path=path)
    try:
        return decode(kind, data)
    except BundleError as error:
        raise BundleError(f"bad field in {path}\n  {error.message}") from error


def _no_bundle(place: str, record: str) -> BundleError:
    """Returns the error for a folder without a record, with the next step: a name is no path, for example."""
    from pathlib import Path

    folder = Path(place)
    got, name = ("a file" if folder.is_file() else "no such file"), folder.name.removesuffix(".onnx")
    model = folder if folder.suffix == ".onnx" else name
    hint = f"ortprep prepare {quoted(model)}   then load({f'artifacts/{name}'!r})"
    return BundleError(f"no bundle there: {folder}\n  expected a folder with {record}, got {got}", hint=hint)


def _check_schema_version(data: Mapping[str, Any], *, supported: str, path: StrPath) -> None:
    """Raises unless the version of the format is one that this version reads."""
    version = data.get("schema_version")
    parts = version.split(".") if isinstance(version, str) else []
    if len(parts) != 2 or not all(map(_is_number, parts)):
        text = repr(version)[:80]
        raise BundleError(f"bad schema_version in {path}\n  expected like {supported!r}, got {text}")
    if int(parts[0]) > int(supported.partition(".")[0]):
        from ortprep.versions import upgrade_command

        raise BundleError(
            f"bundle format too new: {path}\n  expected schema_version up to {supported}, got {version}",
            hint=upgrade_command(),
        )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS


def _check_self_digest(data: Mapping[str, Any], *, path: StrPath) -> None:
    """Raises unless a record has the digest that it says it has."""
    rest = {key: value for key, value in data.items() if key != _SELF_DIGEST}
    try:
        actual = digest_json(rest)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"not canonical JSON: {path}\n  {error}") from error
    if data.get(_SELF_DIGEST) != actual:
        expected = str(data.get(_SELF_DIGEST))[:80]
        raise IntegrityError(
            f"file was changed after it was written: {path}\n  expected {expected}, got {actual}"
        )
