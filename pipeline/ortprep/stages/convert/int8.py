"""8-bit weights, and activations of 8 bits: quantised for every request, or by ranges learned from samples.

Weights are int8 and symmetric, activations of the type that the processor multiplies fast: uint8 on x86 with
VNNI, symmetric int8 on Arm, as ONNX Runtime advises. x86 without VNNI adds pairs of 8-bit products in 16
bits, which can saturate; weights of 7 bits (`reduce_range`) would avoid that
(https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html), but cost accuracy everywhere:
the answers of four products by random 2048² weights were off by 0.036 of their size instead of 0.023.

*Dynamic* needs no calibration and runs on the CPU only: ONNX Runtime 1.31's CUDA provider has no
`DynamicQuantizeLinear`, `ConvInteger` or `DynamicQuantizeLSTM`, and `MatMulInteger` for two int8 inputs only,
so that such a model would go to the CPU and back at every layer. *Static* writes `QuantizeLinear` and
`DequantizeLinear` in pairs: the CPU provider fuses them into integer kernels when it optimises; the CUDA
provider has no such kernels and computes in float32 between them (kernels named in
`libonnxruntime_providers_cuda.so`).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime import quantization
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry
from onnxruntime.transformers.fusion_gelu import FusionGelu
from onnxruntime.transformers.onnx_model import OnnxModel

from ortprep.errors import SpecError
from ortprep.runtime.loading.session import CPU
from ortprep.runtime.machine.hardware import read_hardware
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import Array
from ortprep.stages.convert.node_errors import measure_errors
from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.convert.weights import (
    CONTRIB,
    EXTERNAL_BYTES,
    PLAIN_DOMAINS,
    describe_result,
    is_plain_gemm,
    move_weights,
    read_attribute,
    read_checked_graph,
)
from ortprep.stages.core.graph_walk import (
    FLOAT,
    Schemas,
    infer_value_types,
    name_nodes,
    walk_graphs,
    walk_nodes,
)
from ortprep.stages.optimize.requirements import find_integer_type

DYNAMIC_OPERATORS = ("MatMul", "Gemm", "Attention", "LSTM")
"""What is quantised dynamically by default: where int8 arithmetic is faster than float32.

Not `Conv`: SqueezeNet took 65 ms instead of 19 with `ConvInteger`, and 7 ms quantised statically (one core).
Nor `Gather` and `EmbedLayerNormalization`: rows are looked up, not multiplied, and a table has one scale.
"""

_WEIGHTS = {"MatMul": (1,), "Gemm": (1,), "Attention": (1,), "LSTM": (1, 2), "Gather": (0,), "Conv": (1,)}
"""Operators that can be quantised dynamically, and which of their inputs have to be weights."""

STATIC_OPERATORS = ("Conv", "Gemm", "MatMul")
"""What is quantised with calibrated ranges by default: where the time goes.

The others move 8-bit values and save little: with all of them PP-OCRv6's detector took 201 ms instead of 169
(float32 399; one core with VNNI, ONNX Runtime 1.31).
"""

_CALIBRATED = frozenset(QDQRegistry) | frozenset(QLinearOpsRegistry)
_RENAMING = ["MatMulAddFusion"]
"""Optimizers that give nodes new names, under which the spec could not name them."""

_ACTIVATIONS = {"uint8": quantization.QuantType.QUInt8, "int8": quantization.QuantType.QInt8}

_OPSETS = {"int8-dynamic": 11, "int8-static": 13}
"""The least that the written operators need: `DynamicQuantizeLinear`, and scales per channel."""

_ERRORS_ONLY = 3
_OTHER_FLOATS = ("tensor(float16)", "tensor(bfloat16)", "tensor(double)")
_LOWERED = "_MatMul"  # what the quantiser appends to the name of a Gemm that it makes a MatMul and an Add


def quantize_int8(request: PassRequest) -> PassReply:
    """Quantises weights to 8 bits, and activations at run time or by calibrated ranges, in a child process.

    If it measures errors, it reads what it wrote before, and does not calibrate again.

    Raises:
        ValueError: The source is not an ONNX model.
        SpecError: A node or an operator is unknown, or a sample has no values, or a NaN or infinity.
        OSError: The source cannot be read, or the disk is full.
    """
    source, quantize, is_static = request.source, request.quantize, request.name == "int8-static"
    supported = _CALIBRATED if is_static else _WEIGHTS
    operators = quantize.operators or (STATIC_OPERATORS if is_static else DYNAMIC_OPERATORS)
    model, nodes = read_checked_graph(request, supported)
    with _scratch_folder(request.written) as folder:
        staged = folder / "staged.onnx"
        model = _raise_opset(model, opset=_OPSETS[request.name])
        move_weights(model, source.parent, staged)
        if is_static:
            onnx.save(model, staged)
            staged, model = _fold(staged)
        _unshare_weights(model, request.keep_nodes, is_static=is_static)
        graph, types = model.graph, _declare_types(model)
        onnx.save(model, staged)
        floats = [tensor for tensor in graph.initializer if tensor.data_type == TensorProto.FLOAT]
        ranks = {tensor.name: len(tensor.dims) for tensor in floats}
        # The quantiser knows the main graph only.
        before = {
            node.name: list(node.input[:2])
            for node in graph.node
            if node.op_type in operators
            # From opset 23 on ONNX has an Attention too, which the quantiser would take for the contrib one.
            and node.domain in ((CONTRIB,) if node.op_type == "Attention" else PLAIN_DOMAINS)
            and node.name not in request.keep_nodes
            and _is_float32_only(node, types)
            and (is_static or _has_weights(node, ranks, per_channel=quantize.per_channel))
        }
        if not before:  # the quantiser would take an empty list for every node
            return describe_result(nodes, operators=operators, quantized=())
        if not request.measures_errors:
            _call_quantiser(staged, request, operators, list(before))
        # Quantised are the nodes that are gone, or read other values than before.
        written = onnx.load(request.written, load_external_data=False).graph
        after = {node.name: list(node.input[:2]) for node in written.node}
        quantized = {
            name
            for name, read in before.items()
            if (after.get(name) or after.get(f"{name}{_LOWERED}")) != read
        }
        reply = describe_result(nodes, operators=operators, quantized=quantized)
        if not request.measures_errors:
            return reply
        errors = measure_errors(staged, request.written, sorted(quantized), request.samples[0])
        return dataclasses.replace(reply, errors=errors)


def _call_quantiser(staged: Path, request: PassRequest, operators: Sequence[str], names: list[str]) -> None:
    """Has ONNX Runtime quantise some nodes of a staged model, and write it."""
    activation = find_integer_type(read_hardware(gpus=False)) or "uint8"
    options: dict[str, Any] = {
        "model_input": staged,
        "model_output": request.written,
        "per_channel": request.quantize.per_channel,
        "weight_type": quantization.QuantType.QInt8,
        "use_external_data_format": True,
    }
    if request.name == "int8-static":
        quantization.quantize_static(
            **options,
            calibration_data_reader=SampleReader(request.samples),
            op_types_to_quantize=list(operators),
            nodes_to_quantize=names,
            activation_type=_ACTIVATIONS[activation],
            extra_options={
                # One sample at a time. The quantiser else keeps what every layer gave for all of them.
                "CalibStridedMinMax": 1,
                "ActivationSymmetric": activation == "int8",
            },
        )
    else:
        quantization.quantize_dynamic(
            **options,
            op_types_to_quantize=[*operators, "MatMul"],
            nodes_to_quantize=[*names, *(f"{name}{_LOWERED}" for name in names)],
        )


@contextmanager
def _scratch_folder(written: Path) -> Iterator[Path]:
    """A temporary folder beside a file; libraries put their temporary files there too."""
    with tempfile.TemporaryDirectory(prefix="quantize-", dir=written.parent) as name:
        previous, tempfile.tempdir = tempfile.tempdir, name
        try:
            yield Path(name)
        finally:
            tempfile.tempdir = previous


def _unshare_weights(model: onnx.ModelProto, kept: Collection[str], *, is_static: bool) -> None:
    """Copies weights whose readers cannot share one; nothing large is copied, since they refer to files.

    The quantiser converts a weight once, for all that read it. But it transposes the weight of a Gemm in
    place, as if nobody else read it; and if it is static, the axis of the channels depends on the operator,
    and a node that is kept keeps its float32.
    """
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    _, *bodies = walk_graphs(model)
    # What a subgraph reads has to keep its name.
    claimed = {name for body in bodies for node in body.node for name in node.input}
    claimed |= {value.name for graph in (model.graph, *bodies) for value in graph.output}
    owned: dict[tuple[object, ...], str] = {}
    for node in model.graph.node:
        for index, name in enumerate(node.input):
            if name not in weights:
                continue
            transposed = node.op_type == "Gemm" and index == 1 and read_attribute(node, "transB", 0)
            use = (node.op_type, index, node.name in kept) if is_static else ()
            key = (name, node.name if transposed else None, *use)
            if key not in owned and name in claimed:
                own = model.graph.initializer.add()
                own.CopyFrom(weights[name])
                own.name = owned[key] = f"{name}_of_{node.name}"
            claimed.add(name)
            node.input[index] = owned.setdefault(key, name)


def _raise_opset(model: onnx.ModelProto, *, opset: int) -> onnx.ModelProto:
    """Returns a model whose operators are at least of an opset; its nodes have names."""
    if any(item.domain in PLAIN_DOMAINS and item.version < opset for item in model.opset_import):
        model = onnx.version_converter.convert_version(model, opset)
        name_nodes(model)
    return model


def _fold(staged: Path) -> tuple[Path, onnx.ModelProto]:
    """Has ONNX Runtime fold constants, and what follows a convolution into its weights, and fuses `Gelu`.

    The quantiser takes a weight behind an `Identity` or a `Constant` for an activation. And ONNX Runtime
    cannot fuse a convolution with an `Add` or a `BatchNormalization` any more once there are
    `DequantizeLinear` between them: PP-OCRv6's detector then took 446 ms instead of 169. Nor does it know a
    `Gelu` whose readers each have a `DequantizeLinear` of their own: 236 ms of processor time instead of 207.

    Returns:
        The file beside the staged one, and the model in it, whose large tensors refer to a file.
    """
    folded, options = staged.with_name("folded.onnx"), onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath, options.log_severity_level = str(folded), _ERRORS_ONLY
    for entry, value in (("file_name", f"{folded.name}.data"), ("min_size_in_bytes", f"{EXTERNAL_BYTES}")):
        options.add_session_config_entry(f"session.optimized_model_external_initializers_{entry}", value)
    onnxruntime.InferenceSession(staged, options, providers=[CPU], disabled_optimizers=_RENAMING)
    model = onnx.load(folded, load_external_data=False)
    fused = OnnxModel(model)
    FusionGelu(fused).apply()
    fused.update_graph()
    if all(item.domain != CONTRIB for item in model.opset_import):
        model.opset_import.append(helper.make_opsetid(CONTRIB, 1))
    name_nodes(model)
    used = {node.domain for node in walk_nodes(model)}
    for item in [item for item in model.opset_import if item.domain not in (*PLAIN_DOMAINS, *used)]:
        model.opset_import.remove(item)
    return folded, model


def _declare_types(model: onnx.ModelProto) -> Mapping[str, str]:
    """Returns the types of a model's values, and notes those in it that onnx cannot infer.

    The quantiser passes over a tensor whose type it does not find.
    """
    graph, types = model.graph, infer_value_types(model, Schemas(model))
    known = {value.name for value in (*graph.value_info, *graph.output)}
    for name in [name for node in graph.node for name in node.output if name not in known]:
        if types.get(name) == FLOAT:
            graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return types


def _is_float32_only(node: onnx.NodeProto, types: Mapping[str, str]) -> bool:
    """Whether a node reads float32, and neither reads nor gives another floating type, as far as is known.

    `DynamicQuantizeLinear` takes nothing else, and `QuantizeLinear` did not before opset 19.
    """
    kinds = {types.get(name) for name in (*node.input, *node.output)}
    return FLOAT in {types.get(name) for name in node.input} and kinds.isdisjoint(_OTHER_FLOATS)


def _has_weights(node: onnx.NodeProto, ranks: Mapping[str, int], *, per_channel: bool) -> bool:
    """Whether dynamic quantisation can convert the weights of a node, given the rank of float32 ones."""
    weights = [node.input[index] for index in _WEIGHTS[node.op_type] if index < len(node.input)]
    if not all(name in ranks for name in weights):
        return False
    # Per channel, ONNX Runtime writes scales for weights of more axes that its own kernel refuses.
    if node.op_type == "MatMul" and per_channel:
        return ranks[weights[0]] == 2
    return node.op_type != "Gemm" or is_plain_gemm(node)


class SampleReader(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Reads samples from disk when they are asked for."""

    def __init__(self, samples: Sequence[Path]) -> None:
        self._samples, self._next = samples, iter(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Makes the samples from one index to another (exclusive) the next ones."""
        self._next = iter(self._samples[start_index:end_index])

    def get_next(self) -> dict[str, Array] | None:
        """Returns the next sample's arrays by input name; None after the last.

        Raises:
            SpecError: An array has no values, or a NaN or infinity, which would spoil a model silently.
        """
        path = next(self._next, None)
        if path is None:
            return None
        arrays = read_tensors(path)
        for name, array in arrays.items():
            is_bad = ~np.isfinite(array) if array.dtype.kind in "fc" else np.zeros(array.shape, bool)
            if array.size and not is_bad.any():
                continue
            problem = f"expected at least one value, got shape {list(array.shape)}"
            if array.size:
                index = tuple(int(axis) for axis in np.argwhere(is_bad)[0])
                problem = f"expected numbers, got {array[index]} at index {list(index)}"
            raise SpecError(f"bad calibration sample: {path}: array {name!r}: {problem}")
        return arrays
