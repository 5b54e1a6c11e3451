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

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    DefaultWeightOnlyQuantizer,
)

from ortprep.stages.convert.quantizable import (
    CONTRIB,
    PLAIN_DOMAINS,
    describe_result,
    is_plain_gemm,
    list_nodes,
    quantizer_refusals,
    read_attribute,
    read_checked_graph,
    require_nodes,
)
from ortprep.stages.convert.requests import PassRequest, PrecisionReply
from ortprep.stages.convert.weights import WeightWriter, move_weights, read_array, write_array
from ortprep.stages.core.graphs.graph_walk import (
    new_name,
    subgraphs,
    value_names,
    walk_graphs,
    walk_nodes,
)

OPERATORS = ("MatMul", "Gemm")
"""What can be quantised; a Gemm becomes a `MatMulNBits` and an `Add`."""

_ACCURACY_LEVEL = 4
"""The CPU may round activations to int8 for a product."""

_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)


@dataclass(frozen=True, eq=False)
class _Weight:
    """An initializer of two axes, and the graph it belongs to."""

    graph: onnx.GraphProto
    tensor: TensorProto


@dataclass(frozen=True)
class _Product:
    """A node of a graph that multiplies by a weight, or by its transpose."""

    graph: onnx.GraphProto
    node: onnx.NodeProto
    weight: _Weight
    transposed: bool


def quantize_weights(request: PassRequest) -> PrecisionReply:
    """Stores the weights of every product in few bits, in a child process.

    Raises:
        StageError: Nothing can be quantised.
        SpecError: A node or an operator is unknown.
        OSError: The source cannot be read, or the disk is full.
    """
    source, quantize = request.source, request.quantize
    operators = quantize.operators or OPERATORS
    model = read_checked_graph(source, quantize, OPERATORS)
    nodes = list_nodes(model)
    found = _find_products(model.graph, {}, operators)
    products = [product for product in found if product.node.name not in quantize.exclude]
    names = [product.node.name for product in products]
    require_nodes(names, operators, source)

    used_names = value_names(model)
    # What `MatMulNBits` reads of a weight, and tensors with the graphs that they will belong to.
    stored: dict[tuple[_Weight, bool], tuple[onnx.NodeProto, list[str]]] = {}
    new: list[tuple[onnx.GraphProto, TensorProto]] = []
    with WeightWriter(request.written) as weights:
        for product in products:
            key = (product.weight, product.transposed)
            if key not in stored:
                template, tensors = _store(product, request, used_names, weights)
                stored[key] = (template, [tensor.name for tensor in tensors])
                new += [(product.weight.graph, tensor) for tensor in tensors]
            _replace(product, *stored[key], used_names)
        _remove_unread(model, {weight for weight, _ in stored})
        move_weights(model, source.parent, weights)
    # Only now: these are where they belong already.
    for graph, tensor in new:
        graph.initializer.append(tensor)
    if all(item.domain != CONTRIB for item in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    onnx.save(model, request.written)
    return describe_result(nodes, operators=operators, quantized=set(names))


def _find_products(
    graph: onnx.GraphProto, outer: Mapping[str, _Weight], operators: Collection[str]
) -> Iterator[_Product]:
    """Yields what can be quantised in a graph and its subgraphs, which see the weights around them."""
    scope = {**outer, **{tensor.name: _Weight(graph, tensor) for tensor in graph.initializer}}
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _find_products(inner, scope, operators)
        if node.op_type not in operators or node.domain not in PLAIN_DOMAINS:
            continue
        weight = scope.get(node.input[1])
        if weight is None or weight.tensor.data_type not in _TYPES or len(weight.tensor.dims) != 2:
            continue
        if node.op_type == "MatMul" or is_plain_gemm(node):
            yield _Product(graph, node, weight, bool(read_attribute(node, "transB", 0)))


def _store(
    product: _Product, request: PassRequest, used_names: set[str], weights: WeightWriter
) -> tuple[onnx.NodeProto, list[TensorProto]]:
    """Quantises a weight; returns a `MatMulNBits` without inputs and outputs, and what it reads."""
    bits, tensor = 4 if request.name == "int4-weights" else 8, product.weight.tensor
    quantize, values = request.quantize, read_array(tensor, request.source.parent)
    values = np.ascontiguousarray(values.T) if product.transposed else values
    config = DefaultWeightOnlyQuantConfig(quantize.block_size, is_symmetric=quantize.symmetric, bits=bits)
    with quantizer_refusals(f"{tensor.name!r} of node {product.node.name!r}"):
        arrays = DefaultWeightOnlyQuantizer(config).qbits_block_quant(values)
    suffixes = (f"_Q{bits}", "_scales") if quantize.symmetric else (f"_Q{bits}", "_scales", "_zero_points")
    rows, columns = values.shape
    node = helper.make_node(
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
    return node, [
        write_array(new_name(f"{tensor.name}{suffix}", used_names), array, weights)
        for suffix, array in zip(suffixes, arrays, strict=False)
    ]


def _replace(product: _Product, template: onnx.NodeProto, stored: list[str], used_names: set[str]) -> None:
    """Replaces a product by `MatMulNBits`, and an `Add` for the bias of a Gemm."""
    node = product.node
    name, multiplied, output, bias = node.name, node.input[0], node.output[0], list(node.input[2:])
    node.CopyFrom(template)
    node.name = f"{name}_Q{read_attribute(template, 'bits', 0)}"
    node.input.extend([multiplied, *stored])
    if bias and bias[0]:
        node.output.append(new_name(f"{output}_product", used_names))
        total = helper.make_node("Add", [node.output[0], bias[0]], [output], name=f"{name}_bias")
        position = next(i for i, item in enumerate(product.graph.node) if item.name == node.name)
        product.graph.node.insert(position + 1, total)
    else:
        node.output.append(output)


def _remove_unread(model: onnx.ModelProto, weights: Collection[_Weight]) -> None:
    """Removes weights that no node reads any more, and inputs of the same name."""
    read = {name for node in walk_nodes(model) for name in node.input}
    read |= {value.name for graph in walk_graphs(model) for value in graph.output}
    for weight in weights:
        if weight.tensor.name not in read:
            for values in (weight.graph.input, weight.graph.initializer):
                for position in [i for i, item in enumerate(values) if item.name == weight.tensor.name]:
                    del values[position]
