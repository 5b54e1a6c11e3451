"""Weights of 4 or 8 bits, in blocks with a scale each; activations stay as they are.

For models that wait for memory, above all language models: MatMul becomes `MatMulNBits`, which ONNX Runtime
has for CPU and CUDA, in float32 and float16
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits).

The CPU provider is quick where it may round activations to int8 (`accuracy_level` 4). Four products of one
row by 2048² weights took 7.5 ms in float32; about 1.9 ms in 4 bits and 96 ms in 8 bits at level 0; 0.2 and
0.7 ms at level 4 (symmetric blocks of 128, one core with VNNI, ONNX Runtime 1.31). Their answers were off by
0.20 of their size in 4 bits at either level, in 8 bits by 0.012 and 0.018.

ONNX Runtime's quantiser is given one weight at a time: no more than one is in memory, and weights shared by
nodes are quantised once (given the whole model, the quantiser writes them again under the same name).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    DefaultWeightOnlyQuantizer,
)

from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.convert.weights import (
    CONTRIB,
    PLAIN_DOMAINS,
    describe_result,
    is_plain_gemm,
    move_weights,
    read_attribute,
    read_checked_graph,
    read_pieces,
    write_tensor,
)
from ortprep.stages.core.graph_walk import (
    defined_names,
    new_name,
    value_names,
    walk_graphs,
    walk_nodes,
)

OPERATORS = ("MatMul", "Gemm")
"""What can be quantised; a Gemm becomes a `MatMulNBits` and an `Add`."""

_ACCURACY_LEVEL = 4
"""The CPU may round activations to int8 for a product."""

_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)


def quantize_weights(request: PassRequest) -> PassReply:
    """Stores the weights of every product in few bits, in a child process.

    Raises:
        ValueError: The source is not an ONNX model.
        SpecError: A node or an operator is unknown.
        OSError: The source cannot be read, or the disk is full.
    """
    source, quantize = request.source, request.quantize
    operators = quantize.operators or OPERATORS
    model, nodes = read_checked_graph(request, OPERATORS)
    holders = _weight_holders(model)
    products = [
        (graph, node)
        for graph in walk_graphs(model)
        for node in graph.node
        if node.op_type in operators
        and node.domain in PLAIN_DOMAINS
        and node.name not in request.keep_nodes
        and node.input[1] in holders
        and (node.op_type == "MatMul" or is_plain_gemm(node))
    ]
    names = {node.name for _, node in products}
    used_names = value_names(model)
    # What `MatMulNBits` reads of a weight, and tensors with the graphs that they will belong to.
    stored: dict[tuple[str, bool], tuple[onnx.NodeProto, list[str]]] = {}
    new: list[tuple[onnx.GraphProto, TensorProto]] = []
    for graph, node in products:
        weight = node.input[1]
        key = (weight, bool(read_attribute(node, "transB", 0)))
        if key not in stored:
            template, arrays = _quantize(holders[weight][1], request, transposed=key[1])
            stored[key] = (template, [])
            for suffix, array in arrays.items():
                kind = helper.np_dtype_to_tensor_dtype(array.dtype)
                name = new_name(f"{weight}_{suffix}", used_names)
                tensor = TensorProto(name=name, data_type=kind, dims=array.shape)
                write_tensor(tensor, [array.tobytes()], request.written)
                stored[key][1].append(name)
                new.append((holders[weight][0], tensor))
        _replace(graph, node, *stored[key], used_names)
    _remove_unread(model, {weight: holders[weight][0] for weight, _ in stored})
    move_weights(model, source.parent, request.written)
    # Only now: these are where they belong already.
    for graph, tensor in new:
        graph.initializer.append(tensor)
    if all(item.domain != CONTRIB for item in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    onnx.save(model, request.written)
    return describe_result(nodes, operators=operators, quantized=names)


def _weight_holders(model: onnx.ModelProto) -> dict[str, tuple[onnx.GraphProto, TensorProto]]:
    """Returns the matrices of floats that products may read, by name, and the graph that holds each.

    Names that several subgraphs give to values of their own are left out.
    """
    counts = Counter(name for graph in walk_graphs(model) for name in set(defined_names(graph)))
    return {
        tensor.name: (graph, tensor)
        for graph in walk_graphs(model)
        for tensor in graph.initializer
        if tensor.data_type in _TYPES and len(tensor.dims) == 2 and counts[tensor.name] == 1
    }


def _quantize(
    tensor: TensorProto, request: PassRequest, *, transposed: bool
) -> tuple[onnx.NodeProto, dict[str, NDArray[Any]]]:
    """Quantises a weight; returns a `MatMulNBits` without inputs and outputs, and what it reads by suffix."""
    bits, quantize = 4 if request.name == "int4-weights" else 8, request.quantize
    dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    raw = b"".join(read_pieces(tensor, request.source.parent))
    values = np.frombuffer(raw, dtype).reshape(tuple(tensor.dims))
    values = np.ascontiguousarray(values.T) if transposed else values
    config = DefaultWeightOnlyQuantConfig(quantize.block_size, is_symmetric=quantize.symmetric, bits=bits)
    arrays = DefaultWeightOnlyQuantizer(config).qbits_block_quant(values)
    rows, columns = values.shape
    template = helper.make_node(
        "MatMulNBits",
        [],
        [],
        domain=CONTRIB,
        K=rows,
        N=columns,
        bits=bits,
        block_size=quantize.block_size,
        accuracy_level=_ACCURACY_LEVEL,
    )
    suffixes = (f"Q{bits}", "scales") if quantize.symmetric else (f"Q{bits}", "scales", "zero_points")
    return template, dict(zip(suffixes, arrays, strict=False))


def _replace(
    graph: onnx.GraphProto,
    node: onnx.NodeProto,
    template: onnx.NodeProto,
    stored: list[str],
    used_names: set[str],
) -> None:
    """Replaces a product by `MatMulNBits`, and an `Add` for the bias of a Gemm."""
    name, multiplied, output, bias = node.name, node.input[0], node.output[0], list(node.input[2:])
    node.CopyFrom(template)
    node.name = f"{name}_Q{read_attribute(template, 'bits', 0)}"
    node.input.extend([multiplied, *stored])
    if bias and bias[0]:
        node.output.append(new_name(f"{output}_product", used_names))
        total = helper.make_node("Add", [node.output[0], bias[0]], [output], name=f"{name}_bias")
        position = next(i for i, item in enumerate(graph.node) if item.name == node.name)
        graph.node.insert(position + 1, total)
    else:
        node.output.append(output)


def _remove_unread(model: onnx.ModelProto, holders: Mapping[str, onnx.GraphProto]) -> None:
    """Removes weights that no node reads any more, given the graph that holds each."""
    read = {name for node in walk_nodes(model) for name in node.input}
    read |= {value.name for graph in walk_graphs(model) for value in graph.output}
    for name, graph in holders.items():
        if name not in read:
            graph.initializer.remove(next(tensor for tensor in graph.initializer if tensor.name == name))
