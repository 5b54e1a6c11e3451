"""A description of a model, read without its weights and without a session.

`inspect_model` runs in a child process; `inspect_file` starts it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.onnx_inputs import dimension_name
from ortprep.bundle.onnx_wire import WireError, read_skeleton
from ortprep.children.child import run_child
from ortprep.errors import SourceError
from ortprep.stages.core.results import ModelInterface

if TYPE_CHECKING:
    import onnx

MAX_INLINE_BYTES = 2**31 - 1
"""Largest model file that protobuf reads; larger models keep their weights in external data."""


@dataclass(frozen=True)
class Inspection:
    """A description of a model file.

    Attributes:
        interface: Inputs, outputs and index bounds.
        opsets: Opset version by domain ("" is ai.onnx).
        ir_version: ONNX IR version.
        operators: Number of nodes by operator type (`domain.Type` outside ai.onnx), subgraphs and functions
            included.
        initializer_bytes: Size of all weights, external ones included.
        external: Bytes that each external data file has to have at least, by its location.
    """

    interface: ModelInterface
    opsets: Mapping[str, int]
    ir_version: int
    operators: Mapping[str, int]
    initializer_bytes: int
    external: Mapping[str, int]


def inspect_file(model: Path, *, name: str, timeout_s: float | None = None) -> Inspection:
    """Reads a model file in a child process; its external data need not be there.

    Raises:
        SourceError: It is not an ONNX model.
    """
    return run_child(inspect_model, (str(model), name), timeout_s=timeout_s).value


def inspect_model(request: tuple[str, str]) -> Inspection:
    """Child function of `inspect_file`, which has its errors: the file, and what messages call it."""
    path, name = request
    size_bytes = Path(path).stat().st_size
    if size_bytes > MAX_INLINE_BYTES:
        raise SourceError(
            f"model file too large: {name}\n  expected under 2 GiB, got {size_bytes} bytes",
            hint="save it with external data: onnx.save(model, path, save_as_external_data=True)",
        )
    try:
        return describe_model(parse_skeleton(Path(path)))
    except (WireError, ValueError) as error:
        raise SourceError(
            f"not an ONNX model, or an incomplete one: {name}\n  expected a complete ONNX file, got: {error}",
            hint="export or download the model again",
        ) from error


def parse_skeleton(path: Path) -> onnx.ModelProto:
    """Parses a model without the values of its large tensors; for child processes.

    Raises:
        ValueError: It is not an ONNX model.
        OSError: It cannot be read.
    """
    import onnx
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    from ortprep.stages.core.graphs.graph_walk import check_ranks

    try:
        model = onnx.ModelProto.FromString(read_skeleton(path))
    except DecodeError as error:
        raise ValueError("its bytes are not a ModelProto") from error
    if not model.HasField("graph") or not model.opset_import:
        raise ValueError("expected a graph and its opsets, found none")
    check_ranks(model)
    return model


def describe_model(model: onnx.ModelProto) -> Inspection:
    """Returns what a parsed skeleton says; for child processes.

    Raises:
        ValueError: It refers to external data in a way that cannot be.
    """
    from ortprep.stages.core.graphs.graph_walk import (
        external_extents,
        values_bytes,
        walk_initializers,
        walk_nodes,
    )
    from ortprep.stages.fetch.index_bounds import find_index_bounds

    graph = model.graph
    external = external_extents(model)
    held = {item.name for item in graph.initializer} | {item.values.name for item in graph.sparse_initializer}
    interface = ModelInterface(
        inputs=tuple(_describe_value(item) for item in graph.input if item.name not in held),
        outputs=tuple(_describe_value(item) for item in graph.output),
        index_bounds=find_index_bounds(graph),
        external=bool(external),
    )
    return Inspection(
        interface=interface,
        opsets={_plain_domain(item.domain): item.version for item in model.opset_import},
        ir_version=model.ir_version,
        operators=dict(sorted(Counter(_operator(node) for node in walk_nodes(model)).items())),
        initializer_bytes=sum(values_bytes(tensor) for tensor in walk_initializers(model)),
        external=external,
    )


def _plain_domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def _operator(node: onnx.NodeProto) -> str:
    domain = _plain_domain(node.domain)
    return f"{domain}.{node.op_type}" if domain else str(node.op_type)


def _describe_value(value: onnx.ValueInfoProto) -> TensorSpec:
    """Returns an input or output; one that is no tensor is `sequence(…)`, `map(…)` or `optional(…)`."""
    from ortprep.stages.core.graphs.graph_walk import element_type_name

    kind = value.type.WhichOneof("value") or "unknown"
    if kind != "tensor_type":
        return TensorSpec(value.name, f"{kind.removesuffix('_type')}(…)", None)
    tensor = value.type.tensor_type
    shape = tuple(map(_describe_axis, tensor.shape.dim)) if tensor.HasField("shape") else None
    return TensorSpec(value.name, element_type_name(tensor.elem_type), shape)


def _describe_axis(axis: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if axis.HasField("dim_value") and axis.dim_value >= 0:
        return int(axis.dim_value)
    return dimension_name(str(axis.dim_param))
