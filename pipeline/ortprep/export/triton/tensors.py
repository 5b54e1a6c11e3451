"""Inputs and outputs as Triton's model configuration has them, and arrays as its warm-up reads them."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ortprep.bundle.loader_config import TensorSpec
from ortprep.errors import ExportError
from ortprep.runtime.tensors.element_types import Array, element_type_of

TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "string": "TYPE_STRING",
    "bfloat16": "TYPE_BF16",
}
"""Triton's data types that the backend takes, by ONNX element type."""


@dataclass(frozen=True)
class TritonTensor:
    """An input or output.

    Attributes:
        name: In the graph.
        data_type: Name of a `DataType` of Triton.
        dims: Sizes, -1 for what varies, without the batch if there is one.
        scalar: Whether `dims` stands for no axis at all beside the batch.
    """

    name: str
    data_type: str
    dims: tuple[int, ...]
    scalar: bool = False


@dataclass(frozen=True)
class WarmUpInput:
    """An input of the warm-up request: `data` is the content of its `file` in the folder `warmup`."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    file: str
    data: bytes


@dataclass(frozen=True)
class WarmUp:
    """A request every instance runs before it serves, `batch_size` times as one batch."""

    batch_size: int
    inputs: tuple[WarmUpInput, ...]


def describe_tensor(spec: TensorSpec, *, batched: bool) -> TritonTensor:
    """Returns a tensor as the configuration has it.

    A scalar of a model without batches has the dims [1] and no reshape, which the server would refuse.

    Raises:
        ExportError: Triton has no such type, rank or size.
    """
    data_type = TYPES.get(spec.dtype)
    if data_type is None:
        raise _unfit(spec, f"a tensor of {', '.join(TYPES)}", spec.dtype)
    if spec.shape is None:
        raise _unfit(spec, "a known number of axes", "none")
    sizes = tuple(size if isinstance(size, int) else -1 for size in spec.shape)
    if batched:
        if not sizes or sizes[0] != -1:
            raise _unfit(spec, "a first axis of any size, for --max-batch-size", f"sizes {list(sizes)}")
        sizes = sizes[1:]
    if any(size < 1 and size != -1 for size in sizes):
        raise _unfit(spec, "sizes of 1 and more", f"{list(sizes)}")
    return TritonTensor(spec.name, data_type, sizes or (1,), scalar=not sizes)


def plan_warm_up(
    tensors: Sequence[TritonTensor], feeds: Mapping[str, Array], *, max_batch_size: int
) -> WarmUp | str:
    """Returns the warm-up request that a golden sample makes, or why it makes none.

    Args:
        tensors: The model's inputs.
        feeds: The sample's arrays by input, as the session takes them.
        max_batch_size: 0 for a model without batches. Otherwise the sample's first row is repeated as often
            as it has rows, since Triton builds a batch of equal requests.
    """
    absent = [one.name for one in tensors if one.name not in feeds]
    if absent:
        return f"the golden sample has no {', '.join(absent)}"
    arrays = [feeds[one.name] for one in tensors]
    if any(array.size == 0 for array in arrays):
        return "an input of the golden sample is empty, which Triton's warm-up does not take"
    rows = {len(array) for array in arrays} if max_batch_size else {1}
    if len(rows) != 1:
        return "the inputs of the golden sample are not of one batch size"
    if max_batch_size:
        arrays = [array[0] for array in arrays]
    inputs = tuple(
        WarmUpInput(
            one.name, one.data_type, tuple(array.shape) or (1,), f"input-{number}", encode_tensor(array)
        )
        for number, (one, array) in enumerate(zip(tensors, arrays, strict=True))
    )
    return WarmUp(min(rows.pop(), max(max_batch_size, 1)), inputs)


def encode_tensor(array: Array) -> bytes:
    """Returns an array as Triton reads it from a file: elements in row-major order, little-endian.

    A string is its length in four bytes and then its UTF-8.
    """
    array = np.asarray(array)
    if array.dtype.kind in "UO":
        texts = [str(item).encode() for item in array.reshape(-1)]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    kind = element_type_of(array.dtype)
    bits = array if kind is None else array[kind.name]
    return bits.astype(bits.dtype.newbyteorder("<"), copy=False).tobytes("C")


def _unfit(spec: TensorSpec, expected: str, got: str) -> ExportError:
    return ExportError(f"Triton cannot serve tensor {spec.name!r}\n  expected {expected}, got {got}")
