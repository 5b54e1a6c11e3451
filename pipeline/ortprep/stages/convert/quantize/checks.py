"""What the quantisation passes share: checks of a request, choosing nodes, saying what was done.

For child processes.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ortprep.errors import SpecError, StageError
from ortprep.quoting import quoted
from ortprep.runtime.loading.session import onnxruntime_errors
from ortprep.spec.conversion import QuantizeSpec
from ortprep.stages.convert.quantize.quantizer_input import QuantizerInput, list_nodes, read_named_graph
from ortprep.stages.convert.requests import PrecisionReply
from ortprep.stages.convert.weights import WeightReader, read_array
from ortprep.stages.core.graphs.graph_walk import check_nodes

CONTRIB = "com.microsoft"
_OTHER_FLOATS = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


def is_float32_only(node: onnx.NodeProto, types: dict[str, int]) -> bool:
    """Whether a node reads float32, and neither reads nor gives another floating type, as far as is known.

    `DynamicQuantizeLinear` takes nothing else, and `QuantizeLinear` did not before opset 19.
    """
    read = {types[name] for name in node.input if name in types}
    written = {types[name] for name in node.output if name in types}
    return TensorProto.FLOAT in read and not (read | written) & _OTHER_FLOATS


def select_nodes(
    candidates: Iterable[onnx.NodeProto], *, excluded: Collection[str], expected: str, source: Path
) -> tuple[str, ...]:
    """Returns the names of the candidates that are not excluded.

    Raises:
        StageError: No node is left.
    """
    possible = [node.name for node in candidates]
    selected = tuple(name for name in possible if name not in excluded)
    if not selected:
        got = f"all {len(possible)} of them excluded" if possible else "none"
        raise StageError(f"no node can be quantised: {source}\n  expected at least one {expected}, got {got}")
    return selected


def read_checked_graph(source: Path, quantize: QuantizeSpec, supported: Collection[str]) -> onnx.ModelProto:
    """Reads a model, and checks the names of operators and nodes in the spec.

    Args:
        source: The model.
        quantize: The spec's section.
        supported: Operator types that the pass can quantise.

    Raises:
        SpecError: A node or an operator type is unknown; the nearest name is suggested.
        StageError: The source is not an ONNX model.
    """
    _check_operators(quantize.operators, sorted(supported))
    model = read_named_graph(source)
    check_nodes("excluded node", quantize.exclude, [name for name, _ in list_nodes(model)])
    return model


def _check_operators(operators: Sequence[str], supported: Sequence[str]) -> None:
    for unknown in (operator for operator in operators if operator not in supported):
        nearest = difflib.get_close_matches(unknown, supported, n=1)
        raise SpecError(
            f"unknown operator to quantise: {unknown!r}\n  expected one of {', '.join(supported)}",
            hint=f"did you mean {nearest[0]!r}?" if nearest else None,
        )


def check_weights(staged: QuantizerInput, names: Collection[str]) -> None:
    """Checks that the float32 weights of nodes are numbers: a NaN would make all of a tensor's scale one.

    Raises:
        StageError: One has a NaN or an infinity.
    """
    chosen = set(names)
    weights = {tensor.name: tensor for tensor in staged.model.graph.initializer}
    reader, seen = WeightReader(staged.path.parent), set[str]()
    for node in staged.model.graph.node:
        for name in node.input if node.name in chosen else ():
            held = weights.get(name)
            if held is not None and held.data_type == TensorProto.FLOAT and name not in seen:
                seen.add(name)
                check_finite(read_array(held, reader), node=node.name, tensor=name)


def check_finite(values: NDArray[np.generic], *, node: str, tensor: str) -> None:
    """Checks that a weight has no NaN and no infinity.

    Raises:
        StageError: It has one.
    """
    finite = np.isfinite(values)
    if not finite.all():
        index = [int(axis) for axis in np.argwhere(~finite)[0]]
        raise StageError(
            f"weight is not finite: {tensor!r} of node {node!r}\n"
            f"  expected numbers, got {values[tuple(index)]} at index {index}",
            hint=f"exclude: [{quoted(node)}]",
        )


def is_plain_gemm(node: onnx.NodeProto) -> bool:
    """Whether a Gemm equals a MatMul, by a weight that may be transposed, and an Add."""
    return (
        read_attribute(node, "alpha", 1.0) == 1.0
        and read_attribute(node, "beta", 1.0) == 1.0
        and not read_attribute(node, "transA", 0)
    )


def read_attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    """Returns a number that a node has as attribute, or the default."""
    values = [helper.get_attribute_value(item) for item in node.attribute if item.name == name]
    return values[0] if values else default


@contextmanager
def quantizer_refusals(what: str) -> Iterator[None]:
    """Turns what ONNX Runtime's quantiser raises into a `StageError`; it has no errors of its own."""
    refusals = (ValueError, TypeError, KeyError, IndexError, AttributeError, AssertionError)
    try:
        yield
    except (*refusals, *onnxruntime_errors(), onnx.shape_inference.InferenceError) as error:
        raise StageError(
            f"ONNX Runtime's quantiser refused {what}\n  {type(error).__name__}: {error}"
        ) from error


def describe_result(
    nodes: Sequence[tuple[str, str]], *, operators: Collection[str], quantized: Collection[str]
) -> PrecisionReply:
    """Returns the reply of a pass."""
    converted = tuple(name for name, _ in nodes if name in quantized)
    kept = tuple(name for name, operator in nodes if operator in operators and name not in quantized)
    return PrecisionReply(len(converted) + len(kept), converted, kept)
