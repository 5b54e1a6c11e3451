"""Half precision: float16 or bfloat16 instead of float32, node by node, weights streamed.

`onnxruntime.transformers.float16` lists the operators and inputs that stay float32. Its converter is not used
here: it needs all weights in memory, knows no bfloat16 and no values whose types onnx cannot infer, and its
casts break graphs (see `half_casts`). Whether a provider has kernels for the result is another question: ONNX
Runtime's CPU provider casts where it has none for float16, and has hardly any for bfloat16. For child
processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

from ortprep.errors import SpecError, StageError, require_known
from ortprep.quoting import quoted
from ortprep.stages.convert.half_casts import insert_casts
from ortprep.stages.convert.half_graph import is_operator, make_plain
from ortprep.stages.convert.half_plan import HalfPlan
from ortprep.stages.convert.requests import PassRequest, PrecisionReply
from ortprep.stages.convert.weights import (
    WeightWriter,
    keep_inside,
    keep_others_inside,
    read_graph,
    read_pieces,
)
from ortprep.stages.core.graphs.graph_walk import name_nodes, walk_graphs

FLOAT16, BFLOAT16 = TensorProto.FLOAT16, TensorProto.BFLOAT16

_TYPE_ATTRIBUTES = ("to", "dtype")
_FLOAT_EXTREME = float(np.finfo(np.float32).max)
_LARGEST = {FLOAT16: 65504.0, BFLOAT16: (2 - 2**-7) * 2.0**127}
_SMALLEST_FLOAT16 = np.float32(5.96e-08)


def convert_half(request: PassRequest) -> PrecisionReply:
    """Converts a model to half precision, in a child process.

    Raises:
        StageError: The model cannot be converted, or numbers are out of range. What is written then is of no
            use.
        SpecError: A node or an operator that is to be kept does not exist.
        OSError: A file cannot be read, or the disk is full.
    """
    source, written, half = request.source, request.written, request.half
    code, kind = (BFLOAT16, "tensor(bfloat16)") if request.name == "bf16" else (FLOAT16, "tensor(float16)")
    model = read_graph(source)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    name_nodes(model)
    names = [node.name for graph in walk_graphs(model) for node in graph.node]
    for name in half.keep_nodes:
        require_known("node to keep", name, names)
    for operator in half.block_operators:
        if not is_operator(operator):
            raise SpecError(f"no such operator: {operator!r}\n  expected an operator of ONNX Runtime")

    make_plain(model)
    blocked, nodes = {*DEFAULT_OP_BLOCK_LIST, *half.block_operators}, set(half.keep_nodes)
    plan = HalfPlan(
        model,
        kind,
        keep_io=half.keep_io,
        must_stay=lambda node: node.op_type in blocked or node.name in nodes,
    )
    rounding = _Rounding(code, source.parent)
    users = _users(model, plan)
    _convert_attributes(model, plan, rounding)
    # Listed before some are renamed.
    listed = [(graph, tensor, tensor.name) for graph in walk_graphs(model) for tensor in graph.initializer]
    copies = {weight: copy for copy, weight in insert_casts(model, plan).items()}
    with WeightWriter(written) as writer:
        for graph, tensor, name in listed:
            if tensor.data_type == TensorProto.STRING:
                continue
            original = TensorProto()
            original.CopyFrom(tensor)
            pieces: Iterator[bytes | memoryview] = read_pieces(original, source.parent)
            if plan.types[name] != plan.source_types[name]:
                tensor.data_type = code
                pieces = rounding.rounded(original, name, users.get(name, ()))
            writer.write(tensor, pieces)
            if name in copies:
                copied = graph.initializer.add()
                copied.CopyFrom(original)
                copied.name = copies[name]
                writer.write(copied, read_pieces(original, source.parent))
        keep_others_inside(model, source.parent)
    if rounding.out_of_range and not half.clip:
        raise _out_of_range_error(rounding.out_of_range)
    written.write_bytes(model.SerializeToString())
    too_large = dict.fromkeys(node for _, nodes, _ in rounding.out_of_range for node in nodes)
    return PrecisionReply(len(names), tuple(plan.converted), tuple(plan.kept), tuple(too_large))


class _Rounding:
    """Rounds tensors of a model to half precision.

    Attributes:
        out_of_range: Tensors with finite numbers beyond float16's largest, 65504: their names, the nodes that
            take them in half precision, and the largest magnitude. A tensor of a node is `NODE.ATTRIBUTE`.
    """

    def __init__(self, code: int, folder: Path) -> None:
        self.code, self._folder = code, folder
        self.out_of_range: list[tuple[str, tuple[str, ...], float]] = []

    def rounded(self, tensor: TensorProto, name: str, users: tuple[str, ...]) -> Iterator[memoryview]:
        """Yields a tensor's numbers, a piece at a time, and records whether some are out of range."""
        max_abs = 0.0
        for piece in read_pieces(tensor, self._folder):
            values = np.frombuffer(piece, np.float32)
            max_abs = max(max_abs, largest_beyond(values, self.code))
            yield round_to_half(values, self.code).view(np.uint8).data
        if max_abs:
            self.out_of_range.append((name, users, max_abs))


def _users(model: onnx.ModelProto, plan: HalfPlan) -> dict[str, tuple[str, ...]]:
    """Returns the nodes that take each value in half precision."""
    users: dict[str, tuple[str, ...]] = {}
    for graph in walk_graphs(model):
        for node in graph.node:
            for index in sorted(plan.half_inputs.get(node.name, ())):
                users[node.input[index]] = (*users.get(node.input[index], ()), node.name)
    return users


def _convert_attributes(model: onnx.ModelProto, plan: HalfPlan, rounding: _Rounding) -> None:
    """Changes the attributes that set the type of a converted node's output, tensors included."""
    nodes = [
        node
        for graph in walk_graphs(model)
        for node in graph.node
        if any(plan.types[name] != plan.source_types[name] for name in node.output if name)
    ]
    for node in nodes:
        for attribute in node.attribute:
            tensor = attribute.t
            if attribute.name in _TYPE_ATTRIBUTES and attribute.i == TensorProto.FLOAT:
                attribute.i = rounding.code
            elif attribute.type == onnx.AttributeProto.TENSOR and tensor.data_type == TensorProto.FLOAT:
                pieces = rounding.rounded(tensor, f"{node.name}.{attribute.name}", (node.name,))
                keep_inside(tensor, b"".join(pieces))
                tensor.data_type = rounding.code
        names = {attribute.name for attribute in node.attribute}
        if node.op_type in ("RandomNormal", "RandomUniform") and "dtype" not in names:
            node.attribute.append(helper.make_attribute("dtype", rounding.code))
        elif node.op_type == "ConstantOfShape" and "value" not in names:
            zero = helper.make_tensor("value", rounding.code, [1], [0])
            node.attribute.append(helper.make_attribute("value", zero))


def round_to_half(values: NDArray[np.float32], code: int) -> NDArray[Any]:
    """Rounds float32 numbers to nearest even, as `onnxruntime.transformers.float16` does.

    Infinities and NaN stay what they are. Finite numbers beyond the largest one become it, so that none
    turns infinite; in float16, numbers too small become the smallest one, so that no divisor turns 0.

    Args:
        values: The numbers.
        code: `TensorProto.FLOAT16` or `TensorProto.BFLOAT16`.
    """
    limit = np.float32(_LARGEST[code])
    values = np.where(np.isfinite(values), np.clip(values, -limit, limit), values)
    if code == FLOAT16:
        is_tiny = (values != 0) & (np.abs(values) < _SMALLEST_FLOAT16)
        values = np.where(is_tiny, np.copysign(_SMALLEST_FLOAT16, values), values)
    return values.astype(helper.tensor_dtype_to_np_dtype(code))


def largest_beyond(values: NDArray[np.float32], code: int) -> float:
    """Returns the largest magnitude among the finite numbers that are out of range; 0 if none is.

    float32's own largest number, and its negative, stand for "as far as it goes" (exporters mask with them):
    they become the largest of the new type and are not out of range. Nothing is out of bfloat16's, which is
    float32's but for the last rounding.
    """
    if code == BFLOAT16:
        return 0.0
    magnitude = np.abs(values)
    beyond = (magnitude > np.float32(_LARGEST[code])) & (magnitude < _FLOAT_EXTREME)
    return float(np.max(magnitude, initial=0.0, where=beyond))


def _out_of_range_error(tensors: list[tuple[str, tuple[str, ...], float]]) -> StageError:
    lines = [
        f"tensor {name!r} of {', '.join(map(repr, users)) or 'no node'}: {max_abs:g}"
        for name, users, max_abs in tensors
    ]
    nodes = sorted({node for _, users, _ in tensors for node in users})
    return StageError(
        "weights exceed float16's range\n  expected at most 65504, got\n    " + "\n    ".join(lines),
        hint=f"convert: {{half: {{keep_nodes: [{', '.join(map(quoted, nodes))}]}}}}",
    )
