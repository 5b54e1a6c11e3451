"""JSON to frozen dataclasses and named tuples and back, with nothing but the standard library.

A runtime job reads bundles without the build's dependencies, so the record types are plain dataclasses and
this module is the whole of their serialisation. Unknown fields are ignored (a newer minor version may have
added them); a missing field without default, or a value of the wrong type, is a `BundleError` that names it.
"""

from __future__ import annotations

import functools
import json
import math
import os
import types
from collections.abc import Mapping
from typing import Any, ForwardRef, TypeVar, Union, get_args, get_origin, get_type_hints

from ortprep.bundle.file_memory import StrPath, digest_bytes, open_regular
from ortprep.errors import BundleError, IntegrityError

T = TypeVar("T")

_NOT_FINITE = ("nan", "inf", "-inf")

MAX_JSON_BYTES = 8 * 1024 * 1024
"""Largest JSON file that is read from a bundle, in bytes; each trial takes 4,000 of a manifest."""

MAX_JSON_VALUES = 640_000
"""Most commas, colons and opening brackets in a JSON file. Each costs a reader up to 120 bytes of memory; a
manifest has one in 15 bytes."""

_MAX_SHOWN = 100
"""Maximum length of a key in the path to a value: each value below the key builds its whole path."""


def encode(value: object) -> Any:
    """Returns `value` as JSON types: records as objects, tuples as arrays, NaN and infinities by name.

    Sections of a spec and paths are encoded too, as requests of the build's children have them.
    """
    if _is_dataclass(type(value)):
        return {name: encode(getattr(value, name)) for name in value.__dataclass_fields__}  # type: ignore[attr-defined]
    if _is_named_tuple(type(value)):
        return {name: encode(item) for name, item in value._asdict().items()}  # type: ignore[attr-defined]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if hasattr(value, "model_dump"):
        return encode(value.model_dump(mode="json"))
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def decode(kind: type[T], data: object, *, where: str = "") -> T:
    """Builds a `kind` from parsed JSON.

    Args:
        kind: A record, or any type made of records, tuples, mappings, unions and JSON scalars.
        data: Result of `json.loads`.
        where: Dotted path of `data` in its file, for error messages.

    Raises:
        BundleError: A field is missing or has a value of another type.
    """
    return _decode(kind, data, where)  # type: ignore[no-any-return]


def _decode(kind: Any, data: object, where: str) -> Any:
    """Returns data as a type, by the kind of type that it is."""
    origin = get_origin(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        return _decode_union(get_args(kind), data, where)
    if origin is tuple:
        return _decode_tuple(get_args(kind), data, where)
    if origin is not None and issubclass(origin, Mapping):
        mapping = _expect(dict, data, where)
        inner = get_args(kind)[1]
        return {key: _decode(inner, item, f"{where}.{key[:_MAX_SHOWN]}") for key, item in mapping.items()}
    if _is_dataclass(kind) or _is_named_tuple(kind):
        return _decode_record(kind, data, where)
    return _expect(kind, data, where)


def _decode_union(kinds: tuple[Any, ...], data: object, where: str) -> Any:
    """Returns data as the first type of a union that it fits, and has the last one say what is wrong."""
    if data is None and type(None) in kinds:
        return None
    remaining = [kind for kind in kinds if kind is not type(None)]
    for kind in remaining[:-1]:
        try:
            return _decode(kind, data, where)
        except BundleError:
            continue
    return _decode(remaining[-1], data, where)


def _decode_tuple(kinds: tuple[Any, ...], data: object, where: str) -> tuple[Any, ...]:
    """Returns an array as a tuple, of one type throughout or of one type per item."""
    items = _expect(list, data, where)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_decode(kinds[0], item, f"{where}[{i}]") for i, item in enumerate(items))
    if len(items) != len(kinds):
        raise BundleError(f"bad value at {where}\n  expected {len(kinds)} items, got {len(items)}")
    return tuple(
        _decode(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, items, strict=True))
    )


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "__dataclass_fields__")


def _is_named_tuple(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields")


@functools.cache
def _fields(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    """Returns name, type and necessity of each field of a record."""
    if _is_named_tuple(kind):
        declared, optional = dict(kind.__annotations__), set(kind._field_defaults)
    else:
        import dataclasses  # what a job reads are named tuples, and importing this takes a millisecond

        absent, fields = dataclasses.MISSING, dataclasses.fields(kind)
        declared = {f.name: f.type for f in fields}
        optional = {f.name for f in fields if f.default is not absent or f.default_factory is not absent}
    # Evaluating annotations that are kept as text takes a first load longer than reading its file.
    as_text = any(isinstance(hint, str | ForwardRef) for hint in declared.values())
    hints = get_type_hints(kind) if as_text else declared
    return tuple((name, hints[name], name not in optional) for name in declared)


def _decode_record(kind: Any, data: object, where: str) -> Any:
    """Returns an object as a record; fields that the record lacks are ignored."""
    mapping = _expect(dict, data, where)
    values = {}
    for name, hint, required in _fields(kind):
        if name in mapping:
            values[name] = _decode(hint, mapping[name], f"{where}.{name}" if where else name)
        elif required:
            raise BundleError(
                f"missing field {name!r} in {where or 'the top level'}\n  expected {kind.__name__}"
            )
    return kind(**values)


def _expect(kind: type[T], data: object, where: str) -> T:
    """Returns data of a scalar type; raises `BundleError` if it has another one."""
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return _to_float(data, where)  # type: ignore[return-value]
    if kind is float and data in _NOT_FINITE:
        return float(str(data))  # type: ignore[return-value]
    if not isinstance(data, kind) or (isinstance(data, bool) and kind is not bool):
        # Here, so that a bundle, which has neither, is decoded as fast as without.
        if issubclass(kind, os.PathLike) and isinstance(data, str):
            return kind(data)  # type: ignore[call-arg]
        if hasattr(kind, "model_validate"):
            return kind.model_validate(data)  # type: ignore[attr-defined, no-any-return]
        place = where or "the top level"
        raise BundleError(f"bad value at {place}\n  expected {kind.__name__}, got {type(data).__name__}")
    if kind is int and not -(2**63) <= data < 2**64:  # type: ignore[operator]
        place = where or "the top level"
        raise BundleError(f"bad value at {place}\n  expected an integer of 64 bits, got a larger one")
    return data


def _to_float(data: int, where: str) -> float:
    try:
        return float(data)
    except OverflowError as error:
        raise BundleError(f"bad value at {where}\n  expected a float, got an integer too large") from error


def parse_json(text: bytes, *, name: str) -> dict[str, Any]:
    """Parses one JSON object in UTF-8.

    Raises:
        BundleError: The text is not UTF-8, not JSON, nested too deeply, no object, names a field twice, or
            has more than `MAX_JSON_VALUES` values.
    """
    check_json_values(text, name=name)
    try:
        data = json.loads(text.decode(), object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"not a JSON file: {name}\n  {error}") from error
    if not isinstance(data, dict):
        raise BundleError(f"bad JSON file: {name}\n  expected an object, got {type(data).__name__}")
    return data


def check_json_values(text: bytes, *, name: str) -> None:
    """Raises `BundleError`, before anything is parsed, if JSON has more than `MAX_JSON_VALUES` values."""
    count = sum(map(text.count, (b",", b":", b"[", b"{")))
    if count > MAX_JSON_VALUES:
        raise BundleError(
            f"too many values in {name}\n"
            f"  expected at most {MAX_JSON_VALUES} commas, colons and brackets, got {count}"
        )


def _without_repetition(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    # Which of two values counts is left to the parser, so two readers could see two different files.
    data = dict(fields)
    if len(data) != len(fields):
        raise ValueError("a field is named twice in one object")
    return data


def read_json(path: StrPath, *, max_bytes: int = MAX_JSON_BYTES, sha256: str | None = None) -> dict[str, Any]:
    """Reads one JSON object from a file of bounded size.

    Args:
        path: The file.
        max_bytes: Its largest size.
        sha256: The digest that its bytes must have, `sha256:<hex>`; None for any.

    Raises:
        BundleError: The file is missing, unreadable, larger than `max_bytes`, or not a JSON object.
        IntegrityError: It has another digest.
    """
    try:
        with open_regular(path) as file:
            text = file.read(max_bytes + 1)
    except OSError as error:
        raise BundleError(f"cannot read {path}\n  {error.strerror or error}") from error
    if len(text) > max_bytes:
        raise BundleError(f"file too large: {path}\n  expected at most {max_bytes} bytes")
    if sha256 is not None and (got := digest_bytes(text)) != sha256:
        raise IntegrityError(
            f"not the file that was recorded: {path}\n  expected {sha256 or 'none'}, got {got}"
        )
    return parse_json(text, name=str(path))


def format_json(data: Any) -> bytes:
    """Returns JSON for people and programs: indented, UTF-8, keys in the order given."""
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def canonical_json(data: Any) -> bytes:
    """Returns the one serialisation that digests are computed over: sorted keys, no spaces, UTF-8."""
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()
