"""The child process that writes an optimised graph and says what is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.manifest import LintFinding
from ortprep.bundle.onnx_wire import read_skeleton
from ortprep.bundle.session_record import SessionPlan
from ortprep.runtime.loading.session import build_session
from ortprep.stages.optimize.lint import LintContext, find_operators, lint_model, location_of

if TYPE_CHECKING:
    import onnx

REPAIRED = "repaired"

_CHEAP = frozenset(
    {
        "Cast", "Concat", "Constant", "ConstantOfShape", "Expand", "Flatten", "Gather", "Identity", "Reshape",
        "Shape", "Size", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze",
        "ReorderInput", "ReorderOutput",
    }
)  # fmt: skip
"""Operators that move or describe data: two of them side by side are no reason for two threads."""


@dataclass(frozen=True)
class SaveRequest:
    """What to write, or, without a plan, what to look at.

    Attributes:
        model: Absolute path of the model file, in a folder of its own; its data comes to lie beside it.
        context: What the lint judges it against.
        plan: The session that writes it; None if the files are already there.
    """

    model: Path
    context: LintContext
    plan: SessionPlan | None


@dataclass(frozen=True)
class SaveResult:
    """What is in the written file.

    Attributes:
        findings: What the lint says, after repairs.
        domains: Operator domains it uses, sorted.
        opsets: Opset version by domain.
        ir_version: ONNX IR version.
        onnxruntime: Version that wrote it.
        operators: Operator types without domain, subgraphs included, sorted.
        width: Maximum number of nodes with real work that could run at the same time.
    """

    findings: tuple[LintFinding, ...]
    domains: tuple[str, ...]
    opsets: Mapping[str, int]
    ir_version: int
    onnxruntime: str
    operators: tuple[str, ...]
    width: int
    has_1d_convolutions: bool


def save_optimized(request: SaveRequest) -> SaveResult:
    """Child function: writes the file if there is a plan, and describes it.

    Raises:
        LoadError: ONNX Runtime refuses the model, or cannot write.
    """
    import onnx
    import onnxruntime

    from ortprep.stages.core.graphs.graph_walk import walk_tensors

    repairs: tuple[LintFinding, ...] = ()
    if request.plan is None:
        # A source keeps the data files that it came with.
        folder = request.model.parent
        data_files = {str(path.relative_to(folder)) for path in folder.rglob("*")}
        model = onnx.ModelProto.FromString(read_skeleton(request.model))
    else:
        # The session is dropped at once, so its memory is free before the file is read.
        build_session(request.plan)
        data = request.model.with_name(f"{request.model.name}.data")
        data_files = {data.name}
        model = onnx.load(request.model, load_external_data=False)
        repairs = _repair(model, request)
        if all(location_of(tensor) is None for tensor in walk_tensors(model)):
            # ONNX Runtime makes the file whether or not a weight is large enough for it.
            data.unlink(missing_ok=True)
    return SaveResult(
        findings=(*repairs, *lint_model(model, request.context, data_files=data_files)),
        domains=tuple(sorted({_domain(node.domain) for node in find_operators(model)})),
        opsets={_domain(entry.domain): entry.version for entry in model.opset_import},
        ir_version=model.ir_version,
        onnxruntime=onnxruntime.__version__,
        operators=tuple(sorted({node.op_type for node in find_operators(model)})),
        width=measure_width(model.graph),
        has_1d_convolutions=has_1d_convolutions(model.graph),
    )


def _repair(model: onnx.ModelProto, request: SaveRequest) -> tuple[LintFinding, ...]:
    """Takes hazards out of a written graph and writes it again; cheap, since its weights are elsewhere."""
    from ortprep.stages.optimize.repairs import remove_copies, remove_phantom_inputs

    copies = remove_copies(model) if request.context.variant == "cuda" else 0
    phantoms = remove_phantom_inputs(model, request.context.inputs)
    if copies or phantoms:
        repaired = request.model.with_name(f"{request.model.name}.repaired")
        repaired.write_bytes(model.SerializeToString())
        repaired.replace(request.model)
    repairs = (
        ("memcpy-node", copies, "copies between devices that ONNX Runtime adds at every load", "#11348"),
        ("interface", phantoms, "inputs left over from initializers that were optimised away", ""),
    )
    return tuple(
        LintFinding(rule, REPAIRED, request.model.name, f"removed: {count} {what}", reference)
        for rule, count, what, reference in repairs
        if count
    )


def _domain(domain: str) -> str:
    return "" if domain == "ai.onnx" else domain


def measure_width(graph: onnx.GraphProto) -> int:
    """Returns the maximum number of nodes with real work at one depth."""
    depth_of: dict[str, int] = {}
    counts: dict[int, int] = {}
    for node in graph.node:  # in topological order
        depth = max((depth_of.get(name, 0) for name in node.input), default=0)
        if node.op_type not in _CHEAP:
            depth += 1
            counts[depth] = counts.get(depth, 0) + 1
        for name in node.output:
            depth_of[name] = depth
    return max(counts.values(), default=0)


def has_1d_convolutions(graph: onnx.GraphProto) -> bool:
    """Returns whether a convolution of the main graph has a kernel of one axis."""
    ranks = {tensor.name: len(tensor.dims) for tensor in graph.initializer}
    return any(
        node.op_type.endswith("Conv") and len(node.input) > 1 and ranks.get(node.input[1]) == 3
        for node in graph.node
    )
