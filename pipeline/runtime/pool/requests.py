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
    HERE,
    MAX_RANK,
    TensorHeader,
    align,
    encode_headers,
    is_transportable,
    measure_headers,
)
from pipeline.runtime.pool.wire import Span

_REMEMBERED = 1024
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
    if array.ndim > MAX_RANK:
        raise InvalidRequestError(
            f"input {name!r} of {signature.model} has too many axes\n"
            f"  expected at most {MAX_RANK}, got {array.ndim}"
        )
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


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the parts of a request go.

    Attributes:
        size: Bytes that headers and copied arrays take together.
        text: The headers.
        copies: Those of the arrays that are copied into the block.
    """

    size: int
    text: bytes
    copies: tuple[TensorHeader, ...]


class LayoutPlanner:
    """Decides what is copied and where to, and remembers it: batch after batch it is the same.

    Args:
        arena: Arrays that lie there stay where they are.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._known: dict[tuple[Any, ...], Layout] = {}

    def plan(self, arrays: list[Array], shapes: tuple[Any, ...]) -> Layout:
        """Returns where arrays go.

        Args:
            arrays: In the model's order.
            shapes: The model and their shapes.
        """
        places = [self._find(array) if array.nbytes >= IN_PLACE_BYTES else None for array in arrays]
        if any(places):
            return _plan(arrays, places)
        known = self._known.get(shapes)
        if known is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            known = self._known[shapes] = _plan(arrays, places)
        return known

    def _find(self, array: Array) -> Span | None:
        if not array.flags.c_contiguous or not array.flags.aligned or not array.dtype.isnative:
            return None
        return self._arena.find(array.__array_interface__["data"][0], array.nbytes)


def _plan(arrays: list[Array], places: list[Span | None]) -> Layout:
    offset = measure_headers(array.ndim for array in arrays)
    headers = []
    for position, (array, place) in enumerate(zip(arrays, places, strict=True)):
        segment, start = (HERE, offset) if place is None else (place.segment, place.offset)
        dtype = array.dtype.newbyteorder("=")
        headers.append(TensorHeader(position, dtype, array.shape, segment, start, array.nbytes))
        if place is None:
            offset = align(offset + array.nbytes)
    copies = tuple(header for header in headers if header.segment == HERE)
    return Layout(offset, encode_headers(headers), copies)


def write_request(layout: Layout, arrays: list[Array], block: Block) -> int:
    """Writes headers and arrays into a block and returns how many bytes of arrays were copied."""
    copied, begin = 0, block.span.offset
    for position, dtype, shape, _, offset, size in layout.copies:
        if size:
            view_tensor(block.part(begin + offset, size), dtype, shape)[...] = arrays[position]
            copied += size
    text = layout.text
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
