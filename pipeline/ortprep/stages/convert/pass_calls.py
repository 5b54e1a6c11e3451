"""Which pass does what the spec asks for, and its request. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ortprep.spec.conversion import ConvertSpec, FusionSpec
from ortprep.stages.convert.pass_requests import (
    BindRequest,
    DynamicRequest,
    FusionRequest,
    HalfRequest,
    PassRequest,
    StaticRequest,
    WeightsRequest,
)

_CONVERT = "ortprep.stages.convert"
_PRODUCTS = ("MatMul", "Gemm", "LSTM", "GRU", "com.microsoft.Attention")

FUSERS: Mapping[str, str] = {
    "onnxruntime": f"{_CONVERT}.fusion.fuse:fuse",
    "onnxruntime-tools": f"{_CONVERT}.fusion.onnxruntime_tools:fuse_with_tools",
}
"""Child function by library. One process cannot have both: their modules have the same names."""


@dataclass(frozen=True)
class PassCall:
    """A pass that is to be run in a process of its own.

    Attributes:
        name: For records, as `PassRecord.name` has it.
        function: `module:function` of the child.
        make_request: Returns its request, given `source` and `written`.
    """

    name: str
    function: str
    make_request: Callable[..., PassRequest]


def call_of(
    convert: ConvertSpec,
    precision: str,
    *,
    mode: str = "dynamic",
    kept: Sequence[str] = (),
    clip: bool = False,
    samples: Sequence[Path] = (),
) -> PassCall:
    """Returns the pass that makes a precision.

    Args:
        convert: The spec's section.
        precision: `fp16`, `mixed`, `bf16`, `int8` or `int4`.
        mode: How int8 is made, as `choose_mode` returns it.
        kept: Nodes that stay in fp32 besides those of the spec.
        clip: Whether weights that do not fit are clipped, whatever the spec says.
        samples: What ranges are calibrated with.
    """
    if precision == "int4":
        return _quantized(convert, "weight_only", 4, kept, samples)
    if precision == "int8":
        return _quantized(convert, mode, 8, kept, samples)
    half, is_bf16 = convert.half, precision == "bf16"
    request = partial(
        HalfRequest,
        dtype="bfloat16" if is_bf16 else "float16",
        # Neither numpy nor a job has bf16 to feed.
        keep_io=half.keep_io or is_bf16,
        blocked_operators=half.block_operators,
        blocked_nodes=tuple(sorted({*half.keep_nodes, *kept})),
        clip=clip or half.clip,
    )
    return PassCall("bf16" if is_bf16 else "fp16", f"{_CONVERT}.half.convert:convert_half", request)


def fusion_call(fusion: FusionSpec) -> PassCall:
    """Returns the pass that fuses transformer subgraphs."""
    name = "fusion" if fusion.library == "onnxruntime" else f"fusion ({fusion.library})"
    return PassCall(
        name, FUSERS[fusion.library], partial(FusionRequest, **fusion.model_dump(exclude={"library"}))
    )


def bind_call(binding: Mapping[str, int]) -> PassCall:
    """Returns the pass that binds symbolic dimensions."""
    return PassCall(
        "shapes", f"{_CONVERT}.shapes:bind_shapes", partial(BindRequest, dimensions=dict(binding))
    )


def choose_mode(convert: ConvertSpec, target: str, operators: Mapping[str, int]) -> str:
    """Returns how int8 is made where the spec leaves it open.

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


def _quantized(
    convert: ConvertSpec, mode: str, bits: int, kept: Sequence[str], samples: Sequence[Path]
) -> PassCall:
    quantize = convert.quantize
    exclude = tuple(sorted({*quantize.exclude, *kept}))
    if mode == "weight_only":
        weights = partial(
            WeightsRequest,
            exclude=exclude,
            operators=quantize.operators,
            bits=bits,
            block_size=quantize.block_size,
            symmetric=quantize.symmetric,
        )
        return PassCall(f"int{bits}-weights", f"{_CONVERT}.quantize.weight_only:quantize_weights", weights)
    if mode == "static":
        static = partial(
            StaticRequest,
            exclude=exclude,
            operators=quantize.operators,
            per_channel=quantize.per_channel,
            samples=tuple(map(str, samples)),
            method=quantize.calibration.method,
            activation=quantize.activation,
        )
        return PassCall("int8-static", f"{_CONVERT}.quantize.int8:quantize_static", static)
    dynamic = partial(
        DynamicRequest, exclude=exclude, operators=quantize.operators, per_channel=quantize.per_channel
    )
    return PassCall("int8-dynamic", f"{_CONVERT}.quantize.int8:quantize_dynamic", dynamic)
