"""Weights read and written one piece at a time, so that no pass holds a model with its weights.

`read_graph` gives a model in which every large tensor refers to a file: those with external data to theirs,
those with values inside to the place in the model file itself where their bytes are. `read_pieces` follows
such references, `write_tensor` makes new ones. Bytes are as in ONNX's `raw_data`: little-endian, row-major.

For child processes: what is read and written are `onnx` messages.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import onnx
import onnx.version_converter
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import ExternalDataInfo

from ortprep.bundle.onnx_wire import read_skeleton
from ortprep.errors import StageError, require_known
from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.core.graph_walk import name_nodes, values_bytes, walk_graphs, walk_nodes

PIECE_BYTES = 16 * 1024 * 1024
"""Most bytes of a tensor that are in memory at a time; a multiple of every element's size."""

EXTERNAL_BYTES = 1024
"""Tensors from this size on go to the external file, as `onnx.save` and ONNX Runtime have it by default."""

_LINE_BYTES = 64

_LISTED_INITIALIZERS_BEFORE_IR = 4

# Fields of a TensorProto whose bytes are laid out as `raw_data` is: float_data, raw_data and double_data.
_RAW_LAYOUT = frozenset({4, 9, 10})


def read_graph(path: Path) -> onnx.ModelProto:
    """Reads a model of any size; its large tensors refer to where their bytes are.

    Returns:
        The model, whose inputs are real ones only. What it refers to is relative to its folder, and is the
        model file itself for values that were inside.

    Raises:
        ValueError: The file is not an ONNX model.
        StageError: Callers may give values for its weights.
        OSError: The file cannot be read.
    """

    def refer(number: int, offset: int, length: int) -> bytes | None:
        tensor = TensorProto()
        _point(tensor, path.name, offset, length)
        return tensor.SerializeToString() if number in _RAW_LAYOUT else None

    model = onnx.ModelProto.FromString(read_skeleton(path, refer))
    keep_real_inputs(model)
    return model


def _point(tensor: TensorProto, location: str, offset: int, length: int) -> None:
    """Makes a tensor refer to bytes of a file."""
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))


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
    offset = info.offset or 0
    size = path.stat().st_size if path.is_file() else 0
    if info.length not in (None, left) or size < offset + left:
        raise StageError(
            f"bad external data: tensor {tensor.name!r}\n  expected {left} bytes for its dims, "
            f"got {max(size - offset, 0)} in {path} and a length of {info.length}"
        )
    with path.open("rb") as file:
        file.seek(offset)
        while left:
            yield file.read(min(left, PIECE_BYTES))
            left -= min(left, PIECE_BYTES)


def write_tensor(tensor: TensorProto, pieces: Iterable[bytes | memoryview], written: Path) -> None:
    """Writes a tensor's bytes to the data file of a model or, below `EXTERNAL_BYTES`, into the message.

    Offsets are multiples of 64 bytes. Without a tensor that is large enough there is no file.

    Args:
        tensor: Name, dims and element type are as they are to be; what it had for values is dropped.
        pieces: Its bytes, as many as its dims and element type make.
        written: The model file to be; the data file has its name and `.data`, and grows by every call.

    Raises:
        OSError: The disk is full.
    """
    size_bytes, data = values_bytes(tensor), written.with_name(f"{written.name}.data")
    # `pieces` may read from the tensor itself, so the tensor is changed last.
    if size_bytes < EXTERNAL_BYTES:
        _store(tensor, b"".join(pieces))
        return
    with data.open("ab") as file:
        file.write(bytes(-file.tell() % _LINE_BYTES))
        offset = file.tell()
        file.writelines(pieces)
    _store(tensor)
    _point(tensor, data.name, offset, size_bytes)


def move_weights(model: onnx.ModelProto, folder: Path, written: Path) -> None:
    """Copies every large initializer into a data file, and every other external tensor into the model.

    `onnx.save` wants the whole model in memory before it writes the first byte.

    Args:
        model: The model; its external tensors are in files of `folder`.
        folder: The folder of the model that it was made of.
        written: The model file to be.

    Raises:
        StageError: Data is missing, or of another size than its tensor.
        OSError: The disk is full.
    """
    others = [
        tensor for node in walk_nodes(model) for each in node.attribute for tensor in (each.t, *each.tensors)
    ]
    for graph in walk_graphs(model):
        for sparse in graph.sparse_initializer:
            others += (sparse.values, sparse.indices)
        for tensor in graph.initializer:
            if values_bytes(tensor) >= EXTERNAL_BYTES or tensor.data_location == TensorProto.EXTERNAL:
                write_tensor(tensor, read_pieces(tensor, folder), written)
    for tensor in others:
        if tensor.data_location == TensorProto.EXTERNAL:
            _store(tensor, b"".join(read_pieces(tensor, folder)))


def keep_real_inputs(model: onnx.ModelProto) -> None:
    """Removes inputs that initializers fill, so that the interface lists real inputs only.

    Raises:
        StageError: Callers may give values for them: no pass converts what is no constant.
    """
    filled = {tensor.name for tensor in model.graph.initializer}
    listed = [value for value in model.graph.input if value.name in filled]
    if listed and model.ir_version >= _LISTED_INITIALIZERS_BEFORE_IR:
        raise StageError(
            f"initializers that callers may override: {', '.join(value.name for value in listed[:5])}\n"
            f"  expected constants only, got {len(listed)} that are inputs as well",
            hint="python -m onnxruntime.tools.remove_initializer_from_input --input MODEL --output NEW   "
            "(if nobody overrides them)",
        )
    model.ir_version = max(model.ir_version, _LISTED_INITIALIZERS_BEFORE_IR)
    for value in listed:
        model.graph.input.remove(value)


def _store(tensor: TensorProto, raw: bytes | None = None) -> None:
    """Removes the values or the reference of a tensor, and gives it bytes in the message, if any."""
    tensor.CopyFrom(TensorProto(name=tensor.name, dims=tensor.dims, data_type=tensor.data_type, raw_data=raw))


CONTRIB = "com.microsoft"
PLAIN_DOMAINS = ("", "ai.onnx")
"""How models spell the domain of ONNX's own operators."""


def read_checked_graph(
    request: PassRequest, supported: Collection[str]
) -> tuple[onnx.ModelProto, list[tuple[str, str]]]:
    """Reads a model whose nodes then have names, and whose large tensors refer to files.

    Args:
        request: What is asked for: operators and nodes that it names must exist.
        supported: Operator types that the pass can quantise.

    Returns:
        The model, and name and operator of every node, subgraphs included, in topological order.

    Raises:
        SpecError: A node or an operator type is unknown; the nearest name is suggested.
        ValueError: The source is not an ONNX model.
    """
    for operator in request.quantize.operators:
        require_known("operator to quantise", operator, sorted(supported))
    model = read_graph(request.source)
    name_nodes(model)
    for graph in walk_graphs(model):
        # PyTorch writes shapes of weights. The quantiser transposes the weight of a Gemm under its name and
        # leaves the old shape standing, which shape inference then refuses.
        held = {tensor.name for tensor in graph.initializer}
        for value in [value for value in graph.value_info if value.name in held]:
            graph.value_info.remove(value)
    nodes = [(node.name, node.op_type) for graph in walk_graphs(model) for node in graph.node]
    for name in request.keep_nodes:
        require_known("node to keep", name, [name for name, _ in nodes])
    return model, nodes


def is_plain_gemm(node: onnx.NodeProto) -> bool:
    """Whether a Gemm equals a MatMul, by a weight that may be transposed, and an Add."""
    factors = (read_attribute(node, name, 1.0) for name in ("alpha", "beta"))
    return all(factor == 1.0 for factor in factors) and not read_attribute(node, "transA", 0)


def read_attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    """Returns a number that a node has as attribute, or the default."""
    values = [helper.get_attribute_value(item) for item in node.attribute if item.name == name]
    return values[0] if values else default


def describe_result(
    nodes: Sequence[tuple[str, str]], *, operators: Collection[str], quantized: Collection[str]
) -> PassReply:
    """Returns the reply of a pass, given the name and operator of every node of the source."""
    converted = tuple(name for name, _ in nodes if name in quantized)
    kept = tuple(name for name, operator in nodes if operator in operators and name not in quantized)
    return PassReply(nodes=len(converted) + len(kept), converted=converted, kept=kept)
