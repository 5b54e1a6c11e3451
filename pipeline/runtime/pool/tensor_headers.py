"""How tensors lie in shared memory: a block begins with a header for each, which says where its data is.

    version, count, whether a worker has begun to read                   once
    position, order, element type, rank, segment, offset, size, shape   per tensor

Data begins on multiples of 64 bytes, in the order of C, native endianness; types that numpy lacks as
`pipeline.runtime.element_types` has them. A header is believed only as far as it agrees with itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from pipeline.errors import PoolError
from pipeline.runtime.element_types import ELEMENT_TYPES, element_type_of

ALIGNMENT = 64
TAKEN_AT = 4
"""The byte of a block that a worker sets when it begins with the request."""

_VERSION = 1
_ORDER_C = ord("C")
_MAX_TENSORS, _MAX_RANK = 4096, 32
_TOP = struct.Struct("<HH4x")
_FIXED = struct.Struct("<HBxHHIQQ")

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
        segment: Number of the segment its data is in.
        offset: First byte of the data in the segment.
    """

    position: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    segment: int
    offset: int

    @property
    def size_bytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) * self.dtype.itemsize


def is_transportable(dtype: np.dtype[Any]) -> bool:
    """Says whether arrays of a type can lie in shared memory: all of ONNX's but strings."""
    return dtype in _CODES


def code_of(dtype: np.dtype[Any]) -> int:
    """Returns the number of a type in `onnx.TensorProto.DataType`."""
    kind = element_type_of(dtype)
    return _CODES[dtype] if kind is None else kind.code


def align(size: int) -> int:
    """Returns the next multiple of 64."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def measure_headers(ranks: Iterable[int]) -> int:
    """Returns how many bytes the headers of tensors of some ranks take, filled up to where data may begin."""
    return align(_TOP.size + sum(_FIXED.size + 8 * rank for rank in ranks))


def encode_headers(headers: Iterable[TensorHeader]) -> bytes:
    """Returns the bytes a block begins with."""
    parts = [b""]
    for position, dtype, shape, segment, offset in headers:
        size = math.prod(shape) * dtype.itemsize
        fixed = _FIXED.pack(position, _ORDER_C, _CODES[dtype], len(shape), segment, offset, size)
        parts.append(fixed + struct.pack(f"<{len(shape)}Q", *shape))
    parts[0] = _TOP.pack(_VERSION, len(parts) - 1)
    return b"".join(parts)


def decode_headers(data: memoryview | bytes) -> list[TensorHeader]:
    """Returns the headers that a block begins with.

    Args:
        data: The block, which may be longer.

    Raises:
        PoolError: The headers are of another version, run past the block, or contradict themselves.
    """
    try:
        version, count = _TOP.unpack_from(data, 0)
        if version != _VERSION or count > _MAX_TENSORS:
            raise PoolError(f"unreadable tensor headers\n  got version {version}, {count} tensors")
        headers, position = [], _TOP.size
        for _ in range(count):
            header, position = _decode(data, position)
            headers.append(header)
    except struct.error as error:
        raise PoolError(f"unreadable tensor headers\n  {error}") from error
    return headers


def _decode(data: memoryview | bytes, position: int) -> tuple[TensorHeader, int]:
    index, order, code, rank, segment, offset, size = _FIXED.unpack_from(data, position)
    dtype = _DTYPES.get(code)
    if order != _ORDER_C or dtype is None or rank > _MAX_RANK:
        raise PoolError(f"unreadable tensor header\n  got order {order}, element type {code}, rank {rank}")
    shape = struct.unpack_from(f"<{rank}Q", data, position + _FIXED.size)
    header = TensorHeader(index, dtype, shape, segment, offset)
    if header.size_bytes != size:
        raise PoolError(f"unreadable tensor header\n  got {size} bytes for {dtype} of shape {list(shape)}")
    return header, position + _FIXED.size + 8 * rank
