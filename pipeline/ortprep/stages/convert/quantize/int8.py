"""8-bit weights, and activations of 8 bits: quantised for every request, or by ranges learned from samples.

Weights are int8 and symmetric, activations uint8 unless told otherwise: what ONNX Runtime advises on x86 with
VNNI and on Arm; for TensorRT int8 activations, whose zero points have to be zero. x86 without VNNI adds pairs
of 8-bit products in 16 bits, which can saturate; weights of 7 bits (`reduce_range`) would avoid that
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

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx
from onnx import TensorProto
from onnxruntime import quantization
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import Array
from ortprep.stages.convert.quantize.checks import (
    CONTRIB,
    check_weights,
    describe_result,
    is_float32_only,
    is_plain_gemm,
    quantizer_refusals,
    read_attribute,
    read_checked_graph,
    select_nodes,
)
from ortprep.stages.convert.quantize.quantizer_input import (
    PLAIN_DOMAINS,
    QuantizerInput,
    scratch_folder,
    stage_source,
    unshare_weights,
)
from ortprep.stages.convert.requests import PrecisionReply, PrecisionRequest

DYNAMIC_OPERATORS = ("MatMul", "Gemm", "Attention", "LSTM")
"""What is quantised dynamically unless told otherwise: where int8 arithmetic is faster than float32.

Not `Conv`: SqueezeNet took 65 ms instead of 19 with `ConvInteger`, and 7 ms quantised statically (one core).
Nor `Gather` and `EmbedLayerNormalization`: rows are looked up, not multiplied, and a table has one scale.
"""

_WEIGHTS = {
    "MatMul": (1,),
    "Gemm": (1,),
    "Attention": (1,),
    "LSTM": (1, 2),
    "Gather": (0,),
    "Conv": (1,),
    "EmbedLayerNormalization": (2, 3, 5, 6),
}
"""Operators that can be quantised, and which of their inputs have to be weights."""

_STATIC_OPERATORS = frozenset(QDQRegistry) | frozenset(QLinearOpsRegistry)
_METHODS = {
    "minmax": quantization.CalibrationMethod.MinMax,
    "entropy": quantization.CalibrationMethod.Entropy,
    "percentile": quantization.CalibrationMethod.Percentile,
}
_ACTIVATIONS = {"uint8": quantization.QuantType.QUInt8, "int8": quantization.QuantType.QInt8}

_CONTRIB_OPERATORS = ("Attention", "EmbedLayerNormalization")
_LOWERED = "_MatMul"  # what the quantiser appends to the name of a Gemm that it makes a MatMul and an Add


@dataclass(frozen=True)
class _Method:
    """What dynamic and static quantisation do differently.

    Attributes:
        supported: Operators that can be quantised.
        operators: Those that are.
        opset: The least that the written operators need.
        group: Of a node and the index of one of its inputs: nodes of one group may share a weight.
        fits: Whether a node that reads float32 can be quantised.
        expected: The nodes in words.
        write: Quantises the nodes of these names.
    """

    supported: Collection[str]
    operators: tuple[str, ...]
    opset: int
    group: Callable[[onnx.NodeProto, int], Hashable]
    fits: Callable[[onnx.NodeProto, QuantizerInput], bool]
    expected: str
    write: Callable[[Path, tuple[str, ...]], None]


def quantize_int8(request: PrecisionRequest) -> PrecisionReply:
    """Quantises weights to 8 bits, and activations at run time or by calibrated ranges, in a child process.

    Raises:
        StageError: The opset is too old, nothing can be quantised, a weight is not finite, a sample is
            unusable, or ONNX Runtime's quantiser refused the model.
        SpecError: A node or an operator is unknown.
        OSError: The source cannot be read, or the disk is full.
    """
    return _quantize(request, _static(request) if request.name == "int8-static" else _dynamic(request))


def _dynamic(request: PrecisionRequest) -> _Method:
    quantize = request.quantize
    operators = quantize.operators or DYNAMIC_OPERATORS

    def write(staged: Path, names: tuple[str, ...]) -> None:
        quantization.quantize_dynamic(
            staged,
            request.written,
            op_types_to_quantize=[*operators, "MatMul"],
            per_channel=quantize.per_channel,
            weight_type=quantization.QuantType.QInt8,
            nodes_to_quantize=[*names, *(f"{name}{_LOWERED}" for name in names)],
            use_external_data_format=True,
        )

    return _Method(
        supported=_WEIGHTS,
        operators=operators,
        opset=11,  # of DynamicQuantizeLinear
        group=_transposed_weight,
        fits=partial(_has_weights, per_channel=quantize.per_channel),
        expected=f"{', '.join(operators)} with float32 weights",
        write=write,
    )


def _static(request: PrecisionRequest) -> _Method:
    quantize = request.quantize
    operators = quantize.operators or tuple(sorted(_STATIC_OPERATORS))

    def write(staged: Path, names: tuple[str, ...]) -> None:
        quantization.quantize_static(
            staged,
            request.written,
            SampleReader(request.samples),
            quant_format=quantization.QuantFormat.QDQ,
            op_types_to_quantize=list(operators),
            per_channel=quantize.per_channel,
            activation_type=_ACTIVATIONS[quantize.activation],
            weight_type=quantization.QuantType.QInt8,
            nodes_to_quantize=list(names),
            use_external_data_format=True,
            calibrate_method=_METHODS[quantize.calibration.method],
            extra_options={
                # One sample at a time. The quantiser else keeps what every layer gave for all of them, and
                # cannot make histograms of samples of different shapes.
                "CalibStridedMinMax": 1,
                "ActivationSymmetric": quantize.activation == "int8",
            },
        )

    return _Method(
        supported=_STATIC_OPERATORS,
        operators=operators,
        opset=13,  # the first in which scales can be per channel
        group=partial(_use, excluded=quantize.exclude),
        fits=lambda _node, _staged: True,
        expected=f"{', '.join(operators)} on float32 tensors",
        write=write,
    )


def _quantize(request: PrecisionRequest, method: _Method) -> PrecisionReply:
    source, written, excluded = request.source, request.written, request.quantize.exclude
    with scratch_folder(written) as folder:
        model = read_checked_graph(source, request.quantize, method.supported)
        model = unshare_weights(model, method.group)
        staged = stage_source(model, source, folder, opset=method.opset)
        # The quantiser knows the main graph only.
        candidates = (
            node
            for node in staged.model.graph.node
            if node.op_type in method.operators
            and _is_known(node)
            and is_float32_only(node, staged.types)
            and method.fits(node, staged)
        )
        names = select_nodes(candidates, excluded=excluded, expected=method.expected, source=source)
        check_weights(staged, names)
        with quantizer_refusals(str(source)):
            method.write(staged.path, names)
    quantized = _find_quantized(staged, names, written)
    return describe_result(staged.nodes, operators=method.operators, quantized=quantized)


def _transposed_weight(node: onnx.NodeProto, index: int) -> str | None:
    # The quantiser transposes the weight of such a Gemm in place, as if nobody else read it.
    transposed = node.op_type == "Gemm" and index == 1 and read_attribute(node, "transB", 0)
    return node.name if transposed else None


def _use(node: onnx.NodeProto, index: int, excluded: Sequence[str]) -> tuple[object, ...]:
    # Channels lie on an axis that depends on the operator, and an excluded node keeps its float32.
    return node.op_type, index, read_attribute(node, "transB", 0), node.name in excluded


def _is_known(node: onnx.NodeProto) -> bool:
    # From opset 23 on ONNX has an Attention too, which the quantiser would take for the contrib one.
    domains = (CONTRIB,) if node.op_type in _CONTRIB_OPERATORS else PLAIN_DOMAINS
    return node.domain in domains


def _has_weights(node: onnx.NodeProto, staged: QuantizerInput, *, per_channel: bool) -> bool:
    initializers = {tensor.name: tensor for tensor in staged.model.graph.initializer}
    weights = [initializers.get(node.input[i]) for i in _WEIGHTS[node.op_type] if i < len(node.input)]
    if not weights or any(item is None or item.data_type != TensorProto.FLOAT for item in weights):
        return False
    # Per channel, ONNX Runtime writes scales for weights of more axes that its own kernel refuses.
    if node.op_type == "MatMul" and per_channel:
        return len(initializers[node.input[1]].dims) == 2
    lowered = f"{node.name}{_LOWERED}"
    is_free = all(other.name != lowered for other in staged.model.graph.node)
    return node.op_type != "Gemm" or (is_plain_gemm(node) and is_free)


def _find_quantized(staged: QuantizerInput, names: tuple[str, ...], written: Path) -> set[str]:
    """Returns the nodes that were quantised: gone, or reading other values than before."""
    graph = onnx.load(written, load_external_data=False).graph
    after = {node.name: node.input[:2] for node in graph.node}
    before = {node.name: node.input[:2] for node in staged.model.graph.node}
    return {name for name in names if (after.get(name) or after.get(f"{name}{_LOWERED}")) != before[name]}


class SampleReader(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Reads samples from disk when they are asked for."""

    def __init__(self, samples: Sequence[Path]) -> None:
        self._samples = samples
        self._next, self._end = 0, len(samples)

    def __len__(self) -> int:
        return len(self._samples)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Makes the samples from one index to another (exclusive) the next ones."""
        self._next, self._end = start_index, min(end_index, len(self._samples))

    def get_next(self) -> dict[str, Array] | None:
        """Returns the next sample's arrays by input name; None after the last."""
        if self._next >= self._end:
            return None
        self._next += 1
        return read_tensors(self._samples[self._next - 1])
