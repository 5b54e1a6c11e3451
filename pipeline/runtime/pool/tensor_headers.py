"""How tensors lie in shared memory: a block begins with a header for each, which says where its data is.

    version, count, whether a worker has begun to read, length           once
    position, order, element type, rank, segment, offset, size, shape   per tensor

Data begins on multiples of 64 bytes, in the order of C, native endianness; types that numpy lacks as
`pipeline.runtime.element_types` has them. Offsets of data in the block itself count from its begin, so that
tensors of the same types and shapes have the same headers, byte by byte. A header is believed only as far as
it agrees with itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PoolError
from pipeline.runtime.element_types import ELEMENT_TYPES

ALIGNMENT = 64
TAKEN_AT = 4
"""The byte of a block that a worker sets when it begins with the request."""

HERE = 0
"""The segment of data that lies in the block itself."""

_VERSION = 1
_ORDER_C = ord("C")
MAX_RANK = 32
_MAX_TENSORS = 4096
_TOP = struct.Struct("<HHB3xI4x")
_FIXED = struct.Struct("<HBxHHIQQ")
_REMEMBERED = 1024

_NUMPY_CODES = {
    "float32": 1, "uint8": 2, "int8": 3, "uint16": 4, "int16": 5, "int32": 6, "int64": 7, "bool": 9,
    "float16": 10, "float64": 11, "uint32": 12, "uint64": 13, "complex64": 14, "complex128": 15,
}  # fmt: skip
_DTYPES: dict[int, np.dtype[Any]] = {
    **{code: np.dtype(name) for name, code in _NUMPY_CODES.items()},
    **{kind.code: kind.dtype for kind in ELEMENT_TYPES.values()},
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class TensorHeader(NamedTuple):
    """Where one tensor lies.

    Attributes:
        position: Which of the model's inputs or outputs it is.
        dtype: Of its elements.
        shape: One size per axis.
        segment: Number of the segment its data is in; `HERE` for the block itself.
        offset: First byte of the data, in the segment or in the block.
        size: Bytes of the data.
    """

    position: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    segment: int
    offset: int
    size: int


def is_transportable(dtype: np.dtype[Any]) -> bool:
    """Says whether arrays of a type can lie in shared memory: all of ONNX's but strings."""
    return dtype in _CODES


def size_of(dtype: np.dtype[Any], shape: tuple[int, ...]) -> int:
    """Returns how many bytes a tensor has."""
    return math.prod(shape) * dtype.itemsize


def align(size: int) -> int:
    """Returns the next multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def measure_headers(ranks: Iterable[int]) -> int:
    """Returns how many bytes the headers of tensors of some ranks take, filled up to where data may begin."""
    return align(_TOP.size + sum(_FIXED.size + 8 * rank for rank in ranks))


def lay_out(tensors: Iterable[tuple[np.dtype[Any], tuple[int, ...]]]) -> tuple[list[TensorHeader], int]:
    """Returns where tensors of some types and shapes go in a block, and how many bytes that takes."""
    kinds = list(tensors)
    offset = measure_headers(len(shape) for _, shape in kinds)
    headers = []
    for position, (dtype, shape) in enumerate(kinds):
        size = size_of(dtype, shape)
        headers.append(TensorHeader(position, dtype, shape, HERE, offset, size))
        offset = align(offset + size)
    return headers, offset


def encode_headers(headers: Iterable[TensorHeader]) -> bytes:
    """Returns the bytes a block begins with."""
    parts = [b""]
    for position, dtype, shape, segment, offset, size in headers:
        fixed = _FIXED.pack(position, _ORDER_C, _CODES[dtype], len(shape), segment, offset, size)
        parts.append(fixed + struct.pack(f"<{len(shape)}Q", *shape))
    length = _TOP.size + sum(map(len, parts))
    parts[0] = _TOP.pack(_VERSION, len(parts) - 1, 0, length)
    return b"".join(parts)


def read_text(block: NDArray[np.uint8]) -> bytes:
    """Returns the bytes of a block's headers, without the mark that a worker has begun to read.

    Raises:
        PoolError: They are of another version, or run past the block.
    """
    if len(block) < _TOP.size:
        raise PoolError(f"unreadable tensor headers\n  got {len(block)} bytes")
    version, count, _, length = _TOP.unpack_from(block.data)
    if version != _VERSION or count > _MAX_TENSORS or not _TOP.size <= length <= len(block):
        raise PoolError(
            f"unreadable tensor headers\n  got version {version}, {count} tensors, {length} bytes"
        )
    text: bytes = block[:length].tobytes()
    return text if text[TAKEN_AT] == 0 else text[:TAKEN_AT] + b"\0" + text[TAKEN_AT + 1 :]


def decode_headers(text: bytes) -> tuple[TensorHeader, ...]:
    """Returns the headers that are written in bytes as `read_text` returns them.

    Raises:
        PoolError: They are cut short or contradict themselves.
    """
    try:
        _, count, _, _ = _TOP.unpack_from(text)
        headers, position = [], _TOP.size
        for _ in range(count):
            header, position = _decode(text, position)
            headers.append(header)
    except struct.error as error:
        raise PoolError(f"unreadable tensor headers\n  {error}") from error
    return tuple(headers)


def _decode(text: bytes, position: int) -> tuple[TensorHeader, int]:
    index, order, code, rank, segment, offset, size = _FIXED.unpack_from(text, position)
    dtype = _DTYPES.get(code)
    if order != _ORDER_C or dtype is None or rank > MAX_RANK:
        raise PoolError(f"unreadable tensor header\n  got order {order}, element type {code}, rank {rank}")
    shape = struct.unpack_from(f"<{rank}Q", text, position + _FIXED.size)
    if size_of(dtype, shape) != size or (size == 0 and math.prod(shape) != 0):
        raise PoolError(f"unreadable tensor header\n  got {size} bytes for {dtype} of shape {list(shape)}")
    if any(axis >= 2**62 for axis in shape):
        raise PoolError(f"unreadable tensor header\n  got shape {list(shape)}")
    return TensorHeader(index, dtype, shape, segment, offset, size), position + _FIXED.size + 8 * rank


class HeaderReader:
    """Reads headers, and remembers those it has read: batch after batch they are the same."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[TensorHeader, ...]] = {}

    def read(self, block: NDArray[np.uint8]) -> tuple[TensorHeader, ...]:
        """Returns the headers that a block begins with.

        Raises:
            PoolError: They are of another version, run past the block, or contradict themselves.
        """
        text = read_text(block)
        headers = self._known.get(text)
        if headers is None:
            headers = self.decode(text)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[text] = headers
        return headers

    def decode(self, text: bytes) -> tuple[TensorHeader, ...]:
        """Returns what `decode_headers` does; for more to be checked, once."""
        return decode_headers(text)
