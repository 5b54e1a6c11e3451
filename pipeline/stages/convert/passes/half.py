"""Half precision: float16 or bfloat16 instead of float32, node by node, weights streamed.

`onnxruntime.transformers.float16.convert_float_to_float16` says which operators are kept float32 and changes
what nodes say of types; it is shown a graph without weights. Casts are put by `half_borders`, which says why.
The library knows no bfloat16: what it made float16 is made bfloat16 after it. The result is checked against
the schemas of its operators before it is written. Whether a provider has kernels for it is another question:
ONNX Runtime's CPU provider casts where it has none for float16, and has hardly any for bfloat16.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST, convert_float_to_float16

from pipeline.bundle.codec import decode, encode
from pipeline.errors import SpecError, StageError
from pipeline.stages.convert.half_borders import draw_borders
from pipeline.stages.convert.half_plan import HalfPlan, plan_half
from pipeline.stages.convert.half_sharing import split_shared
from pipeline.stages.convert.half_types import HALF_TYPES, HalfType, Rounding, round_to_half
from pipeline.stages.convert.operators import is_operator
from pipeline.stages.convert.plain_graph import make_plain
from pipeline.stages.convert.value_types import declared_types, infer_value_types
from pipeline.stages.convert.weights import WeightReader, WeightWriter, keep_inside, read_graph
from pipeline.stages.graphs.graph_walk import walk_graphs
from pipeline.stages.graphs.node_names import name_nodes

_TYPE_ATTRIBUTES = ("to", "dtype")
_TOLD = 5


@dataclass(frozen=True)
class HalfRequest:
    """What is to be converted, and how.

    Attributes:
        source: Path of the model.
        written: Path of the converted model, in an empty folder.
        dtype: `float16` or `bfloat16`.
        keep_io: Whether inputs and outputs stay float32.
        blocked_operators: Operators that stay float32, besides those that the library keeps.
        blocked_nodes: Names of nodes that stay float32, with all that is in their subgraphs.
        clip: Whether numbers beyond float16's range become its largest; otherwise they are an error.
    """

    source: str
    written: str
    dtype: str = "float16"
    keep_io: bool = True
    blocked_operators: tuple[str, ...] = ()
    blocked_nodes: tuple[str, ...] = ()
    clip: bool = False


@dataclass(frozen=True)
class OutOfRange:
    """A tensor with finite numbers beyond float16's largest, 65504.

    Attributes:
        tensor: Its name; for one that a node holds, `NODE.ATTRIBUTE`.
        nodes: Nodes that take it in half precision.
        max_abs: The largest magnitude of those numbers.
        count: How many there are.
    """

    tensor: str
    nodes: tuple[str, ...]
    max_abs: float
    count: int


@dataclass(frozen=True)
class HalfReply:
    """What was converted.

    Attributes:
        nodes: How many nodes the source has, those of subgraphs included.
        kept: Names of its nodes that compute with floats and stay float32, asked to or for want of choice.
        eligible: Names of those that were converted, in topological order, a node before its subgraphs'.
        out_of_range: Tensors that were clipped.
        tiny: How many positive numbers, of either sign, were raised to float16's smallest.
        weights_bytes: Bytes of all weights written.
    """

    nodes: int
    kept: tuple[str, ...]
    eligible: tuple[str, ...]
    out_of_range: tuple[OutOfRange, ...]
    tiny: int
    weights_bytes: int


def convert_half(request: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a model to half precision; for `run_child`.

    Args:
        request: A `HalfRequest`.

    Returns:
        A `HalfReply`.

    Raises:
        StageError: The model cannot be converted, or numbers are out of range. What is written then is of no
            use.
        SpecError: A node or an operator that is to be kept does not exist.
        OSError: A file cannot be read, or the disk is full.
    """
    wanted = decode(HalfRequest, request)
    source, written = Path(wanted.source), Path(wanted.written)
    model = read_graph(source)
    name_nodes(model)
    names = [node.name for graph in walk_graphs(model) for node in graph.node]
    _check_names(wanted.blocked_nodes, names)
    for operator in wanted.blocked_operators:
        if not is_operator(operator):
            raise SpecError(f"no such operator: {operator!r}\n  expected one that ONNX Runtime has")
    plan = _plan(model, wanted)
    weights = _Weights(plan, WeightReader(source.parent))
    _convert_nodes(model, plan, weights)
    with WeightWriter(written) as writer:
        weights.write(model, writer)
    if weights.out_of_range and not wanted.clip:
        raise _out_of_range_error(weights.out_of_range)
    draw_borders(model, plan)
    infer_value_types(model, plan.types)
    written.write_bytes(model.SerializeToString())
    return dict(
        encode(
            HalfReply(
                nodes=len(names),
                kept=plan.kept,
                eligible=plan.eligible,
                out_of_range=tuple(weights.out_of_range),
                tiny=weights.tiny,
                weights_bytes=writer.written_bytes,
            )
        )
    )


def _check_names(wanted: Iterable[str], names: list[str]) -> None:
    known = set(names)
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, names, n=3)
            raise SpecError(
                f"no such node: {name!r}\n  expected a name of one of the model's {len(names)} nodes"
                + (f", such as {', '.join(map(repr, near))}" if near else "")
            )


def _plan(model: onnx.ModelProto, wanted: HalfRequest) -> HalfPlan:
    make_plain(model)
    types = infer_value_types(model, declared_types(model))
    operators = {*DEFAULT_OP_BLOCK_LIST, *wanted.blocked_operators}
    nodes = set(wanted.blocked_nodes)

    def plan(types: Mapping[str, str]) -> HalfPlan:
        return plan_half(
            model,
            types,
            HALF_TYPES[wanted.dtype],
            keep_io=wanted.keep_io,
            asked_to_stay=lambda node: node.op_type in operators or node.name in nodes,
        )

    first = plan(types)
    copies = split_shared(model, first)
    return plan({**types, **{new: types[old] for new, old in copies.items()}}) if copies else first


def _convert_nodes(model: onnx.ModelProto, plan: HalfPlan, weights: _Weights) -> None:
    """Lets the library change what nodes say of types, and nothing else of the model."""
    graphs = list(walk_graphs(model))
    nodes = [node for graph in graphs for node in graph.node]
    before = onnx.ModelProto()
    before.CopyFrom(model)
    for graph in graphs:
        for field in ("initializer", "value_info"):
            graph.ClearField(field)
    count = len(model.graph.node)
    blocked = [node.name for node in nodes if node.name not in plan.half_inputs]
    convert_float_to_float16(model, disable_shape_infer=True, op_block_list=[], node_block_list=blocked)
    del model.graph.node[count:]
    for graph, old in zip(graphs, walk_graphs(before), strict=True):
        for field in ("initializer", "value_info", "input", "output"):
            graph.ClearField(field)
            getattr(graph, field).extend(getattr(old, field))
        for node, was in zip(graph.node, old.node, strict=True):
            node.input[:], node.output[:] = was.input, was.output
            _finish_attributes(node, was, plan.half, weights)


def _finish_attributes(node: onnx.NodeProto, was: onnx.NodeProto, half: HalfType, weights: _Weights) -> None:
    """Makes what the library made float16 the type that is wanted, and tensors from their own values."""
    old = {attribute.name: attribute for attribute in was.attribute}
    for attribute in node.attribute:
        before = old.get(attribute.name)
        if attribute.name in _TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT16:
            if before is None or before.i != TensorProto.FLOAT16:
                attribute.i = half.code
        elif attribute.type == onnx.AttributeProto.TENSOR:
            if before is None:
                attribute.t.data_type = half.code  # zero in either
            elif attribute.t.data_type != before.t.data_type:
                attribute.t.CopyFrom(before.t)
                weights.convert_inside(attribute.t, node.name, f"{node.name}.{attribute.name}")


class _Weights:
    """Converts weights, and keeps account of what does not fit."""

    def __init__(self, plan: HalfPlan, reader: WeightReader) -> None:
        self._plan = plan
        self._reader = reader
        self.out_of_range: list[OutOfRange] = []
        self.tiny = 0

    def convert_inside(self, tensor: TensorProto, node: str, called: str) -> None:
        """Converts a tensor that a node holds, where it is."""
        pieces = self._rounded(tensor, called, (node,))
        keep_inside(tensor, b"".join(pieces))
        tensor.data_type = self._plan.half.code

    def write(self, model: onnx.ModelProto, writer: WeightWriter) -> None:
        """Writes every initializer in its new type, and puts other tensors with values elsewhere inside."""
        users: dict[str, list[str]] = {}
        for graph in walk_graphs(model):
            for node in graph.node:
                for index in sorted(self._plan.half_inputs.get(node.name, ())):
                    users.setdefault(node.input[index], []).append(node.name)
        for graph in walk_graphs(model):
            for tensor in graph.initializer:
                self._write_one(tensor, tuple(users.get(tensor.name, ())), writer)
        for tensor in _held_tensors(model):
            if tensor.data_location == TensorProto.EXTERNAL:
                keep_inside(tensor, self._reader.read(tensor))

    def _write_one(self, tensor: TensorProto, users: tuple[str, ...], writer: WeightWriter) -> None:
        changes = self._plan.types[tensor.name] != self._plan.source_types[tensor.name]
        if tensor.data_type == TensorProto.STRING:
            return
        source = TensorProto()
        source.CopyFrom(tensor)
        if changes:
            tensor.data_type = self._plan.half.code
            writer.write(tensor, self._rounded(source, tensor.name, users))
        else:
            writer.write(tensor, self._reader.pieces(source))

    def _rounded(self, tensor: TensorProto, called: str, users: tuple[str, ...]) -> Iterator[memoryview]:
        total = Rounding()
        for piece in self._reader.pieces(tensor):
            values, rounding = round_to_half(np.frombuffer(piece, np.float32), self._plan.half)
            total += rounding
            yield values.view(np.uint8).data
        self.tiny += total.tiny
        if total.out_of_range:
            self.out_of_range.append(OutOfRange(called, users, total.max_abs, total.out_of_range))


def _held_tensors(model: onnx.ModelProto) -> Iterator[TensorProto]:
    """Yields the tensors that are no initializers: sparse ones, and those of attributes."""
    for graph in walk_graphs(model):
        for sparse in graph.sparse_initializer:
            yield from (sparse.values, sparse.indices)
        for node in graph.node:
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors) if attribute.HasField("t") else attribute.tensors


def _out_of_range_error(found: list[OutOfRange]) -> StageError:
    told = [
        f"tensor {each.tensor!r} of {', '.join(map(repr, each.nodes[:3])) or 'no node'}: "
        f"{each.count} numbers, the largest {each.max_abs:g}"
        for each in found[:_TOLD]
    ]
    more = f"\n    and {len(found) - _TOLD} more tensors" if len(found) > _TOLD else ""
    nodes = sorted({node for each in found for node in each.nodes})
    return StageError(
        "weights out of float16's range\n  expected at most 65504, got\n    " + "\n    ".join(told) + more,
        hint=f"convert: {{half: {{keep_nodes: [{', '.join(nodes[:20])}]}}}}",
    )
