"""The graph passes, each in a process of its own."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence

from ortprep.children.child import run_child
from ortprep.errors import StageError
from ortprep.runtime.loading.session import onnxruntime_errors
from ortprep.runtime.machine.memory import available_bytes
from ortprep.stages.convert.pass_records import PassReply, PassRequest
from ortprep.stages.core.accuracy import convert_section
from ortprep.stages.core.contract import Context
from ortprep.stages.core.results import REFUSALS, plain_refusal

_BUGS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model that a library half knows makes it raise; the libraries have no errors of their own."""


def change_graph(request: PassRequest) -> PassReply:
    """Child function: writes the model that a pass makes.

    Raises:
        StageError: The pass refuses the model.
        SpecError: The spec names what the model, or a library, does not have.
        MissingExtraError: A library is not installed.
        OSError: A file cannot be read, or the disk is full.
    """
    if request.name == "fusion":
        from ortprep.stages.convert.fusion import fuse as change
    elif request.name in ("fp16", "bf16"):
        from ortprep.stages.convert.half import convert_half as change
    elif request.name in ("int8-weights", "int4-weights"):
        from ortprep.stages.convert.weight_only import quantize_weights as change
    else:
        from ortprep.stages.convert.int8 import quantize_int8 as change
    from onnx.shape_inference import InferenceError
    from onnx.version_converter import ConvertError

    try:
        return change(request)
    except (*_BUGS, *onnxruntime_errors(), InferenceError, ConvertError) as error:
        raise StageError(
            f"{request.name} failed: {request.source.name}\n"
            f"  expected a model that its library knows, got {type(error).__name__}: {error}",
            hint="fusion: {disable: [attention]}  (or the fusion whose pattern does not match)"
            if request.name == "fusion"
            else None,
        ) from error


def run_pass(context: Context, request: PassRequest) -> PassReply:
    """Runs a pass in a child process, with the spec's deadline; removes what it wrote if it fails.

    Its process gets no more memory than is free: a small model can make a library fill all there is.

    Raises:
        StageError: The pass refuses the model.
        SpecError: The spec names what the model does not have, or a sample cannot calibrate.
        ChildError: Its process died, or passed the deadline.
    """
    folder = request.written.parent
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return _run_in_child(context, request)
    except BaseException:  # cleans up, and raises again
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run_in_child(context: Context, request: PassRequest) -> PassReply:
    timeout_s = convert_section(context.spec).timeout_s
    return run_child(change_graph, request, timeout_s=timeout_s, memory_bytes=available_bytes()).value


def rank_nodes(context: Context, request: PassRequest, nodes: Sequence[str]) -> list[str] | None:
    """Returns quantised nodes by the error that each makes by itself, the smallest first; None if unknown.

    Args:
        context: The task.
        request: The request whose model still lies where it was written.
        nodes: The nodes that it quantised.
    """
    try:
        errors = _run_in_child(context, dataclasses.replace(request, measures_errors=True)).errors
    except REFUSALS as error:
        context.say(f"errors of single nodes were not measured: {plain_refusal(error.message)}")
        return None
    ranked = sorted(nodes, key=errors.__getitem__)
    worst = ", ".join(f"{name} ({errors[name]:.1%})" for name in ranked[:-4:-1])
    context.say(f"largest errors of single nodes: {worst}")
    return ranked
