from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import PoolError
from pipeline.runtime.element_types import ELEMENT_TYPES
from pipeline.runtime.pool.tensor_headers import (
    ALIGNMENT,
    TensorHeader,
    decode_headers,
    encode_headers,
    is_transportable,
    measure_headers,
)

_DTYPES: list[np.dtype[Any]] = [
    *(np.dtype(name) for name in ("float16", "float32", "float64", "bool", "complex64", "complex128")),
    *(np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(kind.dtype for kind in ELEMENT_TYPES.values()),
]
_HEADERS = st.builds(
    TensorHeader,
    st.integers(0, 2**16 - 1),
    st.sampled_from(_DTYPES),
    st.lists(st.integers(0, 64), max_size=6).map(tuple),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**63),
)


@given(st.lists(_HEADERS, max_size=5), st.binary(max_size=32))
def test_what_is_written_is_read_whatever_follows(headers: list[TensorHeader], rest: bytes) -> None:
    data = encode_headers(headers)
    assert decode_headers(data + rest) == headers
    size = measure_headers([len(header.shape) for header in headers])
    assert len(data) <= size < len(data) + ALIGNMENT
    assert size % ALIGNMENT == 0


@given(st.lists(_HEADERS, min_size=1, max_size=3), st.integers(0, 10_000), st.integers(0, 255))
def test_a_changed_byte_is_an_error_or_a_header_that_agrees_with_itself(
    headers: list[TensorHeader], place: int, value: int
) -> None:
    data = bytearray(encode_headers(headers))
    data[place % len(data)] = value
    try:
        got = decode_headers(bytes(data))
    except PoolError:
        return
    for header in got:
        assert header.size_bytes == int(np.prod(header.shape, dtype=object)) * header.dtype.itemsize


@given(st.lists(_HEADERS, min_size=1, max_size=3), st.integers(0, 10_000))
def test_headers_that_are_cut_short_are_a_pool_error(headers: list[TensorHeader], place: int) -> None:
    data = encode_headers(headers)
    with pytest.raises(PoolError):
        decode_headers(data[: place % len(data)])


@pytest.mark.parametrize("dtype", ["U4", "S4", "O", "M8[s]", ">f4", "V3"])
def test_what_onnx_lacks_and_strings_are_not_transportable(dtype: str) -> None:
    assert not is_transportable(np.dtype(dtype))
