"""The child process that writes an optimised graph and says what is in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ortprep.bundle.manifest import LintFinding
from ortprep.bundle.model_facts import ModelFacts
from ortprep.bundle.onnx_wire import read_skeleton
from ortprep.bundle.session_record import SessionPlan
from ortprep.runtime.loading.session import build_session
from ortprep.stages.fetch.inspection import describe_model
from ortprep.stages.optimize.lint import LintContext, lint_model, location_of

if TYPE_CHECKING:
    import onnx

REPAIRED = "repaired"


@dataclass(frozen=True)
class SaveRequest:
    """A file to write, or, without a plan, to look at.

    Attributes:
        model: Absolute path of the model file, in a folder of its own; its data comes to lie beside it.
        context: Facts that the lint judges it against.
        plan: The session that writes it; None if the files are already there.
    """

    model: Path
    context: LintContext
    plan: SessionPlan | None


@dataclass(frozen=True)
class SaveResult:
    """Content of the written file.

    Attributes:
        facts: Description of its graph.
        findings: Findings of the lint, after repairs.
        onnxruntime: Version that wrote it.
    """

    facts: ModelFacts
    findings: tuple[LintFinding, ...]
    onnxruntime: str


def save_optimized(request: SaveRequest) -> SaveResult:
    """Child function: writes the file if there is a plan, and describes it.

    Raises:
        LoadError: ONNX Runtime refuses the model, or cannot write.
    """
    import onnx
    import onnxruntime

    from ortprep.stages.core.graph_walk import walk_tensors

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
    findings = (*repairs, *lint_model(model, request.context, data_files=data_files))
    return SaveResult(describe_model(model), findings, onnxruntime.__version__)


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
