"""The graph passes, and how one runs in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TypeVar

from ortprep.bundle.conversion_record import PassRecord
from ortprep.children.child import run_child
from ortprep.stages.convert.requests import FusionReply, PassRequest, PrecisionReply
from ortprep.stages.core.accuracy import convert_section
from ortprep.stages.core.contract import Context

R = TypeVar("R")


def fuse_transformers(request: PassRequest) -> FusionReply:
    """Child function: see `fusion.fuse`."""
    from ortprep.stages.convert.fusion import fuse

    return fuse(request)


def convert_precision(request: PassRequest) -> PrecisionReply:
    """Child function: writes a model in another precision.

    Raises:
        StageError: The model cannot be converted.
        SpecError: The spec names a node or an operator that does not exist.
        OSError: A file cannot be read, or the disk is full.
    """
    if request.name in ("fp16", "bf16"):
        from ortprep.stages.convert.half import convert_half

        return convert_half(request)
    if request.name.endswith("weights"):
        from ortprep.stages.convert.weight_only import quantize_weights

        return quantize_weights(request)
    from ortprep.stages.convert.int8 import quantize_int8

    return quantize_int8(request)


def run_pass(
    context: Context, name: str, function: Callable[[PassRequest], R], request: PassRequest
) -> tuple[R, PassRecord]:
    """Runs a pass in a child process; removes what it wrote if it fails.

    Args:
        context: The task; its spec has the deadline.
        name: The pass, as `PassRecord.name` has it.
        function: The child function.
        request: Its request.

    Raises:
        StageError: The pass refuses the model.
        SpecError: The spec names what the model does not have.
        ChildError: Its process died, or passed the spec's deadline.
    """
    folder = request.written.parent
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        reply = run_child(function, request, timeout_s=convert_section(context.spec).timeout_s)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return reply.value, PassRecord(name, round(reply.elapsed_s * 1e3, 3), reply.peak_rss_bytes)
