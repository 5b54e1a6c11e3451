"""Every graph, node and tensor of an ONNX model, subgraphs and functions included; types of its values.

For child processes: what it walks are `onnx` messages.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import Message  # type: ignore[import-untyped]
from onnx import AttributeProto, TensorProto, helper
from onnx.external_data_helper import ExternalDataInfo

from ortprep.bundle.onnx_wire import NESTED

MAX_RANK = 64
"""Maximum number of axes of a tensor; numpy takes no more."""

_SPELLING = {"FLOAT": "float32", "DOUBLE": "float64"}


def walk_nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yields every node: of the main graph, of subgraphs at any depth, and of the model's functions."""
    yield from _nodes_below(model.graph.node)
    for function in model.functions:
        yield from _nodes_below(function.node)


def walk_operators(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    """Yields every node, at every depth, that calls no function of the model's own."""
    functions = {(function.domain, function.name) for function in model.functions}
    return (node for node in walk_nodes(model) if (node.domain, node.op_type) not in functions)


def _nodes_below(nodes: Iterator[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _nodes_below(graph.node)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the graphs that a node holds as attributes: branches and loop bodies."""
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield attribute.g
        elif attribute.type == AttributeProto.GRAPHS:
            yield from attribute.graphs


def walk_graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Yields the main graph and every subgraph."""
    yield model.graph
    for node in walk_nodes(model):
        yield from subgraphs(node)


def walk_initializers(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yields every initializer of every graph; of a sparse one, its values and its indices."""
    for graph in walk_graphs(model):
        yield from graph.initializer
        for sparse in graph.sparse_initializer:
            yield sparse.values
            yield sparse.indices


def walk_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yields every tensor, wherever a model may have one; `external_locations` looks in the same places."""
    yield from _tensors_below(model, "model")


def _tensors_below(message: Message, kind: str) -> Iterator[TensorProto]:
    for field, value in message.ListFields():
        inner = NESTED[kind].get(field.number)
        if inner is not None:
            for one in (value,) if isinstance(value, Message) else value:
                yield from (one,) if inner == "tensor" else _tensors_below(one, inner)


def element_type_name(code: int) -> str:
    """Returns an element type as bundles spell it: `float32`, `int64`, `string`, `float8e4m3fn`, ….

    Raises:
        ValueError: The onnx package does not know the number.
    """
    name: str = TensorProto.DataType.Name(code)
    return _SPELLING.get(name, name.lower())


def check_ranks(model: onnx.ModelProto) -> None:
    """Refuses tensors of more axes than any that can be used: their products are numbers of megabytes.

    Raises:
        ValueError: A tensor has more than `MAX_RANK` axes.
    """
    for tensor in walk_tensors(model):
        if len(tensor.dims) > MAX_RANK:
            raise ValueError(
                f"expected at most {MAX_RANK} axes, got {len(tensor.dims)}: {tensor.name[:80]!r}"
            )


def values_bytes(tensor: TensorProto) -> int:
    """Returns how many bytes a tensor's values take as raw data, by its dims and type; 0 for strings."""
    name = TensorProto.DataType.Name(tensor.data_type)
    if name in ("STRING", "UNDEFINED"):
        return 0
    bits = 8 * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    # In numpy these take a byte each.
    bits = 2 if name.endswith("INT2") else 4 if "INT4" in name or name.startswith("FLOAT4") else bits
    count: int = math.prod(tensor.dims)
    return -(-count * bits // 8)


def load_with_weights(path: Path) -> onnx.ModelProto:
    """Reads a model with its weights; hard links, which onnx refuses, are what a build shares files by.

    Raises:
        OSError: Data is missing.
    """
    model = onnx.load(path, load_external_data=False)
    for tensor in walk_tensors(model):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        info = ExternalDataInfo(tensor)
        with (path.parent / info.location).open("rb") as file:
            file.seek(info.offset or 0)
            tensor.raw_data = file.read(info.length or values_bytes(tensor))
        del tensor.external_data[:]
        tensor.data_location = TensorProto.DEFAULT
    return model


def external_extents(model: onnx.ModelProto) -> dict[str, int]:
    """Returns how many bytes each external data file must have, by its location as the model gives it.

    Raises:
        ValueError: A reference has no location, or a malformed offset or length.
    """
    extents: dict[str, int] = {}
    for tensor in walk_tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            location, end = _external_end(tensor)
            extents[location] = max(end, extents.get(location, 0))
    return extents


def _external_end(tensor: TensorProto) -> tuple[str, int]:
    """Returns an external tensor's file and the offset of its end."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries.get("location"):
        raise ValueError(f"external tensor {tensor.name!r} names no file")
    for key in ("offset", "length"):
        if not entries.get(key, "0").isdecimal():
            raise ValueError(f"external tensor {tensor.name!r} has {key} {entries[key]!r}, expected a number")
    length = max(int(entries.get("length", 0)), values_bytes(tensor))
    return entries["location"], int(entries.get("offset", 0)) + length


def name_nodes(model: onnx.ModelProto) -> None:
    """Gives every node of the graph and its subgraphs a name that no other has.

    A name that is the first of its kind is kept; a node without one is called after its operator. The same
    model is always given the same names, so that one pass can name nodes that another has listed.
    """
    nodes = [node for graph in walk_graphs(model) for node in graph.node]
    used_names = {node.name for node in nodes}
    seen: set[str] = set()
    counts: dict[str, Iterator[int]] = {}  # a model may have a million nodes without names
    for node in nodes:
        if not node.name or node.name in seen:
            stem = node.name or node.op_type
            following = (f"{stem}_{count}" for count in counts.setdefault(stem, itertools.count()))
            node.name = next(name for name in following if name not in used_names)
            used_names.add(node.name)
        seen.add(node.name)


def new_name(stem: str, used_names: set[str]) -> str:
    """Returns a free name, `stem` if possible, and marks it as taken."""
    candidates = itertools.chain([stem], (f"{stem}_{count}" for count in itertools.count(1)))
    name = next(name for name in candidates if name not in used_names)
    used_names.add(name)
    return name


def value_names(model: onnx.ModelProto) -> set[str]:
    """Returns the names of all values, of every graph."""
    return {name for graph in walk_graphs(model) for name in defined_names(graph)}


def defined_names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields the names of the values that a graph defines; not those of its subgraphs."""
    yield from (value.name for value in graph.input)
    yield from (tensor.name for tensor in graph.initializer)
    yield from (sparse.values.name for sparse in graph.sparse_initializer)
    yield from (name for node in graph.node for name in node.output if name)


PASSED_ON = frozenset(
    {
        "Cast", "Clip", "Concat", "Expand", "Flatten", "Identity", "Pad", "Reshape", "Resize", "Slice",
        "Split", "Squeeze", "Tile", "Transpose", "Unsqueeze",
    }
)  # fmt: skip
"""Operators whose first output has values of their first input."""

_SAME_SHAPE = frozenset({"Cast", "DequantizeLinear", "Identity"})
_LOOKUPS = frozenset({"Gather", "GatherElements"})
_INTEGERS = frozenset(
    TensorProto.DataType.Value(f"{sign}INT{bits}") for sign in ("", "U") for bits in (8, 16, 32, 64)
)


def find_index_bounds(graph: onnx.GraphProto) -> Mapping[str, int]:
    """Returns the exclusive upper bound of integer inputs that index a table of known size.

    Seeded inputs have to stay inside: ONNX Runtime refuses an index outside its table, and only the graph
    knows which table an input ends up indexing.

    Follows an input through operators that only move or convert values, into subgraphs too, to the `indices`
    of Gather and GatherElements. Where an input indexes several tables the smallest counts.
    """
    held = {tensor.name for tensor in graph.initializer}
    origins = {
        item.name: item.name
        for item in graph.input
        if item.name not in held and item.type.tensor_type.elem_type in _INTEGERS
    }
    bounds: dict[str, int] = {}
    _follow_indices(graph, ChainMap(origins), ChainMap(), bounds)
    return bounds


def _follow_indices(
    graph: onnx.GraphProto,
    origins: ChainMap[str, str],
    tables: ChainMap[str, tuple[int, ...]],
    bounds: dict[str, int],
) -> None:
    """Adds a graph's bounds, given the input that each value comes from, and the shape of each table."""
    tables.update((tensor.name, tuple(tensor.dims)) for tensor in graph.initializer)
    for node in graph.node:
        first, second = (*node.input, "", "")[:2]
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type in _LOOKUPS and second in origins and first in tables:
            size, axis = tables[first], int(attributes["axis"].i) if "axis" in attributes else 0
            if -len(size) <= axis < len(size):
                name = origins[second]
                bounds[name] = min(size[axis], bounds.get(name, size[axis]))
        for output in node.output[:1]:
            if node.op_type == "Constant" and "value" in attributes:
                tables[output] = tuple(attributes["value"].t.dims)
            if node.op_type in PASSED_ON and first in origins:
                origins[output] = origins[first]
            if node.op_type in _SAME_SHAPE and first in tables:
                tables[output] = tables[first]
        for inner in subgraphs(node):
            # What a branch names, no other sees. A copy for each would take the square of the model's size.
            _follow_indices(inner, origins.new_child(), tables.new_child(), bounds)


FLOAT = "tensor(float)"

Formals = list[tuple[int, str, Any]]
"""Index, value and formal parameter of every input or output that a node has.

A formal parameter has `typeStr` (a type, or the name of a type variable), `types` (those allowed), and
`isHomogeneous`.
"""


class Schemas:
    """ONNX Runtime's schemas of a model's operators, its own too, at the versions that the model imports."""

    def __init__(self, model: onnx.ModelProto) -> None:
        """Takes the opsets of a model."""
        from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

        imported = {_domain(opset.domain): opset.version for opset in model.opset_import}
        self._schemas: dict[tuple[str, str], Any] = {}
        for schema in sorted(get_all_operator_schema(), key=lambda schema: schema.since_version):
            if schema.since_version <= imported.get(schema.domain, 1):
                self._schemas[schema.domain, schema.name] = schema

    def formals(self, node: onnx.NodeProto) -> tuple[Formals, Formals]:
        """Returns those of a node's inputs and outputs; none for an operator that ONNX Runtime lacks."""
        schema = self._schemas.get((_domain(node.domain), node.op_type))
        if schema is None:
            return [], []
        return _pair(node.input, schema.inputs), _pair(node.output, schema.outputs)


def _pair(values: Sequence[str], formals: list[Any]) -> Formals:
    # The last formal may stand for any number of values.
    return [(i, name, formals[min(i, len(formals) - 1)]) for i, name in enumerate(values) if name]


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def infer_value_types(model: onnx.ModelProto, schemas: Schemas) -> dict[str, str]:
    """Infers the types of the main graph's values, as ONNX Runtime spells them: `tensor(float)`.

    It is "" for one that is no tensor, or cannot be inferred. `onnx.shape_inference` alone would stop at the
    first of ONNX Runtime's own operators.
    """
    known = model
    with contextlib.suppress(onnx.shape_inference.InferenceError):  # declared types have to do then
        known = onnx.shape_inference.infer_shapes(model)
    values = (*known.graph.input, *known.graph.value_info, *known.graph.output)
    declared = {value.name: _spell(value.type.tensor_type.elem_type) for value in values}
    types = {value.name: declared[value.name] for value in model.graph.input}
    for tensor in (*model.graph.initializer, *(each.values for each in model.graph.sparse_initializer)):
        types[tensor.name] = _spell(tensor.data_type)
    for node in model.graph.node:
        inputs, outputs = schemas.formals(node)
        bound = {formal.typeStr: types.get(name, "") for _, name, formal in inputs if formal.isHomogeneous}
        types.update((name, declared.get(name, "")) for name in node.output if name)
        for _, name, formal in outputs:
            # Else the type of a body or an attribute, which onnx infers.
            if len(formal.types) == 1:
                types[name] = str(next(iter(formal.types)))
            elif formal.isHomogeneous and formal.typeStr in bound:
                types[name] = bound[formal.typeStr] or types[name]
    return types


def _spell(code: int) -> str:
    return f"tensor({TensorProto.DataType.Name(code).lower()})" if code else ""
