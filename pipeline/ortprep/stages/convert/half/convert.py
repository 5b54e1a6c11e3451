"""Half precision: float16 or bfloat16 instead of float32, node by node, weights streamed.

`onnxruntime.transformers.float16` lists the operators and inputs that stay float32. Its converter is not used
here: it needs all weights in memory, knows no bfloat16, and its casts break graphs (see `casts`). Whether a
provider has kernels for the result is another question: ONNX Runtime's CPU provider casts where it has none
for float16, and has hardly any for bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

from ortprep.errors import SpecError, StageError
from ortprep.quoting import quoted
from ortprep.stages.convert.half.casts import insert_casts
from ortprep.stages.convert.half.operators import is_operator
from ortprep.stages.convert.half.plain_graph import make_plain
from ortprep.stages.convert.half.plan import HalfPlan, plan_half, split_shared
from ortprep.stages.convert.half.rounding import BFLOAT16, FLOAT16, HalfType, largest_beyond, round_to_half
from ortprep.stages.convert.half.value_types import declared_types, infer_value_types
from ortprep.stages.convert.requests import PrecisionReply, PrecisionRequest
from ortprep.stages.convert.weights import (
    WeightWriter,
    keep_inside,
    keep_others_inside,
    read_graph,
    read_pieces,
)
from ortprep.stages.core.graphs.graph_walk import check_nodes, name_nodes, walk_graphs

_TYPE_ATTRIBUTES = ("to", "dtype")


@dataclass(frozen=True)
class _OutOfRange:
    """A tensor with finite numbers beyond float16's largest, 65504.

    Attributes:
        tensor: Its name; for one that a node holds, `NODE.ATTRIBUTE`.
        nodes: Nodes that take it in half precision.
        max_abs: The largest magnitude of those numbers.
    """

    tensor: str
    nodes: tuple[str, ...]
    max_abs: float


def convert_half(request: PrecisionRequest) -> PrecisionReply:
    """Converts a model to half precision, in a child process.

    Raises:
        StageError: The model cannot be converted, or numbers are out of range. What is written then is of no
            use.
        SpecError: A node or an operator that is to be kept does not exist.
        OSError: A file cannot be read, or the disk is full.
    """
    source, written = request.source, request.written
    model = read_graph(source)
    name_nodes(model)
    names = [node.name for graph in walk_graphs(model) for node in graph.node]
    check_nodes("node to keep", request.half.keep_nodes, names)
    for operator in request.half.block_operators:
        if not is_operator(operator):
            raise SpecError(f"no such operator: {operator!r}\n  expected an operator of ONNX Runtime")
    plan = _plan(model, request)
    weights = _Weights(plan, source.parent)
    for graph in walk_graphs(model):
        for node in graph.node:
            if any(plan.types[name] != plan.source_types[name] for name in node.output if name):
                _convert_attributes(node, plan.half, weights)
    with WeightWriter(written) as writer:
        weights.write(model, writer)
    if weights.out_of_range and not request.half.clip:
        raise _out_of_range_error(weights.out_of_range)
    insert_casts(model, plan)
    written.write_bytes(model.SerializeToString())
    too_large = tuple(dict.fromkeys(node for each in weights.out_of_range for node in each.nodes))
    return PrecisionReply(len(names), plan.eligible, plan.kept, too_large)


def _plan(model: onnx.ModelProto, request: PrecisionRequest) -> HalfPlan:
    make_plain(model)
    types = infer_value_types(model, declared_types(model))
    operators = {*DEFAULT_OP_BLOCK_LIST, *request.half.block_operators}
    nodes = set(request.half.keep_nodes)

    def plan(types: Mapping[str, str]) -> HalfPlan:
        return plan_half(
            model,
            types,
            BFLOAT16 if request.name == "bf16" else FLOAT16,
            keep_io=request.half.keep_io,
            must_stay=lambda node: node.op_type in operators or node.name in nodes,
        )

    first = plan(types)
    copies = split_shared(model, first)
    return plan({**types, **{new: types[old] for new, old in copies.items()}}) if copies else first


def _convert_attributes(node: onnx.NodeProto, half: HalfType, weights: _Weights) -> None:
    """Changes the attributes that set the type of a node's output, tensors included."""
    for attribute in node.attribute:
        if attribute.name in _TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT:
            attribute.i = half.code
        elif attribute.type == onnx.AttributeProto.TENSOR and attribute.t.data_type == TensorProto.FLOAT:
            weights.convert_inside(attribute.t, node.name, f"{node.name}.{attribute.name}")
    names = {attribute.name for attribute in node.attribute}
    if node.op_type in ("RandomNormal", "RandomUniform") and "dtype" not in names:
        node.attribute.append(helper.make_attribute("dtype", half.code))
    elif node.op_type == "ConstantOfShape" and "value" not in names:
        node.attribute.append(
            helper.make_attribute("value", helper.make_tensor("value", half.code, [1], [0]))
        )


class _Weights:
    """Converts weights, and records those out of range."""

    def __init__(self, plan: HalfPlan, folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self.out_of_range: list[_OutOfRange] = []

    def convert_inside(self, tensor: TensorProto, node: str, display_name: str) -> None:
        """Converts a tensor that a node holds, where it is."""
        pieces = self._rounded(tensor, display_name, (node,))
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
        keep_others_inside(model, self._folder)

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
            writer.write(tensor, read_pieces(source, self._folder))

    def _rounded(
        self, tensor: TensorProto, display_name: str, users: tuple[str, ...]
    ) -> Iterator[memoryview]:
        max_abs = 0.0
        for piece in read_pieces(tensor, self._folder):
            values = np.frombuffer(piece, np.float32)
            max_abs = max(max_abs, largest_beyond(values, self._plan.half))
            yield round_to_half(values, self._plan.half).view(np.uint8).data
        if max_abs:
            self.out_of_range.append(_OutOfRange(display_name, users, max_abs))


def _out_of_range_error(tensors: list[_OutOfRange]) -> StageError:
    lines = [
        f"tensor {tensor.tensor!r} of {', '.join(map(repr, tensor.nodes)) or 'no node'}: {tensor.max_abs:g}"
        for tensor in tensors
    ]
    nodes = sorted({node for tensor in tensors for node in tensor.nodes})
    return StageError(
        "weights exceed float16's range\n  expected at most 65504, got\n    " + "\n    ".join(lines),
        hint=f"convert: {{half: {{keep_nodes: [{', '.join(map(quoted, nodes))}]}}}}",
    )
