"""Arrays in and out of files and sessions, whatever their element type.

Files are `.npz` without pickle. They may come from strangers (a bundle's golden sample, a user's inputs), so
reading one allocates no more than the file may claim, and never runs anything. Arrays of bfloat16 are as
`ortprep.runtime.tensors.element_types` has them; strings are numpy's `U`.
"""

from __future__ import annotations

import ctypes
import math
import tokenize
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ortprep.bundle.file_memory import open_regular
from ortprep.errors import BundleError
from ortprep.runtime.tensors.element_types import (
    BFLOAT16,
    Array,
    is_bounded_shape,
    is_valid_bool,
)

if TYPE_CHECKING:
    import onnxruntime

BFLOAT16_TENSOR = "tensor(bfloat16)"
"""How ONNX Runtime names the type of such an input or output."""

_ONNX_BFLOAT16 = 16
"""Its number in `onnx.TensorProto.DataType`."""

MAX_READ_BYTES = 4 * 2**30
"""How much a file's arrays may take in memory unless the reader says otherwise."""

_MAX_ARRAYS = 2_000
_MAX_DIRECTORY_BYTES = 4 * 2**20
_MAX_HEADER_BYTES = 16 * 2**10
_MAX_LITERAL = 1000
"""Characters of a header, a Python literal; numpy parses 10,000 in 2.5 ms, once for each array."""
_MAX_NAME_BYTES = 60_000
_BLOCK_BYTES = 2**20
_MAX_CODE, _SURROGATES = 0x10FFFF, range(0xD800, 0xE000)
_ZIP64_BYTES = 2**30


def write_tensors(path: Path, tensors: Mapping[str, Array]) -> None:
    """Writes arrays to an `.npz` file; equal arrays always give equal bytes.

    Raises:
        BundleError: A name or an array cannot be written.
        OSError: The file cannot be written.
    """
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, tensor in tensors.items():
            if "\0" in name or len(name.encode()) > _MAX_NAME_BYTES:
                raise BundleError(
                    f"cannot write array {name[:80]!r} to {path}\n  its name is not a file name"
                )
            array = to_storable(tensor, name=name)
            # A fixed date: the same arrays are the same file, whenever they are written.
            entry = zipfile.ZipInfo(f"{name}.npy", date_time=(1980, 1, 1, 0, 0, 0))
            with archive.open(entry, "w", force_zip64=array.nbytes > _ZIP64_BYTES) as file:
                np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)


def to_storable(array: Array, *, name: str) -> Array:
    """Returns the array as files hold it: object arrays of strings become `U`.

    Raises:
        BundleError: It holds other objects, or is of a type without ONNX counterpart.
    """
    if array.dtype.kind == "O":
        if not all(isinstance(item, str) for item in array.flat):
            raise BundleError(
                f"cannot store array {name!r}\n  expected numbers, booleans or strings, got objects"
            )
        return array.astype(np.str_)
    if array.dtype.kind not in "biufcU" and array.dtype != BFLOAT16:
        raise BundleError(f"cannot store array {name!r}\n  expected an ONNX element type, got {array.dtype}")
    return array


def read_tensors(
    path: Path, *, max_bytes: int = MAX_READ_BYTES, only_stored: bool = False
) -> dict[str, Array]:
    """Reads the arrays of an `.npz` file, in the file's order.

    Args:
        path: The file.
        max_bytes: How much the arrays may take in memory, by what the file declares.
        only_stored: Whether compressed arrays are refused, as of a file that this package wrote: then the
            arrays take no more than the file.

    Raises:
        BundleError: The file is missing, damaged, too large, or holds pickled objects.
    """
    with _opened(path, max_bytes, only_stored=only_stored) as (archive, entries):
        return {name: _read_array(archive, entry) for name, entry in entries.items()}


def read_headers(path: Path) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Reads the types and shapes of the arrays of an `.npz` file, no values; raises as `read_tensors`."""
    headers = {}
    with _opened(path, MAX_READ_BYTES) as (archive, entries):
        for name, entry in entries.items():
            shape, _, dtype, header_bytes = _read_header(archive, entry)
            _check_array(entry, dtype, math.prod(shape) * dtype.itemsize, header_bytes=header_bytes)
            headers[name] = dtype, shape
    return headers


@contextmanager
def _opened(
    path: Path, max_bytes: int, *, only_stored: bool = False
) -> Iterator[tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """Opens an `.npz` file whose entries, by name, are within the limits."""
    try:
        with open_regular(path) as file:
            _check_directory(file)
            with zipfile.ZipFile(file) as archive:
                size_bytes = file.seek(0, 2)
                limit = min(max_bytes, size_bytes) if only_stored else max_bytes
                yield archive, _check_entries(archive, path, limit, only_stored=only_stored)
    except OSError as error:
        raise BundleError(f"cannot read {path}\n  {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise BundleError(f"not a readable .npz file: {path}\n  {error}") from error


def _check_directory(file: BinaryIO) -> None:
    """Raises `BadZipFile` if the list of entries is large: `zipfile` takes ten times the memory for it.

    A file above 2 GiB has two records more before its end, with 64-bit numbers (APPNOTE.TXT 4.3.14, 4.3.15).
    """
    size_bytes = file.seek(0, 2)
    file.seek(max(size_bytes - 98, 0))
    tail = file.read()
    record, locator, end = tail[-98:-42], tail[-42:-22], tail[-22:]
    if not end.startswith(b"PK\5\6"):
        raise zipfile.BadZipFile("File is not a zip file")
    directory_bytes = int.from_bytes(end[12:16], "little")
    if locator.startswith(b"PK\6\7"):
        if not record.startswith(b"PK\6\6") or int.from_bytes(locator[8:16], "little") != size_bytes - 98:
            raise zipfile.BadZipFile("its end is not where the file says it is")
        directory_bytes = int.from_bytes(record[40:48], "little")
    if directory_bytes > _MAX_DIRECTORY_BYTES:
        raise zipfile.BadZipFile(f"its list of entries takes more than {_MAX_DIRECTORY_BYTES} bytes")


def _check_entries(
    archive: zipfile.ZipFile, path: Path, max_bytes: int, *, only_stored: bool
) -> dict[str, zipfile.ZipInfo]:
    """Returns the entries of an archive by array, after their number, kind and sizes were checked."""
    entries = archive.infolist()
    if len(entries) > _MAX_ARRAYS:
        raise BundleError(f"too many arrays in {path}\n  expected at most {_MAX_ARRAYS}, got {len(entries)}")
    # Other methods let the file choose how much memory its reader takes.
    methods = {zipfile.ZIP_STORED} if only_stored else {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
    if not {entry.compress_type for entry in entries} <= methods:
        allowed = "uncompressed" if only_stored else "uncompressed or deflated"
        raise BundleError(f"compressed arrays in {path}\n  expected {allowed} ones")
    # zipfile never yields more than the size an entry declares, so the sum bounds what a reader allocates.
    size_bytes = sum(entry.file_size for entry in entries)
    if size_bytes > max_bytes:
        raise BundleError(f"arrays too large: {path}\n  expected at most {max_bytes} bytes, got {size_bytes}")
    named = {entry.filename.removesuffix(".npy"): entry for entry in entries}
    if len(named) != len(entries):
        raise BundleError(f"two arrays with the same name in {path}")
    return named


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
    """Returns an array of an archive; raises `ValueError` unless its header is true."""
    shape, is_fortran, dtype, header_bytes = _read_header(archive, entry)
    size_bytes = math.prod(shape) * dtype.itemsize
    _check_array(entry, dtype, size_bytes, header_bytes=header_bytes)
    array = np.empty(shape[::-1] if is_fortran else shape, dtype)
    with archive.open(entry) as file:
        file.read(header_bytes)
        if size_bytes:
            _read_into(file, array.reshape(-1).view(np.uint8))
    if not is_valid_bool(array):
        raise ValueError(f"array {entry.filename!r} holds a boolean that is neither 0 nor 1")
    native = array.astype(dtype.newbyteorder("="), copy=False)
    if dtype.kind == "U" and size_bytes:
        codes = native.reshape(-1).view(np.uint32)
        if (codes > _MAX_CODE).any() or ((codes >= _SURROGATES.start) & (codes < _SURROGATES.stop)).any():
            raise ValueError(f"array {entry.filename!r} holds text that is not Unicode")
    return native.T if is_fortran else native


def _read_header(
    archive: zipfile.ZipFile, entry: zipfile.ZipInfo
) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Returns shape, whether the order is Fortran's, type, and the bytes of the header."""
    with archive.open(entry) as member:
        file = BytesIO(member.read(_MAX_HEADER_BYTES))
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }.get(version)
    if read is None:
        raise ValueError(f"unknown .npy version {version}")
    try:
        shape, is_fortran, dtype = read(file, max_header_size=_MAX_LITERAL)
    except (MemoryError, SyntaxError, TypeError, tokenize.TokenError) as error:
        # The header is a Python literal, and what Python's parser says of a strange one is many things.
        raise ValueError(f"unreadable .npy header: {type(error).__name__}") from error
    if not all(type(size) is int for size in shape) or not is_bounded_shape(shape):
        raise ValueError(f"unreadable .npy header: shape {shape}")
    return shape, is_fortran, dtype, file.tell()


def _check_array(entry: zipfile.ZipInfo, dtype: np.dtype[Any], size_bytes: int, *, header_bytes: int) -> None:
    """Raises `ValueError` unless an array has a type that ONNX knows, and its header's length."""
    if dtype.hasobject:
        raise ValueError(
            f"array {entry.filename!r} holds pickled objects, which are never read; store strings as U"
        )
    # A type of no size would make arrays of any length out of nothing.
    if (dtype.kind not in "biufcU" and dtype != BFLOAT16) or dtype.itemsize == 0:
        raise ValueError(f"array {entry.filename!r} has a type that ONNX lacks: {dtype}")
    if size_bytes != entry.file_size - header_bytes:
        raise ValueError(f"array {entry.filename!r} does not have the length that its shape says")


def _read_into(file: IO[bytes], target: NDArray[np.uint8]) -> None:
    position = 0
    while block := file.read(_BLOCK_BYTES):
        target[position : position + len(block)] = np.frombuffer(block, np.uint8)
        position += len(block)
    if position != len(target):
        raise EOFError(f"expected {len(target)} bytes of data, got {position}")


def run_session(session: onnxruntime.InferenceSession, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Runs a session on arrays of any element type.

    ONNX Runtime's `run` neither takes nor gives bfloat16, which so goes by `OrtValue`.

    Returns:
        Arrays by output name, in the model's order. The tensors of a sequence are named `NAME[0]`, `NAME[1]`,
        …, those of a map `NAME[KEY]`; an empty optional is left out. Strings are `U` arrays.

    Raises:
        RuntimeError: An output of bfloat16 was left on a device; and what ONNX Runtime raises
            (see `ortprep.runtime.loading.session.onnxruntime_errors`).
    """
    outputs = session.get_outputs()
    names = [output.name for output in outputs]
    if all(output.type != BFLOAT16_TENSOR for output in outputs):
        native = {
            name: _to_ort_value(array) if array.dtype == BFLOAT16 else array for name, array in feeds.items()
        }
        values = session.run(names, native)
    else:
        bound = {name: _to_ort_value(array) for name, array in feeds.items()}
        values = [_from_ort_value(value) for value in session.run_with_ort_values(names, bound)]
    return dict(item for name, value in zip(names, values, strict=True) for item in _flatten(name, value))


def _to_ort_value(array: Array) -> Any:
    """Returns an array as ONNX Runtime takes it; bfloat16 goes by its bits."""
    import onnxruntime

    if array.dtype != BFLOAT16:
        return onnxruntime.OrtValue.ortvalue_from_numpy(np.require(array, requirements="C"))
    bits = np.require(array["bfloat16"], requirements="C")
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, _ONNX_BFLOAT16)


def _from_ort_value(value: Any) -> Array:
    """Returns an output as an array; raises `RuntimeError` for bits that lie on a device."""
    if value.data_type() != BFLOAT16_TENSOR:
        return np.asarray(value.numpy())
    shape = tuple(value.shape())
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, BFLOAT16)
    if value.device_name() != "cpu":
        raise RuntimeError(f"expected an output of bfloat16 on the CPU, got {value.device_name()}")
    # `numpy()` refuses the type, so its bytes are copied from where they lie.
    return np.frombuffer(ctypes.string_at(value.data_ptr(), 2 * count), BFLOAT16).reshape(shape)


def _flatten(name: str, value: Any) -> Iterator[tuple[str, Array]]:
    """Yields an output's arrays by name; those of a sequence or map are `y[0]`, `y[KEY]`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten(f"{name}[{key}]", item)
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _flatten(f"{name}[{position}]", item)
    elif value is not None:
        yield name, to_storable(np.asarray(value), name=name)
