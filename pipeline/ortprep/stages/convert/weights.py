"""Weights read and written one piece at a time, so that no pass holds a model with its weights.

`read_graph` gives a model in which every large tensor refers to a file: those with external data to theirs,
those with values inside to the place in the model file itself where their bytes are. `read_pieces` follows
such references, `WeightWriter` makes new ones. Bytes are as in ONNX's `raw_data`: little-endian, row-major.

For child processes: what is read and written are `onnx` messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo

from ortprep.bundle.onnx_wire import WireError, read_skeleton
from ortprep.errors import StageError
from ortprep.options import MIN_EXTERNAL_BYTES, PAGE_BYTES
from ortprep.stages.core.graphs.graph_walk import values_bytes, walk_graphs, walk_nodes

PIECE_BYTES = 16 * 1024 * 1024
"""Most bytes of a tensor that are in memory at a time; a multiple of every element's size."""

EXTERNAL_BYTES = 1024
"""Tensors from this size on go to the external file, as `onnx.save` and ONNX Runtime have it by default."""

_LINE_BYTES = 64

# Fields of a TensorProto whose bytes are laid out as `raw_data` is: float_data, raw_data and double_data.
_RAW_LAYOUT = frozenset({4, 9, 10})
_VALUE_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "raw_data")


def read_graph(path: Path) -> onnx.ModelProto:
    """Reads a model of any size; its large tensors refer to where their bytes are.

    Returns:
        The model; what it refers to is relative to the model's folder, and is the model file itself for
        values that were inside.

    Raises:
        StageError: The file is not an ONNX model.
        OSError: The file cannot be read.
    """

    def refer(number: int, offset: int, length: int) -> bytes | None:
        tensor = TensorProto()
        _point(tensor, path.name, offset, length)
        return tensor.SerializeToString() if number in _RAW_LAYOUT else None

    try:
        return onnx.ModelProto.FromString(read_skeleton(path, refer))
    except WireError as error:
        raise StageError(f"not an ONNX model: {path}\n  {error}") from error


def _point(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Makes a tensor refer to bytes of a file."""
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        tensor.external_data.add(key=key, value=value)


def read_pieces(tensor: TensorProto, folder: Path) -> Iterator[bytes]:
    """Yields a tensor's bytes, at most `PIECE_BYTES` at a time.

    Args:
        tensor: A tensor of a model that `read_graph` gave.
        folder: The model's folder.

    Raises:
        StageError: The tensor's file is missing or too short, or its length is not that of its dims.
    """
    if tensor.data_location != TensorProto.EXTERNAL:
        yield tensor.raw_data or numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
        return
    info, left = ExternalDataInfo(tensor), values_bytes(tensor)
    path = folder / info.location
    if not path.is_file() or info.length not in (None, left):
        got = f"a length of {info.length}" if path.is_file() else f"no file {path}"
        raise StageError(
            f"bad external data: tensor {tensor.name!r}\n  expected {left} bytes for its dims, got {got}"
        )
    with path.open("rb") as file:
        file.seek(info.offset or 0)
        while left:
            piece = file.read(min(left, PIECE_BYTES))
            if not piece:
                raise StageError(
                    f"external data ends early: tensor {tensor.name!r}\n"
                    f"  expected {left} more bytes in {path}"
                )
            left -= len(piece)
            yield piece


def read_bytes(tensor: TensorProto, folder: Path) -> bytes:
    """Returns all bytes of a tensor; raises as `read_pieces` does."""
    return b"".join(read_pieces(tensor, folder))


def read_array(tensor: TensorProto, folder: Path) -> NDArray[np.generic]:
    """Returns the values of a tensor whose type numpy has; raises as `read_pieces` does."""
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    return np.frombuffer(read_bytes(tensor, folder), dtype).reshape(tuple(tensor.dims))


class WeightWriter:
    """Writes tensors into one external data file beside a model.

    Offsets are multiples of 64 bytes, and of `PAGE_BYTES` for the tensors that a prepared graph has outside,
    too. Without a tensor that is large enough there is no file. To be used in a `with` statement.

    Args:
        model: The model file to be; the data file has its name and `.data`.
    """

    def __init__(self, model: Path) -> None:
        self._path = model.with_name(f"{model.name}.data")
        self._file = self._path.open("xb")

    def write(self, tensor: TensorProto, pieces: Iterable[bytes | memoryview]) -> None:
        """Writes a tensor's bytes to the file or, below `EXTERNAL_BYTES`, into the message.

        Args:
            tensor: Name, dims and element type are as they are to be; what it had for values is dropped.
            pieces: Its bytes.

        Raises:
            StageError: They are more or fewer than dims and element type make.
            OSError: The disk is full.
        """
        expected = values_bytes(tensor)
        # `pieces` may read from the tensor itself, so the tensor is changed last.
        if expected < EXTERNAL_BYTES:
            raw = b"".join(pieces)
            keep_inside(tensor, raw)
            length = len(raw)
        else:
            boundary = PAGE_BYTES if expected >= MIN_EXTERNAL_BYTES else _LINE_BYTES
            self._file.write(bytes(-self._file.tell() % boundary))
            offset = self._file.tell()
            length = sum(self._file.write(piece) for piece in pieces)
            _clear(tensor)
            _point(tensor, self._path.name, offset, length)
        if length != expected:
            raise StageError(
                f"tensor size does not match its dims: {tensor.name!r}\n"
                f"  expected {expected} bytes, got {length}"
            )

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        empty = self._file.tell() == 0
        self._file.close()
        if empty:
            self._path.unlink()


def write_array(name: str, array: NDArray[np.generic], weights: WeightWriter) -> TensorProto:
    """Returns a tensor of these values, external if they are large enough."""
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
    weights.write(tensor, (array.tobytes(),))
    return tensor


def move_weights(model: onnx.ModelProto, folder: Path, weights: WeightWriter) -> None:
    """Copies every large initializer into a data file, and every other external tensor into the model.

    `onnx.save` wants the whole model in memory before it writes the first byte.

    Raises:
        StageError: Data is missing, or of another size than its tensor.
        OSError: The disk is full.
    """
    for graph in walk_graphs(model):
        for tensor in graph.initializer:
            if values_bytes(tensor) >= EXTERNAL_BYTES or tensor.data_location == TensorProto.EXTERNAL:
                weights.write(tensor, read_pieces(tensor, folder))
    keep_others_inside(model, folder)


def keep_others_inside(model: onnx.ModelProto, folder: Path) -> None:
    """Moves external tensors of sparse initializers and attributes into the model."""
    tensors = [
        part
        for graph in walk_graphs(model)
        for sparse in graph.sparse_initializer
        for part in (sparse.values, sparse.indices)
    ]
    for node in walk_nodes(model):
        for attribute in node.attribute:
            tensors += (attribute.t, *attribute.tensors)
    for tensor in tensors:
        if tensor.data_location == TensorProto.EXTERNAL:
            keep_inside(tensor, read_bytes(tensor, folder))


def keep_inside(tensor: TensorProto, raw: bytes) -> None:
    """Gives a tensor its bytes in the message, whatever its size."""
    _clear(tensor)
    tensor.raw_data = raw


def _clear(tensor: TensorProto) -> None:
    for field in (*_VALUE_FIELDS, "external_data", "data_location"):
        tensor.ClearField(field)
