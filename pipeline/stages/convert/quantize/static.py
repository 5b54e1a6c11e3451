"""8-bit weights and activations, with ranges learned from samples: `QuantizeLinear`/`DequantizeLinear` pairs.

ONNX Runtime's CPU provider fuses the pairs into integer kernels when it optimises; its CUDA provider has no
such kernels and computes in float32 between them (kernels named in `libonnxruntime_providers_cuda.so`, 1.31).
Of formats and types its guide says: QDQ; uint8 activations with int8 weights on x86, int8 for both on Arm and
for TensorRT, where zero points have to be zero; 7-bit weights (`reduce_range`) on x86 without VNNI
(https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from onnxruntime import quantization
from onnxruntime.quantization.registry import QDQRegistry, QLinearOpsRegistry

from ortprep.bundle.codec import decode, encode
from ortprep.runtime.tensors.arrays import read_tensors
from ortprep.runtime.tensors.element_types import Array
from ortprep.stages.convert.pass_requests import StaticRequest
from ortprep.stages.convert.quantize.checks import (
    CONTRIB,
    check_weights,
    describe_result,
    is_float32_only,
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

_METHODS = {
    "minmax": quantization.CalibrationMethod.MinMax,
    "entropy": quantization.CalibrationMethod.Entropy,
    "percentile": quantization.CalibrationMethod.Percentile,
}
_ACTIVATIONS = {"uint8": quantization.QuantType.QUInt8, "int8": quantization.QuantType.QInt8}

_OPERATORS = frozenset(QDQRegistry) | frozenset(QLinearOpsRegistry)
_CONTRIB_OPERATORS = ("EmbedLayerNormalization",)
_OPSET = 13  # the first in which scales can be per channel


def quantize_static(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function, `StaticRequest` to `PrecisionReply`: writes a model with 8-bit weights and activations.

    Raises:
        StageError: A name, an operator or a method is unknown, the opset is too old, a sample is unusable,
            a weight is not finite, nothing can be quantised, or ONNX Runtime's quantiser refused the model.
        OSError: The source cannot be read, or the disk is full.
    """
    wanted = decode(StaticRequest, request)
    source, written = Path(wanted.source), Path(wanted.written)
    operators = wanted.operators or tuple(sorted(_OPERATORS))
    with scratch_folder(written) as folder:
        model = unshare_weights(
            read_checked_graph(wanted, _OPERATORS), partial(_group, excluded=wanted.exclude)
        )
        staged = stage_source(model, source, folder, opset=_OPSET)
        names = select_nodes(
            _find_candidates(staged, operators),
            excluded=wanted.exclude,
            expected=f"{', '.join(operators)} on float32 tensors",
            source=source,
        )
        check_weights(staged, names)
        with quantizer_refusals(wanted.source):
            _quantize(wanted, staged.path, operators=operators, names=names)
    quantized = _find_quantized(staged, names, written)
    return dict(encode(describe_result(staged.nodes, operators=operators, quantized=quantized)))


def _group(node: onnx.NodeProto, index: int, excluded: Sequence[str]) -> tuple[object, ...]:
    # Channels lie on an axis that depends on the operator, and an excluded node keeps its float32.
    return node.op_type, index, read_attribute(node, "transB", 0), node.name in excluded


def _quantize(
    wanted: StaticRequest, staged: Path, *, operators: tuple[str, ...], names: tuple[str, ...]
) -> None:
    quantization.quantize_static(
        staged,
        Path(wanted.written),
        SampleReader(wanted.samples),
        quant_format=quantization.QuantFormat.QDQ,
        op_types_to_quantize=list(operators),
        per_channel=wanted.per_channel,
        activation_type=_ACTIVATIONS[wanted.activation],
        weight_type=quantization.QuantType.QInt8,
        nodes_to_quantize=list(names),
        use_external_data_format=True,
        calibrate_method=_METHODS[wanted.method],
        extra_options={
            # One sample at a time. The quantiser else keeps what every layer gave for all of them, and
            # cannot make histograms of samples of different shapes.
            "CalibStridedMinMax": 1,
            "ActivationSymmetric": wanted.activation == "int8",
        },
    )


class SampleReader(quantization.CalibrationDataReader):  # type: ignore[misc]
    """Reads samples from disk when they are asked for."""

    def __init__(self, samples: Sequence[str]) -> None:
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
        return read_tensors(Path(self._samples[self._next - 1]))


def _find_candidates(staged: QuantizerInput, operators: tuple[str, ...]) -> Iterator[onnx.NodeProto]:
    """Yields the nodes of the main graph that can be quantised."""
    for node in staged.model.graph.node:
        domains = (CONTRIB,) if node.op_type in _CONTRIB_OPERATORS else PLAIN_DOMAINS
        known = node.op_type in operators and node.domain in domains
        if known and is_float32_only(node, staged.types):
            yield node


def _find_quantized(staged: QuantizerInput, names: tuple[str, ...], written: Path) -> set[str]:
    """Returns the nodes that were quantised: folded into a scale, or reading what was dequantised."""
    graph = onnx.load(written, load_external_data=False).graph
    after = {node.name: node for node in graph.node}
    before = _dequantized(staged.model.graph)
    dequantized = _dequantized(graph) - before
    return {name for name in names if name not in after or not dequantized.isdisjoint(after[name].input)}


def _dequantized(graph: onnx.GraphProto) -> set[str]:
    return {name for node in graph.node if node.op_type == "DequantizeLinear" for name in node.output}
