"""Symbolic dimensions of a model's inputs bound to sizes, by its graph alone: weights are only linked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.file_links import copy_file, link_or_copy, unlinkable_files
from ortprep.bundle.loader_config import TensorSpec
from ortprep.bundle.model_facts import dimension_name
from ortprep.bundle.onnx_wire import external_locations, read_skeleton
from ortprep.errors import StageError
from ortprep.quoting import quoted
from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.fetch.inspection import describe_model

if TYPE_CHECKING:
    import onnx

_AXIS = re.compile(r"(?P<input>.+)\[(?P<axis>\d+)\]")


def bind_shapes(request: PassRequest) -> PassReply:
    """Writes a model whose inputs have fewer symbolic dimensions, or none.

    Outputs that have one of those dimensions get the size too, or whatever shape inference then finds.

    Raises:
        StageError: The model has no such dimension, or a size is not possible.
        OSError: External data is missing, or the disk is full.
    """
    import onnx
    from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed

    from ortprep.stages.core.graph_walk import name_nodes

    source, written = request.source, request.written
    model, light = onnx.load(source, load_external_data=False), read_skeleton(source)
    skeleton = onnx.ModelProto.FromString(light)
    sizes = _resolve_dimensions(describe_model(skeleton).interface.inputs, request.dimensions)
    name_nodes(model)
    for graph in (model.graph, skeleton.graph):
        for name, size in sizes.items():
            make_dim_param_fixed(graph, name, size)
        _fix_unnamed(graph, sizes)
        for value in graph.value_info:
            # What an exporter noted may be true of the sizes it traced only. A sequence has none to clear:
            # touching its `tensor_type` would make a tensor of it.
            if value.type.HasField("tensor_type"):
                value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(skeleton, data_prop=True)
    for output, value in zip(model.graph.output, inferred.graph.output, strict=True):
        dims = output.type.tensor_type.shape.dim
        for dim, size in zip(dims, value.type.tensor_type.shape.dim, strict=False):
            # Names that inference makes up stay away.
            if size.HasField("dim_value"):
                dim.dim_value = size.dim_value
    _share_weights(source, written, light)
    with written.open("xb") as file:  # never into a file of weights, which may be a link to the source's
        file.write(model.SerializeToString(deterministic=True))
    return PassReply()


def _fix_unnamed(graph: onnx.GraphProto, sizes: Mapping[str, int]) -> None:
    """Gives axes without a name, as `input[0]`, their sizes."""
    inputs = {value.name: value for value in graph.input}
    for key, size in sizes.items():
        match = _AXIS.fullmatch(key)
        if match is None or match["input"] not in inputs:
            continue
        dim = inputs[match["input"]].type.tensor_type.shape.dim[int(match["axis"])]
        if dimension_name(dim.dim_param) is None and dim.dim_value <= 0:
            dim.dim_value = size


def _share_weights(source: Path, written: Path, skeleton: bytes) -> None:
    alone = unlinkable_files(source)
    for name in external_locations(skeleton):
        place = copy_file if Path(name) in alone else link_or_copy
        place(source.parent / name, written.parent / name)


def _resolve_dimensions(inputs: tuple[TensorSpec, ...], dimensions: Mapping[str, int]) -> dict[str, int]:
    """Returns sizes by the names of symbolic dimensions, and by `INPUT[AXIS]` only where there is no name.

    Raises:
        StageError: The model has no such dimension, or a dimension has two sizes.
    """
    axes = {
        f"{item.name}[{axis}]": size or f"{item.name}[{axis}]"
        for item in inputs
        for axis, size in enumerate(item.shape or ())
        if not isinstance(size, int)
    }
    names = axes | {name: name for name in axes.values()}
    bound: dict[str, int] = {}
    for key, size in dimensions.items():
        if key not in names:
            shapes = ", ".join(f"{item.name} {list(item.shape or ())}" for item in inputs)
            known = list(dict.fromkeys(axes.values()))
            raise StageError(
                f"model has no symbolic dimension {key!r}\n"
                f"  expected one of {', '.join(known) or 'none'}, as in {shapes}",
                hint=f"shapes: [{{{quoted(known[0])}: {size:d}}}]" if known else "shapes: []",
            )
        known_size = bound.setdefault(names[key], size)
        if known_size != size:
            raise StageError(
                f"dimension cannot be bound: {key}\n  expected {known_size}, as for {names[key]}, got {size}",
                hint=f"shapes: [{{{quoted(names[key])}: {known_size:d}}}]",
            )
    return bound
