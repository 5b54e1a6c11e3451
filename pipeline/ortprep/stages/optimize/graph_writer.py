"""The child process that writes an optimised graph and describes the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ortprep.bundle.codec import decode, encode
from ortprep.bundle.manifest import LintFinding
from ortprep.bundle.onnx_wire import read_skeleton
from ortprep.bundle.session_record import SessionPlan
from ortprep.runtime.loading.session import build_session
from ortprep.stages.optimize.graph_description import GraphDescription, describe_graph
from ortprep.stages.optimize.lint import LintContext, lint_graph

REPAIRED = "repaired"


@dataclass(frozen=True)
class SaveRequest:
    """What to write, or, without a plan, what to look at.

    Attributes:
        folder: Absolute path of the folder that is written to.
        model: Name of the model file in it.
        data: Name of its external data file.
        variant: `cpu`, `cuda` or `portable`.
        source_operators: Operators of the source model, as `SourceRecord.operators` has them.
        inputs: Names of its inputs, in order.
        outputs: Names of its outputs, in order.
        plan: The session that writes it; None if the files are already there.
    """

    folder: str
    model: str
    data: str
    variant: str
    source_operators: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
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
    """

    findings: tuple[LintFinding, ...]
    domains: tuple[str, ...]
    opsets: Mapping[str, int]
    ir_version: int
    onnxruntime: str


def save_optimized(data: Mapping[str, Any]) -> dict[str, Any]:
    """Child function, `SaveRequest` to `SaveResult`: writes the file and describes it.

    Raises:
        LoadError: ONNX Runtime refuses the model, or cannot write.
    """
    request = decode(SaveRequest, data)
    path = Path(request.folder) / request.model
    if request.plan is None:
        return dict(encode(_describe_saved(request, _describe_file(path), ())))
    # The session is dropped at once, so its memory is free before the file is read.
    build_session(request.plan)
    repairs = _repair(path, request)
    graph = _describe_file(path)
    if not graph.external:
        # ONNX Runtime makes the file whether or not a weight is large enough for it.
        path.with_name(request.data).unlink(missing_ok=True)
    return dict(encode(_describe_saved(request, graph, repairs)))


def _describe_saved(
    request: SaveRequest, graph: GraphDescription, repairs: tuple[LintFinding, ...]
) -> SaveResult:
    import onnxruntime

    sizes = _file_sizes(Path(request.folder))
    # The source keeps the data files it came with; whatever is written has one.
    data_files = sizes.keys() - {request.model} if request.plan is None else {request.data}
    context = LintContext(
        variant=request.variant,
        data_files=frozenset(data_files),
        file_sizes=sizes,
        opsets=_readable_opsets(),
        source_operators=frozenset(request.source_operators),
        inputs=request.inputs,
        outputs=request.outputs,
    )
    return SaveResult(
        findings=(*repairs, *lint_graph(graph, context)),
        domains=tuple(sorted(graph.domains)),
        opsets=graph.opsets,
        ir_version=graph.ir_version,
        onnxruntime=onnxruntime.__version__,
    )


def _describe_file(path: Path) -> GraphDescription:
    import onnx

    return describe_graph(onnx.ModelProto.FromString(read_skeleton(path)))


def _repair(path: Path, request: SaveRequest) -> tuple[LintFinding, ...]:
    """Takes hazards out of the written graph, and aligns its data.

    Its large weights are elsewhere, so reading and writing it again is cheap.
    """
    import onnx

    from ortprep.stages.optimize.alignment import align_external_data
    from ortprep.stages.optimize.repairs import remove_copies, remove_phantom_inputs

    model = onnx.load(path, load_external_data=False)
    copies = remove_copies(model) if request.variant == "cuda" else 0
    phantoms = remove_phantom_inputs(model, request.inputs)
    moved = align_external_data(model, path.with_name(request.data))
    if not copies and not phantoms and not moved:
        return ()
    repaired = path.with_name(f"{path.name}.repaired")
    repaired.write_bytes(model.SerializeToString())
    repaired.replace(path)
    repairs = (
        ("memcpy-node", copies, "copies between devices that ONNX Runtime adds at every load", "#11348"),
        ("interface", phantoms, "inputs left over from initializers that were optimised away", ""),
    )
    return tuple(
        LintFinding(rule, REPAIRED, path.name, f"removed: {count} {what}", reference)
        for rule, count, what, reference in repairs
        if count
    )


def _file_sizes(folder: Path) -> dict[str, int]:
    files = [Path(root) / name for root, _, names in os.walk(folder) for name in names]
    return {str(PurePosixPath(file.relative_to(folder))): file.stat().st_size for file in files}


def _readable_opsets() -> dict[str, int]:
    """Returns the newest operator version by domain that the installed ONNX Runtime has."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    newest: dict[str, int] = {}
    for schema in get_all_operator_schema():
        newest[schema.domain] = max(newest.get(schema.domain, 0), schema.since_version)
    return newest
