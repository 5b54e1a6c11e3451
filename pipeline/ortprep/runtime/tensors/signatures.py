"""What models take and give, and whether a caller's arrays are that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from ortprep.bundle.loader_config import MAX_RANK, LoaderConfig, TensorSpec
from ortprep.errors import InvalidRequestError, PipelineError, PoolError
from ortprep.runtime.tensors.element_types import (
    BFLOAT16,
    MAX_EMPTY_ELEMENTS,
    Array,
    is_bounded_shape,
    is_valid_bool,
    numpy_dtype,
)

_TRANSPORTABLE = frozenset({*map(np.dtype, "?bBhHiIqQefdFD"), BFLOAT16})
"""Types of tensors that can lie in shared memory: all of ONNX's but strings."""


@dataclass(frozen=True)
class Signature:
    """What a model takes and gives.

    Attributes:
        inputs: Types by name, in the model's order.
        outputs: Types by name, in the model's order.
    """

    model: str
    inputs: Mapping[str, np.dtype[Any]]
    outputs: Mapping[str, np.dtype[Any]]


def read_signature(model: str, config: LoaderConfig) -> Signature:
    """Returns what a bundle's model takes and gives.

    Raises:
        PoolError: An input or output is no tensor of numbers or booleans.
    """
    inputs, outputs = _find_dtypes(config.inputs), _find_dtypes(config.outputs)
    if (len(inputs), len(outputs)) != (len(config.inputs), len(config.outputs)):
        types = ", ".join(f"{tensor.name}: {tensor.dtype}" for tensor in (*config.inputs, *config.outputs))
        raise PoolError(
            f"{model} cannot be served\n  expected tensors of numbers or booleans, got {types}",
            hint="ortprep.runtime.load() gives a session that takes them",
        )
    return Signature(model, inputs, outputs)


def _find_dtypes(tensors: Iterable[TensorSpec]) -> dict[str, np.dtype[Any]]:
    """Returns the types of tensors by name, but for those that cannot lie in shared memory."""
    dtypes = {}
    for tensor in tensors:
        with suppress(PipelineError):
            dtype = numpy_dtype(tensor.dtype)
            if dtype in _TRANSPORTABLE:
                dtypes[tensor.name] = dtype
    return dtypes


def check_inputs(signature: Signature, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Returns a caller's arrays by name in the model's order, as arrays of the model's types.

    Byte order aside nothing is converted: an array of another type is an error, as it is in ONNX Runtime.

    Raises:
        InvalidRequestError: An input is missing, unknown, of another type, or empty with huge sizes.
    """
    if inputs.keys() != signature.inputs.keys():
        expected, got = (", ".join(map(str, names)) or "none" for names in (signature.inputs, inputs))
        raise InvalidRequestError(f"wrong inputs for {signature.model}\n  expected {expected}, got {got}")
    return {
        name: _check_array(signature, name, dtype, inputs[name]) for name, dtype in signature.inputs.items()
    }


def _check_array(signature: Signature, name: str, dtype: np.dtype[Any], value: Any) -> Array:
    """Returns an input as an array of the model's type; raises `InvalidRequestError` for another."""
    array = value if type(value) is np.ndarray else _as_array(signature, name, value)
    if array.ndim > MAX_RANK:
        raise InvalidRequestError(
            f"input {name!r} of {signature.model} has too many axes\n"
            f"  expected at most {MAX_RANK}, got {array.ndim}"
        )
    if not is_bounded_shape(array.shape):
        raise InvalidRequestError(
            f"input {name!r} of {signature.model} is empty and too large\n  expected sizes beside the 0 "
            f"of at most {MAX_EMPTY_ELEMENTS} together, got {list(array.shape)}"
        )
    if array.dtype == dtype:
        if dtype == np.bool_ and not is_valid_bool(array):
            raise InvalidRequestError(
                f"input {name!r} of {signature.model} has bytes that are no booleans\n  expected 0 or 1"
            )
        return array
    if dtype == BFLOAT16 and array.dtype.name == "bfloat16" and array.dtype.itemsize == dtype.itemsize:
        return np.ascontiguousarray(array).view(dtype).reshape(array.shape)  # `ml_dtypes` has such arrays
    if array.dtype.newbyteorder("=") == dtype:
        return array.astype(dtype)  # ONNX Runtime would take the bytes for those of this machine
    raise InvalidRequestError(
        f"input {name!r} of {signature.model} has the wrong type\n"
        f"  expected {dtype.names[0] if dtype.names else dtype}, got {array.dtype}",
        hint=None if dtype.names else f"inputs[{name!r}].astype({dtype.name!r})",
    )


def _as_array(signature: Signature, name: str, value: Any) -> Array:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise InvalidRequestError(
            f"input {name!r} of {signature.model} is not an array\n  {error}"
        ) from error
