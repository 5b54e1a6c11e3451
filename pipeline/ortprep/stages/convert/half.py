"""Half precision: float16 or bfloat16 instead of float32, node by node, weights streamed.

`onnxruntime.transformers.float16` lists the operators and inputs that stay float32. Its converter is not used
here. It needs all weights in memory and knows no bfloat16. It overlooks values whose types onnx cannot infer,
such as those behind ONNX Runtime's own operators. And two nodes that stay float32 break its graphs if they
read the same value, and pass float16 to each other, which loses the range that they were kept for (1.31.1).

A node's operator says, by its schema, which of its float32 inputs and outputs may be of another type. A value
has the type that its node gives it, and is cast once for all who want the other one. Nodes with subgraphs
(If, Loop, Scan) stay float32, and so does everything in them. Whether a provider has kernels for the result
is another question: ONNX Runtime's CPU provider casts where it has none for float16, and has hardly any for
bfloat16. For child processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import onnx
import onnx.inliner
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.transformers.float16 import ALWAYS_FLOAT_INPUTS, DEFAULT_OP_BLOCK_LIST

from ortprep.errors import require_known
from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.convert.weights import move_weights, read_graph, read_pieces, write_tensor
from ortprep.stages.core.graph_walk import (
    FLOAT,
    Schemas,
    infer_value_types,
    name_nodes,
    subgraphs,
    walk_graphs,
)

FLOAT16, BFLOAT16 = TensorProto.FLOAT16, TensorProto.BFLOAT16

_LARGEST = {FLOAT16: 65504.0, BFLOAT16: (2 - 2**-7) * 2.0**127}
_SMALLEST_FLOAT16 = np.float32(5.96e-08)

_BY_ATTRIBUTE = ("Cast", "ConstantOfShape")
"""Operators whose output's type is an attribute that the conversion changes."""

_CONTAINERS = ("Sequence", "Optional")
"""What operators on containers of tensors have in their names."""

_BY_INPUT = ("BitCast", "Bernoulli", "EyeLike", "RandomNormalLike", "RandomUniformLike")
"""Operators whose output's type, or number of bits, follows from their input's although no schema says so."""


def convert_half(request: PassRequest) -> PassReply:
    """Converts a model to half precision, in a child process.

    Raises:
        StageError: External data is missing, or of another size than its tensor.
        SpecError: A node that is to be kept does not exist.
        OSError: A file cannot be read, or the disk is full.
    """
    folder, written = request.source.parent, request.written
    model = read_graph(request.source)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    name_nodes(model)
    names = [node.name for graph in walk_graphs(model) for node in graph.node]
    for name in request.keep_nodes:
        require_known("node to keep", name, names)
    schemas = Schemas(model)

    _make_constants_weights(model)
    weights = list(model.graph.initializer)
    code = BFLOAT16 if request.name == "bf16" else FLOAT16
    conversion = _Conversion(model, schemas, request.keep_nodes, code)
    conversion.connect()
    del model.graph.initializer[:]
    move_weights(model, folder, written)  # those of subgraphs
    for tensor in weights:
        for is_half in conversion.wanted_types(tensor.name):
            stored = model.graph.initializer.add()
            stored.CopyFrom(tensor)
            stored.name = conversion.name_of(tensor.name, is_half=is_half)
            pieces: Iterator[bytes | memoryview] = read_pieces(tensor, folder)
            if is_half:
                stored.data_type = code
                pieces = conversion.round(read_pieces(tensor, folder))
            if tensor.data_type != TensorProto.STRING:
                write_tensor(stored, pieces, written)
    written.write_bytes(model.SerializeToString())
    return PassReply(nodes=len(names), converted=tuple(conversion.converted), kept=tuple(conversion.kept))


def _make_constants_weights(model: onnx.ModelProto) -> None:
    """Makes float32 constants of the main graph initializers, as ONNX Runtime does when it loads a model."""
    graph = model.graph
    for position in range(len(graph.node) - 1, -1, -1):
        node = graph.node[position]
        for attribute in node.attribute if node.op_type == "Constant" else ():
            tensor = attribute.t
            if attribute.name in ("value_float", "value_floats"):
                value = helper.get_attribute_value(attribute)
                tensor = numpy_helper.from_array(np.asarray(value, np.float32))
            if tensor.data_type == TensorProto.FLOAT:
                tensor.name = node.output[0]
                graph.initializer.append(tensor)
                del graph.node[position]


class _Conversion:
    """What a conversion does with the main graph of a model.

    Attributes:
        converted: Names of the nodes that compute with floats and are converted, in order.
        kept: Names of the nodes that compute with floats and stay float32, in order.
    """

    def __init__(
        self, model: onnx.ModelProto, schemas: Schemas, keep_nodes: Collection[str], code: int
    ) -> None:
        """Decides which nodes are converted to `FLOAT16` or `BFLOAT16`; changes nothing yet."""
        self._code, self._graph = code, model.graph
        _, *self._bodies = walk_graphs(model)
        self._suffix = TensorProto.DataType.Name(code).lower()
        self._kind = f"tensor({self._suffix})"
        self._types = infer_value_types(model, schemas)
        self.converted: list[str] = []
        self.kept: list[str] = []
        # Values that are made in half precision; and which types, half or not, are taken of each value.
        self._made_half: set[str] = set()
        self._wanted: dict[str, set[bool]] = {}
        self._half_inputs: dict[str, frozenset[int]] = {}

        blocked = {*DEFAULT_OP_BLOCK_LIST, *_BY_INPUT}
        for node in self._graph.node:
            inputs, outputs = self._convertible(node, schemas)
            is_blocked = node.op_type in blocked or node.name in keep_nodes
            if (
                is_blocked
                or any(word in node.op_type for word in _CONTAINERS)
                or next(subgraphs(node), None) is not None
            ):
                inputs = outputs = frozenset()
            if inputs or outputs:
                self.converted.append(node.name)
            elif any(self._types.get(name) == FLOAT for name in (*node.input, *node.output)):
                self.kept.append(node.name)
            self._half_inputs[node.name] = inputs
            self._made_half |= {node.output[index] for index in outputs}

    def _convertible(self, node: onnx.NodeProto, schemas: Schemas) -> tuple[frozenset[int], frozenset[int]]:
        """Returns which inputs and outputs of a node may be in half precision, by its operator."""

        def may_change(value: str, formal: Any) -> bool:
            return self._types.get(value) == FLOAT and self._kind in formal.types

        taken, given = schemas.formals(node)
        floats = ALWAYS_FLOAT_INPUTS.get(node.op_type, ())
        inputs = {
            index: formal
            for index, value, formal in taken
            if may_change(value, formal) and index not in floats
        }
        variables = {formal.typeStr for formal in inputs.values()}
        outputs = (
            index
            for index, value, formal in given
            if may_change(value, formal) and (node.op_type in _BY_ATTRIBUTE or formal.typeStr in variables)
        )
        return frozenset(inputs), frozenset(outputs)

    def name_of(self, value: str, *, is_half: bool) -> str:
        """Returns what a value is called in a type: in float32 it keeps its name."""
        return f"{value}:{self._suffix}" if is_half and self._types.get(value) == FLOAT else value

    def wanted_types(self, weight: str) -> list[bool]:
        """Returns in which types a weight is stored: whether it is half precision."""
        return sorted(self._wanted.get(weight, {False}))

    def _take(self, value: str, *, is_half: bool) -> str:
        """Returns the name of a value in the type that a user takes, which is recorded."""
        self._wanted.setdefault(value, set()).add(is_half)
        return self.name_of(value, is_half=is_half)

    def connect(self) -> None:
        """Connects the nodes by values of the types they take, with casts, and gives values their types."""
        graph, made_half = self._graph, self._made_half
        for node in graph.node:
            in_half = self._half_inputs[node.name]
            self._retype(node)
            node.input[:] = [self._take(name, is_half=i in in_half) for i, name in enumerate(node.input)]
        for body in self._bodies:
            for node in body.node:
                # Float32 of the values around it; `_take` leaves its own as they are.
                node.input[:] = [self._take(name, is_half=False) for name in node.input]
        for output in graph.output:
            self._take(output.name, is_half=False)

        # Put each cast behind the node that makes its value.
        values = [value.name for value in graph.input]
        nodes = list(self._casts([*values, *(each.values.name for each in graph.sparse_initializer)]))
        for node in graph.node:
            outputs = list(node.output)
            node.output[:] = [name and self.name_of(name, is_half=name in made_half) for name in outputs]
            nodes += [node, *self._casts(outputs)]
        del graph.node[:]
        graph.node.extend(nodes)

        inner = made_half - {value.name for value in graph.output}
        for value in graph.value_info:
            if value.name in inner:
                value.type.tensor_type.elem_type = self._code
                value.name = self.name_of(value.name, is_half=True)

    def _retype(self, node: onnx.NodeProto) -> None:
        """Changes the attribute that decides the type of a converted node's output."""
        if node.op_type == "Cast":
            to = next(attribute for attribute in node.attribute if attribute.name == "to")
            if node.output[0] in self._made_half:
                to.i = self._code
            takes_half = 0 in self._half_inputs[node.name] or self._types[node.input[0]] == self._kind
            if to.i == self._code and takes_half:
                # ONNX Runtime 1.27 refuses some casts to the same type (#29235).
                node.op_type = "Identity"
                del node.attribute[:]
        elif node.op_type == "ConstantOfShape" and node.output[0] in self._made_half:
            raw = numpy_helper.to_array(node.attribute[0].t).tobytes() if node.attribute else bytes(4)
            del node.attribute[:]
            tensor = TensorProto(dims=[1], data_type=self._code, raw_data=b"".join(self.round([raw])))
            node.attribute.append(helper.make_attribute("value", tensor))

    def _casts(self, values: Iterable[str]) -> Iterator[onnx.NodeProto]:
        """Yields the casts of values that are taken in another type than they are made in."""
        for value in values:
            is_half = value in self._made_half
            if self._types.get(value) == FLOAT and (not is_half) in self._wanted.get(value, ()):
                made, cast = (self.name_of(value, is_half=each) for each in (is_half, not is_half))
                code = TensorProto.FLOAT if is_half else self._code
                yield helper.make_node("Cast", [made], [cast], name=f"{made}:cast", to=code)

    def round(self, pieces: Iterable[bytes]) -> Iterator[memoryview]:
        """Yields a tensor's float32 numbers in half precision."""
        for piece in pieces:
            yield round_to_half(np.frombuffer(piece, np.float32), self._code).view(np.uint8).data


def round_to_half(values: NDArray[np.float32], code: int) -> NDArray[Any]:
    """Rounds float32 numbers to nearest even, as `onnxruntime.transformers.float16` does.

    Infinities and NaN stay what they are. Finite numbers beyond the largest one become it, so that none
    turns infinite (exporters mask with float32's own largest), and what that does to answers is for the gate
    to say; in float16, numbers too small become the smallest one, so that no divisor turns 0.

    Args:
        values: The numbers.
        code: `FLOAT16` or `BFLOAT16`.
    """
    limit = np.float32(_LARGEST[code])
    values = np.where(np.isfinite(values), np.clip(values, -limit, limit), values)
    if code == FLOAT16:
        is_tiny = (values != 0) & (np.abs(values) < _SMALLEST_FLOAT16)
        values = np.where(is_tiny, np.copysign(_SMALLEST_FLOAT16, values), values)
    return values.astype(helper.tensor_dtype_to_np_dtype(code))
