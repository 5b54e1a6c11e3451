"""The graph passes: which one makes what the spec asks for, and how one runs in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from ortprep.bundle.conversion_record import PassRecord
from ortprep.children.child import run_child
from ortprep.errors import ResourceError
from ortprep.runtime.machine.process_memory import available_bytes
from ortprep.spec.conversion import ConvertSpec, FusionSpec
from ortprep.stages.convert.requests import HALVES, FusionReply, PassRequest, PrecisionReply
from ortprep.stages.core.contract import Context
from ortprep.stages.core.sources import Graph

R = TypeVar("R")

FACTORS = {
    "fusion": (1.4, 2.2),
    "fusion (onnxruntime-tools)": (1.4, 2.2),
    "int8-dynamic": (3.1, 3.1),
    "int8-static": (3.1, 3.1),
}
"""Largest resident set of each pass whose library holds the whole model, in sizes of its weights: if they are
in external data, and if they are in the model file.

Measured as docs/performance.md says; passes that are not named stream weights, tensor by tensor.
"""

_OVERHEAD_BYTES = 300 * 2**20
_WORTH_SAYING_BYTES = 2**30
_PRODUCTS = ("MatMul", "Gemm", "LSTM", "GRU", "com.microsoft.Attention")


def fuse_transformers(request: PassRequest) -> FusionReply:
    """Child function: fuses the subgraphs of transformers with the library of the spec.

    Raises:
        StageError: The library cannot fuse the model.
        MissingExtraError: The library is not installed.
        OSError: A file cannot be read, or the disk is full.
    """
    from ortprep.stages.convert.fusion import fuse

    return fuse(request)


def convert_precision(request: PassRequest) -> PrecisionReply:
    """Child function: writes a model in another precision.

    Raises:
        StageError: The model cannot be converted.
        SpecError: The spec names a node or an operator that does not exist.
        OSError: A file cannot be read, or the disk is full.
    """
    if request.name in HALVES:
        from ortprep.stages.convert.half import convert_half

        return convert_half(request)
    if request.name.endswith("weights"):
        from ortprep.stages.convert.weight_only import quantize_weights

        return quantize_weights(request)
    from ortprep.stages.convert.int8 import quantize_int8

    return quantize_int8(request)


def fusion_name(fusion: FusionSpec) -> str:
    """Returns the name of a fusion for records; that of the usual library is short."""
    return "fusion" if fusion.library == "onnxruntime" else f"fusion ({fusion.library})"


def precision_request(
    convert: ConvertSpec,
    precision: str,
    *,
    mode: str,
    source: Path,
    written: Path,
    kept: Collection[str] = (),
    clip: bool = False,
    samples: Sequence[Path] = (),
) -> PassRequest:
    """Returns the request that makes a precision.

    Args:
        convert: The spec's section.
        precision: `fp16`, `mixed`, `bf16`, `int8` or `int4`.
        mode: How int8 is made, as `choose_mode` returns it.
        source: The model.
        written: The model to write.
        kept: Nodes that stay in fp32 besides those of the spec.
        clip: Whether weights that do not fit are clipped, whatever the spec says.
        samples: Samples for calibration.
    """
    half, quantize = convert.half, convert.quantize
    names = {"fp16": "fp16", "mixed": "fp16", "bf16": "bf16", "int4": "int4-weights"}
    return PassRequest(
        source=source,
        written=written,
        name=names.get(precision, f"int8-{'weights' if mode == 'weight_only' else mode}"),
        half=half.model_copy(
            update={
                # Neither numpy nor a job has bf16 to feed.
                "keep_io": half.keep_io or precision == "bf16",
                "keep_nodes": tuple(sorted({*half.keep_nodes, *kept})),
                "clip": clip or half.clip,
            }
        ),
        quantize=quantize.model_copy(update={"exclude": tuple(sorted({*quantize.exclude, *kept}))}),
        samples=tuple(samples),
    )


def choose_mode(convert: ConvertSpec, target: str, operators: Mapping[str, int]) -> str:
    """Returns how int8 is made if the spec leaves it open: `dynamic`, `static` or `weight_only`.

    ONNX Runtime 1.31's CUDA provider has no kernel for what dynamic quantisation writes, and none for
    calibrated integers that would be faster than floats; it has `MatMulNBits`. On the CPU a convolution whose
    activations are quantised as they come is slower than in fp32 (SqueezeNet: 65 ms against 19), with
    calibrated ranges it is faster (7 ms).
    """
    if convert.quantize.mode != "auto":
        return convert.quantize.mode
    if target == "cuda":
        return "weight_only"
    products = sum(operators.get(name, 0) for name in _PRODUCTS)
    return "static" if operators.get("Conv", 0) > products else "dynamic"


def run_pass(
    context: Context, name: str, function: Callable[[PassRequest], R], request: PassRequest, *, parent: Graph
) -> tuple[R, PassRecord]:
    """Runs a pass in a child process; removes what it wrote if it fails.

    Args:
        context: The task; its spec has the deadline.
        name: The pass, as `PassRecord.name` has it.
        function: The child function.
        request: Its request.
        parent: The graph that the model is made of.

    Raises:
        StageError: The pass refuses the model.
        SpecError: The spec names what the model does not have.
        ResourceError: The pass needs more memory than there is.
        ChildError: Its process died, or passed the spec's deadline.
    """
    description, folder = parent.description, request.written.parent
    size_bytes = description.source.initializer_bytes
    message = require_memory(name, size_bytes, external=description.interface.external)
    if message is not None:
        context.say(message)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    timeout_s = None if context.spec.convert is None else context.spec.convert.timeout_s
    try:
        reply = run_child(function, request, timeout_s=timeout_s)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return reply.value, PassRecord(name, round(reply.elapsed_s * 1e3, 3), reply.peak_rss_bytes)


def require_memory(name: str, weights_bytes: int, *, external: bool) -> str | None:
    """Returns a line about the memory a pass needs, None if it streams its weights or needs little.

    Raises:
        ResourceError: There is not as much.
    """
    factors = FACTORS.get(name)
    needed = 0 if factors is None else int(factors[not external] * weights_bytes) + _OVERHEAD_BYTES
    if needed < _WORTH_SAYING_BYTES:
        return None
    available = available_bytes()
    if needed > available:
        raise ResourceError(
            f"not enough memory for {name}: its library loads the whole model\n"
            f"  expected {needed / 2**30:.1f} GiB, got {available / 2**30:.1f} GiB",
            hint="convert: {quantize: {mode: weight_only}} streams its weights, as fp16 and bf16 "
            "do; or use a machine with more memory",
        )
    return f"{name} loads the whole model: about {needed / 2**30:.1f} of {available / 2**30:.1f} GiB"
