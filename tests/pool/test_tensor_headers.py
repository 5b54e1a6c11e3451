from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.errors import PoolError
from pipeline.runtime.element_types import ELEMENT_TYPES
from pipeline.runtime.pool.tensor_headers import (
    ALIGNMENT,
    TAKEN_AT,
    HeaderReader,
    TensorHeader,
    decode_headers,
    encode_headers,
    is_transportable,
    lay_out,
    measure_headers,
    size_of,
)

_DTYPES: list[np.dtype[Any]] = [
    *(np.dtype(name) for name in ("float16", "float32", "float64", "bool", "complex64", "complex128")),
    *(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(kind.dtype for kind in ELEMENT_TYPES.values()),
]
_KINDS = st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 64), max_size=6).map(tuple))
_HEADERS = st.builds(
    lambda position, kind, segment, offset: TensorHeader(position, *kind, segment, offset, size_of(*kind)),  # type: ignore[call-arg]
    st.integers(0, 2**16 - 1),
    _KINDS,
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**63),
)


def as_block(data: bytes) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray(data), np.uint8)


@given(st.lists(_HEADERS, max_size=5), st.binary(max_size=32), st.booleans())
def test_what_is_written_is_read_whatever_follows(
    headers: list[TensorHeader], rest: bytes, is_taken: bool
) -> None:
    data = encode_headers(headers)
    block = as_block(data + rest)
    block[TAKEN_AT] = is_taken
    reader = HeaderReader()
    assert list(reader.read(block)) == headers
    assert reader.read(block) is reader.read(as_block(data))
    size = measure_headers(len(header.shape) for header in headers)
    assert len(data) <= size < len(data) + ALIGNMENT
    assert size % ALIGNMENT == 0


@given(st.lists(_KINDS, max_size=5))
def test_tensors_are_laid_out_one_after_the_other(
    kinds: list[tuple[np.dtype[Any], tuple[int, ...]]],
) -> None:
    headers, size = lay_out(kinds)
    assert [(header.dtype, header.shape) for header in headers] == kinds
    end = len(encode_headers(headers))
    for header in headers:
        assert header.offset >= end
        assert header.offset % ALIGNMENT == 0
        end = header.offset + header.size
    assert end <= size


@given(st.lists(_HEADERS, min_size=1, max_size=3), st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_a_header_that_agrees_with_itself(
    headers: list[TensorHeader], place: int, value: int
) -> None:
    data = bytearray(encode_headers(headers))
    data[place % len(data)] = value
    try:
        got = HeaderReader().read(as_block(bytes(data)))
    except PoolError:
        return
    for header in got:
        assert header.size == int(np.prod(header.shape, dtype=object)) * header.dtype.itemsize


@given(st.lists(_HEADERS, min_size=1, max_size=3), st.integers(0, 10_000))
def test_headers_that_are_cut_short_are_a_pool_error(headers: list[TensorHeader], place: int) -> None:
    data = encode_headers(headers)
    with pytest.raises(PoolError):
        HeaderReader().read(as_block(data[: place % len(data)]))


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (0, 2**63)])
def test_a_shape_that_no_array_can_have_is_a_pool_error(shape: tuple[int, ...]) -> None:
    header = TensorHeader(0, np.dtype(np.float32), shape, 0, 64, 0)
    with pytest.raises(PoolError):
        decode_headers(encode_headers([header]))


@pytest.mark.parametrize("dtype", ["U4", "S4", "O", "M8[s]", ">f4", "V3"])
def test_what_onnx_lacks_and_strings_are_not_transportable(dtype: str) -> None:
    assert not is_transportable(np.dtype(dtype))
