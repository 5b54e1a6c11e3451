"""From what a caller hands over to what goes into shared memory: names, types and layout, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.bundle.loader_config import LoaderConfig, TensorSpec
from pipeline.errors import InvalidRequestError, PipelineError, PoolError
from pipeline.runtime.element_types import Array, ElementType, find_element_type, numpy_dtype
from pipeline.runtime.pool.arena import Arena, Block
from pipeline.runtime.pool.segments import view_tensor
from pipeline.runtime.pool.tensor_headers import (
    TensorHeader,
    align,
    encode_headers,
    is_transportable,
    measure_headers,
)
from pipeline.runtime.pool.wire import Span

IN_PLACE_BYTES = 16 * 1024
"""Smaller arrays are copied even where they lie in shared memory already; looking costs as much."""


@dataclass(frozen=True)
class Signature:
    """What a model takes and gives.

    Attributes:
        model: Its name in the pool.
        inputs: Types by name, in the model's order.
        outputs: Likewise.
    """

    model: str
    inputs: Mapping[str, np.dtype[Any]]
    outputs: Mapping[str, np.dtype[Any]]


def read_signature(model: str, config: LoaderConfig) -> Signature:
    """Returns what a bundle's model takes and gives.

    Raises:
        PoolError: An input or output is no tensor of a type that can lie in shared memory.
    """
    inputs = {tensor.name: _dtype_of(model, tensor, "input") for tensor in config.inputs}
    outputs = {tensor.name: _dtype_of(model, tensor, "output") for tensor in config.outputs}
    return Signature(model, inputs, outputs)


def _dtype_of(model: str, tensor: TensorSpec, role: str) -> np.dtype[Any]:
    try:
        dtype = numpy_dtype(tensor.dtype)
    except PipelineError as error:
        raise _untransportable(model, tensor, role) from error
    if not is_transportable(dtype):
        raise _untransportable(model, tensor, role)
    return dtype


def _untransportable(model: str, tensor: TensorSpec, role: str) -> PoolError:
    return PoolError(
        f"{role} {tensor.name!r} of {model} cannot go through shared memory\n"
        f"  expected a tensor of numbers or booleans, got {tensor.dtype}",
        hint="pipeline.runtime.load() gives a session that takes it",
    )


def check_inputs(signature: Signature, inputs: Mapping[str, Any]) -> list[Array]:
    """Returns a caller's arrays in the model's order, as arrays of the model's types.

    Byte order aside nothing is converted: an array of another type is an error, as it is in ONNX Runtime.

    Raises:
        InvalidRequestError: An input is missing, unknown, or of another type.
    """
    if inputs.keys() != signature.inputs.keys():
        raise _wrong_names(signature, inputs)
    return [_check_array(signature, name, dtype, inputs[name]) for name, dtype in signature.inputs.items()]


def _wrong_names(signature: Signature, inputs: Mapping[str, Any]) -> InvalidRequestError:
    missing = [name for name in signature.inputs if name not in inputs]
    unknown = [str(name) for name in inputs if name not in signature.inputs]
    got = "; ".join(
        text
        for text in (
            f"missing {', '.join(missing)}" if missing else "",
            f"unknown {', '.join(unknown)}" if unknown else "",
        )
        if text
    )
    return InvalidRequestError(
        f"wrong inputs for {signature.model}\n  expected {', '.join(signature.inputs) or 'none'}, got {got}"
    )


def _check_array(signature: Signature, name: str, dtype: np.dtype[Any], value: Any) -> Array:
    array = value if type(value) is np.ndarray else _as_array(signature, name, value)
    if array.dtype == dtype:
        return array
    kind = find_element_type(dtype.names[0]) if dtype.names else None
    bits = None if kind is None else _as_bits(array, kind)
    if bits is not None:
        return bits
    if array.dtype.newbyteorder("=") == dtype:
        return array  # the copy into shared memory turns the bytes
    raise InvalidRequestError(
        f"input {name!r} of {signature.model} is of another type\n"
        f"  expected {dtype.names[0] if dtype.names else dtype}, got {array.dtype}",
        hint=None if dtype.names else f"inputs[{name!r}].astype({dtype.name!r})",
    )


def _as_array(signature: Signature, name: str, value: Any) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InvalidRequestError(f"input {name!r} of {signature.model} is no array\n  {error}") from error


def _as_bits(array: Array, kind: ElementType) -> Array | None:
    """Returns an array of a type that numpy got from elsewhere (`ml_dtypes`) as this package has it."""
    name = array.dtype.name
    # `ml_dtypes` calls float4e2m1 float4_e2m1fn.
    found = find_element_type(name) or find_element_type(name.removesuffix("fn"))
    is_same = found == kind and array.dtype.itemsize == kind.dtype.itemsize
    return np.ascontiguousarray(array).view(kind.dtype).reshape(array.shape) if is_same else None


@dataclass(slots=True)
class Layout:
    """Where the parts of a request go.

    Attributes:
        size: Bytes that headers and copied arrays take together.
        headers: Of the arrays; offsets of those to be copied count from the block's begin.
        copies: Positions of the arrays to be copied.
    """

    size: int
    headers: list[TensorHeader]
    copies: list[int]


def plan_layout(arrays: list[Array], arena: Arena) -> Layout:
    """Decides which arrays are copied, and where to; those in the arena stay where they are."""
    position = measure_headers([array.ndim for array in arrays])
    headers, copies = [], []
    for index, array in enumerate(arrays):
        place = _place_of(array, arena) if array.nbytes >= IN_PLACE_BYTES else None
        if place is None:
            headers.append(TensorHeader(index, array.dtype, array.shape, 0, position))
            copies.append(index)
            position = align(position + array.nbytes)
        else:
            headers.append(TensorHeader(index, array.dtype, array.shape, place.segment, place.offset))
    return Layout(position, headers, copies)


def _place_of(array: Array, arena: Arena) -> Span | None:
    if not array.flags.c_contiguous or not array.flags.aligned or not array.dtype.isnative:
        return None
    return arena.find(array.__array_interface__["data"][0], array.nbytes)


def write_request(layout: Layout, arrays: list[Array], block: Block) -> int:
    """Writes headers and arrays into a block and returns how many bytes of arrays were copied."""
    copied, headers, (segment, begin, _) = 0, layout.headers, block.span
    for index in layout.copies:
        array, (_, dtype, shape, _, offset) = arrays[index], headers[index]
        native = dtype.newbyteorder("=")
        headers[index] = TensorHeader(index, native, shape, segment, begin + offset)
        if array.nbytes:
            view_tensor(block.part(begin + offset, array.nbytes), native, shape)[...] = array
            copied += array.nbytes
    text = encode_headers(headers)
    block.part(begin, len(text))[:] = np.frombuffer(text, np.uint8)
    return copied


def iterate_parts(count: int, parts: int) -> Iterator[slice]:
    """Yields slices that cut a batch of `count` into at most `parts` of nearly equal size, none empty."""
    parts = max(1, min(parts, count))
    small, rest = divmod(count, parts)
    begin = 0
    for index in range(parts):
        end = begin + small + (index < rest)
        yield slice(begin, end)
        begin = end
