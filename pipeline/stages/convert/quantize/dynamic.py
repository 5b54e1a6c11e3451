"""8-bit weights, and activations quantised for every request: no calibration, and CPU only.

ONNX Runtime 1.31 runs the result on its CPU provider. Its CUDA provider has no `DynamicQuantizeLinear`,
`ConvInteger` or `DynamicQuantizeLSTM`, and `MatMulInteger` for two int8 inputs only, so that such a model
would go to the CPU and back at every layer (kernels named in `libonnxruntime_providers_cuda.so`).

Weights are int8 and symmetric, activations uint8: what ONNX Runtime advises on x86 with VNNI and on Arm. x86
without VNNI adds pairs of 8-bit products in 16 bits, which can saturate; weights of 7 bits (`reduce_range`)
would avoid that (https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html), but cost
accuracy everywhere: the answers of four products by random 2048² weights were off by 0.036 of their size
instead of 0.023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto
from onnxruntime import quantization

from ortprep.bundle.codec import decode, encode
from ortprep.stages.convert.pass_requests import DynamicRequest
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

OPERATORS = ("MatMul", "Gemm", "Attention", "LSTM")
"""What is quantised unless told otherwise: where int8 arithmetic is faster than float32.

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

_CONTRIB_OPERATORS = ("Attention", "EmbedLayerNormalization")
_LOWERED = "_MatMul"  # what the quantiser appends to the name of a Gemm that it makes a MatMul and an Add
_OPSET = 11  # of DynamicQuantizeLinear


def quantize_dynamic(request: Mapping[str, Any]) -> dict[str, Any]:
    """Child function, `DynamicRequest` to `PrecisionReply`: 8-bit weights, activations quantised at run time.

    Raises:
        StageError: A name or an operator is unknown, the opset is too old, nothing can be quantised, a
            weight is not finite, or ONNX Runtime's quantiser refused the model.
        OSError: The source cannot be read, or the disk is full.
    """
    wanted = decode(DynamicRequest, request)
    source, written = Path(wanted.source), Path(wanted.written)
    operators = wanted.operators or OPERATORS
    with scratch_folder(written) as folder:
        model = unshare_weights(read_checked_graph(wanted, _WEIGHTS), _group)
        staged = stage_source(model, source, folder, opset=_OPSET)
        names = select_nodes(
            _find_candidates(staged, operators, per_channel=wanted.per_channel),
            excluded=wanted.exclude,
            expected=f"{', '.join(operators)} with float32 weights",
            source=source,
        )
        check_weights(staged, names)
        with quantizer_refusals(wanted.source):
            _quantize(wanted, staged.path, operators=operators, names=names)
    quantized = _find_quantized(staged, names, written)
    return dict(encode(describe_result(staged.nodes, operators=operators, quantized=quantized)))


def _quantize(
    wanted: DynamicRequest, staged: Path, *, operators: tuple[str, ...], names: tuple[str, ...]
) -> None:
    quantization.quantize_dynamic(
        staged,
        Path(wanted.written),
        op_types_to_quantize=[*operators, "MatMul"],
        per_channel=wanted.per_channel,
        weight_type=quantization.QuantType.QInt8,
        nodes_to_quantize=[*names, *(f"{name}{_LOWERED}" for name in names)],
        use_external_data_format=True,
    )


def _group(node: onnx.NodeProto, index: int) -> str | None:
    # The quantiser transposes the weight of such a Gemm in place, as if nobody else read it.
    transposed = node.op_type == "Gemm" and index == 1 and read_attribute(node, "transB", 0)
    return node.name if transposed else None


def _find_candidates(
    staged: QuantizerInput, operators: tuple[str, ...], *, per_channel: bool
) -> Iterator[onnx.NodeProto]:
    """Yields the nodes of the main graph that can be quantised."""
    weights = {tensor.name: tensor for tensor in staged.model.graph.initializer}
    taken = {node.name for node in staged.model.graph.node}
    for node in staged.model.graph.node:
        if node.op_type not in operators or not _is_known(node):
            continue
        held = [weights.get(name) for name in _weight_names(node)]
        if not held or any(item is None or item.data_type != TensorProto.FLOAT for item in held):
            continue
        if not is_float32_only(node, staged.types):
            continue
        # Per channel, ONNX Runtime writes scales for weights of more axes that its own kernel refuses.
        if node.op_type == "MatMul" and per_channel and len(weights[node.input[1]].dims) != 2:
            continue
        if node.op_type == "Gemm" and (not is_plain_gemm(node) or f"{node.name}{_LOWERED}" in taken):
            continue
        yield node


def _is_known(node: onnx.NodeProto) -> bool:
    # From opset 23 on ONNX has an Attention too, which the quantiser would take for the contrib one.
    domains = (CONTRIB,) if node.op_type in _CONTRIB_OPERATORS else PLAIN_DOMAINS
    return node.domain in domains


def _weight_names(node: onnx.NodeProto) -> list[str]:
    return [node.input[index] for index in _WEIGHTS[node.op_type] if index < len(node.input)]


def _find_quantized(staged: QuantizerInput, names: tuple[str, ...], written: Path) -> set[str]:
    """Returns the nodes that were quantised: gone, or reading other weights than before."""
    after = {node.name: node for node in onnx.load(written, load_external_data=False).graph.node}
    quantized = set()
    for node in staged.model.graph.node:
        now = after.get(node.name) or after.get(f"{node.name}{_LOWERED}")
        if node.name in names and (now is None or _weight_names(node) != _weights_now(node, now)):
            quantized.add(node.name)
    return quantized


def _weights_now(node: onnx.NodeProto, now: onnx.NodeProto) -> list[str]:
    return [now.input[index] for index in _WEIGHTS[node.op_type] if index < len(node.input)]
