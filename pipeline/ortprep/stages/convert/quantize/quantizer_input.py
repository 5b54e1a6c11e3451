"""The copy of a model that ONNX Runtime's quantiser gets; for child processes.

It lies beside what is written; in it every node has a name, every large tensor is external and types are
known. Given a path, the quantiser holds one copy less than given a message, and nothing it serialises comes
near protobuf's 2 GiB. What it takes for temporary folders is put there too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx.version_converter
from onnx import TensorProto, helper

from ortprep.errors import StageError
from ortprep.stages.convert.weights import WeightWriter, move_weights, read_graph
from ortprep.stages.core.graphs.graph_walk import name_nodes, subgraphs, walk_graphs

PLAIN_DOMAINS = ("", "ai.onnx")
"""How models spell the domain of ONNX's own operators."""


@dataclass(frozen=True)
class QuantizerInput:
    """The source as the quantiser gets it.

    Attributes:
        path: Its file.
        model: The same without the values of large tensors.
        types: Element type by tensor name, of the main graph, where it is known.
        nodes: Names and operators of the source's nodes, subgraphs included, in topological order.
    """

    path: Path
    model: onnx.ModelProto
    types: dict[str, int]
    nodes: tuple[tuple[str, str], ...]


@contextmanager
def scratch_folder(written: Path) -> Iterator[Path]:
    """A temporary folder beside a file; libraries put their temporary files there too."""
    with tempfile.TemporaryDirectory(prefix="quantize-", dir=written.parent) as name:
        previous, tempfile.tempdir = tempfile.tempdir, name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = previous


def read_named_graph(source: Path) -> onnx.ModelProto:
    """Returns a model that has a name for every node, and refers to its large tensors.

    Raises:
        StageError: It is not an ONNX model.
        OSError: It cannot be read.
    """
    model = read_graph(source)
    for graph in walk_graphs(model):
        _forget_shapes_of_weights(graph)
    name_nodes(model)
    return model


def _forget_shapes_of_weights(graph: onnx.GraphProto) -> None:
    """Drops the value infos of weights, which PyTorch writes.

    The quantiser transposes the weight of a Gemm under its name and leaves the old shape standing, which
    shape inference then refuses.
    """
    held = {tensor.name for tensor in graph.initializer}
    values = [value for value in graph.value_info if value.name not in held]
    if len(values) < len(graph.value_info):
        # Copied before they are cleared: they belong to the field.
        described = onnx.GraphProto(value_info=values)
        graph.ClearField("value_info")
        graph.value_info.extend(described.value_info)


def unshare_weights(
    model: onnx.ModelProto, group: Callable[[onnx.NodeProto, int], Hashable]
) -> onnx.ModelProto:
    """Copies weights whose readers belong to different groups.

    The quantiser converts a weight once, for all that read it; so what suits one reader is done to others.

    Args:
        model: From `read_named_graph`, so that nothing large is copied; changed in place and returned.
        group: Of a node of the main graph and the index of one of its inputs.
    """
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    # What a subgraph reads has to keep its name.
    claimed = _names_read_below(model.graph) | {value.name for value in model.graph.output}
    owned: dict[tuple[str, Hashable], str] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name not in weights:
                continue
            key = (name, group(node, index))
            if key not in owned and name in claimed:
                own = model.graph.initializer.add()
                own.CopyFrom(weights[name])
                own.name = f"{name}_of_{node.name}"
                owned[key] = own.name
            claimed.add(name)
            node.input[index] = owned.setdefault(key, name)
    return model


def _names_read_below(graph: onnx.GraphProto) -> set[str]:
    below = [inner for node in graph.node for inner in subgraphs(node)]
    read = {name for inner in below for node in inner.node for name in node.input}
    read |= {value.name for inner in below for value in inner.output}
    return read.union(*map(_names_read_below, below))


def list_nodes(model: onnx.ModelProto) -> tuple[tuple[str, str], ...]:
    """Returns name and operator of every node, subgraphs included, in topological order."""
    return tuple((node.name, node.op_type) for graph in walk_graphs(model) for node in graph.node)


def stage_source(model: onnx.ModelProto, source: Path, folder: Path, *, opset: int) -> QuantizerInput:
    """Writes the copy that the quantiser gets.

    Raises:
        StageError: They are older, and onnx cannot convert them; or external data is missing.
        OSError: The disk is full.
    """
    nodes = list_nodes(model)
    path = folder / "staged.onnx"
    with WeightWriter(path) as weights:
        move_weights(model, source.parent, weights)
    onnx.save(_raise_opset(model, opset, source), path)
    onnx.shape_inference.infer_shapes_path(str(path), str(path))
    staged = onnx.load(path, load_external_data=False)
    types = _add_types(staged)
    onnx.save(staged, path)
    return QuantizerInput(path, staged, types, nodes)


def _raise_opset(model: onnx.ModelProto, opset: int, source: Path) -> onnx.ModelProto:
    """Returns the model with operators of a version at least; onnx converts it without its weights."""
    version = next((item.version for item in model.opset_import if item.domain in PLAIN_DOMAINS), opset)
    if version >= opset:
        return model
    try:
        converted: onnx.ModelProto = onnx.version_converter.convert_version(model, opset)
    except (RuntimeError, ValueError, onnx.version_converter.ConvertError) as error:
        raise StageError(
            f"opset too old to quantise: {source}\n  expected at least {opset}, got {version}, "
            f"which onnx cannot convert: {error}",
            hint=f"export the model with opset {opset:d} or later",
        ) from error
    name_nodes(converted)
    return converted


def _add_types(model: onnx.ModelProto) -> dict[str, int]:
    """Adds types that onnx cannot infer: those of contrib operators' outputs.

    The quantiser passes over a tensor whose type it does not find; but the operators worth quantising take
    and give the type of their weights.
    """
    graph = model.graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.value_info, *graph.input, *graph.output)
        if value.type.HasField("tensor_type")
    }
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm", "Conv", "Attention") or len(node.input) < 2:
            continue
        kind = types.get(node.input[1], TensorProto.UNDEFINED)
        for name in (node.input[0], node.output[0]):
            if kind and not types.get(name):
                graph.value_info.append(helper.make_tensor_value_info(name, kind, None))
                types[name] = kind
    return types
