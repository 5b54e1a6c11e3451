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

from pipeline.errors import SpecError, StageError
from pipeline.runtime.loading.session import onnxruntime_errors
from pipeline.stages.convert.passes.external_weights import read_array
from pipeline.stages.convert.passes.quantize_requests import QuantizeReply
from pipeline.stages.convert.passes.staging import Staged
from pipeline.stages.convert.weights import WeightReader
from pipeline.stages.graphs.graph_walk import values_bytes, walk_graphs, walk_initializers

CONTRIB = "com.microsoft"
_OTHER_FLOATS = frozenset({TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


def is_float32_only(node: onnx.NodeProto, types: dict[str, int]) -> bool:
    """Whether a node reads float32, and neither reads nor gives another floating type, as far as is known.

    `DynamicQuantizeLinear` takes nothing else, and `QuantizeLinear` did not before opset 19.
    """
    read = {types[name] for name in node.input if name in types}
    given = {types[name] for name in node.output if name in types}
    return TensorProto.FLOAT in read and not (read | given) & _OTHER_FLOATS


def select_nodes(
    candidates: Iterable[onnx.NodeProto], *, excluded: Collection[str], expected: str, source: Path
) -> tuple[str, ...]:
    """Returns the names of nodes to quantise: those that can be, less the excluded.

    Args:
        candidates: Those that can be, in topological order.
        excluded: Names.
        expected: What the candidates were, in words.
        source: For the error.

    Raises:
        StageError: There is none.
    """
    possible = [node.name for node in candidates]
    selected = tuple(name for name in possible if name not in excluded)
    if not selected:
        got = f"all {len(possible)} of them excluded" if possible else "none"
        raise StageError(f"no node can be quantised: {source}\n  expected at least one {expected}, got {got}")
    return selected


def check_excluded(exclude: Sequence[str], model: onnx.ModelProto) -> None:
    """Checks that every excluded node is one of the model's.

    Raises:
        SpecError: One is not; the nearest name is suggested.
    """
    names = [node.name for graph in walk_graphs(model) for node in graph.node]
    _check_known("excluded node", exclude, names)


def check_operators(operators: Sequence[str], supported: Collection[str]) -> None:
    """Checks that a pass can quantise these operator types.

    Raises:
        SpecError: It cannot.
    """
    _check_known("operator to quantise", operators, sorted(supported), listed=True)


def _check_known(what: str, given: Sequence[str], known: Sequence[str], *, listed: bool = False) -> None:
    unknown = next((name for name in given if name not in set(known)), None)
    if unknown is None:
        return
    nearest = difflib.get_close_matches(unknown, known, n=1)
    expected = f"one of {', '.join(known)}" if listed else f"one of the {len(known)} nodes of the model"
    raise SpecError(
        f"unknown {what}: {unknown!r}\n  expected {expected}",
        hint=f"perhaps {nearest[0]!r} is meant" if nearest else None,
    )


def check_weights(staged: Staged, names: Collection[str]) -> None:
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
            hint=f"exclude: [{node}]",
        )


def is_plain_gemm(node: onnx.NodeProto) -> bool:
    """Whether a Gemm is no more than a MatMul, of a weight transposed or not, and an Add."""
    return (
        read_attribute(node, "alpha", 1.0) == 1.0
        and read_attribute(node, "beta", 1.0) == 1.0
        and not read_attribute(node, "transA", 0)
    )


def read_attribute(node: onnx.NodeProto, name: str, default: float) -> float:
    """Returns a number that a node has as attribute, or the default."""
    found = [helper.get_attribute_value(item) for item in node.attribute if item.name == name]
    return found[0] if found else default


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
    nodes: Sequence[tuple[str, str]], written: Path, *, operators: Collection[str], quantized: Collection[str]
) -> QuantizeReply:
    """Says what a pass did.

    Args:
        nodes: Those of the source, names and operators, in topological order.
        written: What was written.
        operators: Operator types that were to be quantised.
        quantized: Names of nodes that were.
    """
    done_names = set(quantized)
    done = tuple(name for name, _ in nodes if name in done_names)
    kept = tuple(name for name, operator in nodes if operator in operators and name not in done_names)
    after = onnx.load(written, load_external_data=False)
    size_bytes = sum(values_bytes(tensor) for tensor in walk_initializers(after))
    return QuantizeReply(quantized=done, kept=kept, eligible=done, weights_bytes=size_bytes)
