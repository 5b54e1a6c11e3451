"""Weights of 4 or 8 bits, in blocks with a scale each; activations stay as they are.

For models that wait for memory, above all language models: MatMul becomes `MatMulNBits`, which ONNX Runtime
has for CPU and CUDA, in float32 and float16
(https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits).

The CPU provider is quick where it may round activations to int8 (`accuracy_level` 4). Four products of one
row by 2048² weights took 7.5 ms in float32; about 1.9 ms in 4 bits and 96 ms in 8 bits at level 0; 0.2 and
0.7 ms at level 4 (symmetric blocks of 128, one core with VNNI, ONNX Runtime 1.31). Their answers were off by
0.20 of their size in 4 bits at either level, in 8 bits by 0.012 and 0.018.

A weight knows nothing of the others, so ONNX Runtime's quantiser is given models of one node each, and the
whole is put together here: no more than one weight is in memory, and weights shared by nodes are quantised
once (given the whole model, the quantiser writes them again under the same name).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

from ortprep.stages.convert.quantize.checks import (
    CONTRIB,
    check_finite,
    describe_result,
    is_plain_gemm,
    quantizer_refusals,
    read_attribute,
    read_checked_graph,
    select_nodes,
)
from ortprep.stages.convert.quantize.quantizer_input import PLAIN_DOMAINS, list_nodes
from ortprep.stages.convert.requests import PrecisionReply, PrecisionRequest
from ortprep.stages.convert.weights import (
    WeightReader,
    WeightWriter,
    move_weights,
    read_array,
    write_array,
)
from ortprep.stages.core.graphs.graph_walk import (
    subgraphs,
    walk_graphs,
    walk_initializers,
    walk_nodes,
)

OPERATORS = ("MatMul", "Gemm")
"""What can be quantised; a Gemm becomes a `MatMulNBits` and an `Add`."""

_ACCURACY_LEVEL = 4
"""The CPU may round activations to int8 for a product."""

_TYPES = (TensorProto.FLOAT, TensorProto.FLOAT16)
_SUFFIXES = ("_Q4", "_Q8", "_scales", "_zero_points")  # of the names that the quantiser makes


@dataclass(frozen=True, eq=False)
class _Weight:
    """An initializer of two axes, and the graph it belongs to."""

    graph: onnx.GraphProto
    tensor: TensorProto


@dataclass(frozen=True)
class _Product:
    """A node that multiplies by a weight.

    Attributes:
        graph: The graph it is in.
        node: The node.
        weight: What it multiplies by.
        transposed: Whether by its transpose.
    """

    graph: onnx.GraphProto
    node: onnx.NodeProto
    weight: _Weight
    transposed: bool


def quantize_weights(request: PrecisionRequest) -> PrecisionReply:
    """Stores the weights of every product in few bits, in a child process.

    Raises:
        StageError: A weight is not finite, or nothing can be quantised.
        SpecError: A node or an operator is unknown.
        OSError: The source cannot be read, or the disk is full.
    """
    # The quantiser sets up logging when it is imported, and reports every node.
    logging.getLogger(MatMulNBitsQuantizer.__module__).setLevel(logging.WARNING)
    source, written, quantize = request.source, request.written, request.quantize
    operators = quantize.operators or OPERATORS
    model = read_checked_graph(source, quantize, OPERATORS)
    nodes = list_nodes(model)
    products = list(_find_products(model.graph, {}, operators))
    expected = f"{', '.join(operators)} with a 2-D float32 or float16 weight"
    names = select_nodes(
        (product.node for product in products), excluded=quantize.exclude, expected=expected, source=source
    )
    chosen = [product for product in products if product.node.name in set(names)]
    with WeightWriter(written) as weights:
        _quantize_products(model, chosen, weights=weights, request=request)
    onnx.save(model, written)
    return describe_result(nodes, operators=operators, quantized=set(names))


def _find_products(
    graph: onnx.GraphProto, outer: Mapping[str, _Weight], operators: tuple[str, ...]
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
            transposed = bool(read_attribute(node, "transB", 0))
            yield _Product(graph, node, weight, transposed)


def _quantize_products(
    model: onnx.ModelProto, products: list[_Product], *, weights: WeightWriter, request: PrecisionRequest
) -> None:
    folder, bits = request.source.parent, _bits(request)
    used_names = _tensor_names(model)
    templates: dict[tuple[_Weight, bool], onnx.NodeProto] = {}
    new: list[tuple[onnx.GraphProto, TensorProto]] = []
    for product in products:
        key = (product.weight, product.transposed)
        if key not in templates:
            stem = _free_stem(product.weight.tensor.name, used_names, suffixes=_SUFFIXES)
            with quantizer_refusals(f"{product.weight.tensor.name!r} of node {product.node.name!r}"):
                templates[key], arrays = _quantize_weight(_read_weight(product, folder), stem, request)
            for name, array in arrays.items():
                new.append((product.weight.graph, write_array(name, array, weights)))
        _replace(product, templates[key], used_names, bits=bits)
    _remove_unread(model, {weight for weight, _ in templates})
    move_weights(model, folder, weights)
    # Only now: these are where they belong already.
    for graph, tensor in new:
        graph.initializer.append(tensor)
    if all(item.domain != CONTRIB for item in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))


def _bits(request: PrecisionRequest) -> int:
    return 4 if request.name == "int4-weights" else 8


def _read_weight(product: _Product, folder: Path) -> NDArray[np.generic]:
    """Returns a weight as [rows, columns] that an input is multiplied by."""
    values = read_array(product.weight.tensor, WeightReader(folder))
    check_finite(values, node=product.node.name, tensor=product.weight.tensor.name)
    return np.ascontiguousarray(values.T) if product.transposed else values


def _quantize_weight(
    values: NDArray[np.generic], name: str, request: PrecisionRequest
) -> tuple[onnx.NodeProto, dict[str, NDArray[np.generic]]]:
    """Has the quantiser convert a model of one product; returns its node, and its weights by name."""
    rows, columns = values.shape
    kind = helper.np_dtype_to_tensor_dtype(values.dtype)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["a", name], ["y"], name="product")],
        "product",
        [helper.make_tensor_value_info("a", kind, [None, rows])],
        [helper.make_tensor_value_info("y", kind, [None, columns])],
        initializer=[numpy_helper.from_array(values, name)],
    )
    quantizer = MatMulNBitsQuantizer(
        helper.make_model(graph),
        bits=_bits(request),
        block_size=request.quantize.block_size,
        is_symmetric=request.quantize.symmetric,
        accuracy_level=_ACCURACY_LEVEL,
    )
    quantizer.process()
    result = quantizer.model.model.graph
    # Copied, since a part of a message keeps all of it in memory.
    node = onnx.NodeProto()
    node.CopyFrom(result.node[0])
    return node, {tensor.name: numpy_helper.to_array(tensor) for tensor in result.initializer}


def _replace(product: _Product, template: onnx.NodeProto, used_names: set[str], *, bits: int) -> None:
    """Replaces a product by `MatMulNBits`, and an `Add` for the bias of a Gemm."""
    node = product.node
    name, multiplied, output, bias = node.name, node.input[0], node.output[0], list(node.input[2:])
    node.CopyFrom(template)
    node.name, node.input[0] = f"{name}_Q{bits}", multiplied
    if bias and bias[0]:
        total = helper.make_node(
            "Add", [_free_stem(output, used_names, suffixes=("_product",)) + "_product", bias[0]], [output]
        )
        total.name = f"{name}_bias"
        node.output[0] = total.input[0]
        position = next(i for i, item in enumerate(product.graph.node) if item.name == node.name)
        product.graph.node.insert(position + 1, total)
    else:
        node.output[0] = output


def _tensor_names(model: onnx.ModelProto) -> set[str]:
    nodes = list(walk_nodes(model))
    names = {name for node in nodes for name in (*node.input, *node.output)}
    return names | {tensor.name for tensor in walk_initializers(model)}


def _free_stem(stem: str, used_names: set[str], *, suffixes: tuple[str, ...]) -> str:
    """Returns a stem that makes free names with every suffix, and marks them as taken."""
    while any(f"{stem}{suffix}" in used_names for suffix in suffixes):
        stem += "_"
    used_names.update(f"{stem}{suffix}" for suffix in suffixes)
    return stem


def _remove_unread(model: onnx.ModelProto, weights: Iterable[_Weight]) -> None:
    """Removes weights that no node reads any more, and inputs of the same name."""
    read = {name for node in walk_nodes(model) for name in node.input}
    read |= {value.name for graph in walk_graphs(model) for value in graph.output}
    for weight in weights:
        if weight.tensor.name in read:
            continue
        for value in [item for item in weight.graph.input if item.name == weight.tensor.name]:
            weight.graph.input.remove(value)
        names = [tensor.name for tensor in weight.graph.initializer]
        del weight.graph.initializer[names.index(weight.tensor.name)]
